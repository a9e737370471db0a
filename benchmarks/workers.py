"""Jobs in processes of their own, a few at a time; each outcome is kept at once, so that a run goes on where it was stopped."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Each job is forked from one process that has imported what takes seconds to import.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
_MAKER = multiprocessing.get_context("forkserver")
_MAKER.set_forkserver_preload(["torch", "transformers.modeling_utils", "intently"])


class State:
    """Outcomes by name, one line of JSON each, appended as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.done[row["name"]] = row

    def add(self, row: dict[str, Any]) -> None:
        self.done[row["name"]] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def outcome(module: str, name: str, *, limit: float) -> dict[str, Any]:
    """What `module.one(name)` gives in a process of its own; why not, where it fails, dies or takes too long."""
    started = time.perf_counter()
    mine, theirs = _MAKER.Pipe(duplex=False)
    process = _MAKER.Process(target=_answer, args=(module, name, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        answered = mine.recv() if mine.poll(limit) else {"why": f"longer than {limit:g} s", "seconds": limit}
    except EOFError:  # the process died before it could answer
        process.join()
        answered = {"why": f"the process ended with status {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        mine.close()
    return {"name": name, **answered, "took": round(time.perf_counter() - started, 1)}


def _answer(module: str, name: str, to: Connection) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # what models print, from Python or from below it
    os.dup2(silence, 2)
    warnings.simplefilter("ignore")
    try:
        to.send(importlib.import_module(module).one(name))
    except Exception as error:
        to.send({"why": f"{type(error).__name__}: {error}"[:200]})


def each(
    names: Sequence[str], run: Callable[[str], dict[str, Any]], state: State, processes: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The outcome of every name, as they end; names that were done before are given first."""
    for name in names:
        if name in state.done:
            yield name, state.done[name]
    left = [name for name in names if name not in state.done]
    pool = ThreadPoolExecutor(processes)
    try:
        jobs = {pool.submit(run, name): name for name in left}
        for job in as_completed(jobs):
            state.add(job.result())
            yield jobs[job], job.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
