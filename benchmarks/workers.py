"""Jobs in processes of their own, a few at a time; each outcome is kept at once, so that a run goes on where it was stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any


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


def outcome(module: str, name: str, *, limit: float, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """What `python -m module --one NAME` prints as its last line, JSON; why not, where it prints none or takes too long."""
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", module, "--one", name, *arguments]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {"name": name, "why": f"longer than {limit:g} s", "seconds": limit}
    lines = said.stdout.strip().splitlines()
    took = round(time.perf_counter() - started, 1)
    try:
        return {"name": name, **json.loads(lines[-1]), "took": took}
    except (IndexError, ValueError):
        last = (said.stderr.strip().splitlines() or ["no word"])[-1]
        return {"name": name, "why": f"the process ended with status {said.returncode}: {last[:200]}", "took": took}


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
