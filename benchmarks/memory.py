"""Peak memory of a call, in two readings: what was alive at once, and what the process came to occupy.

The profiler hears every allocation and release of torch's CPU allocator, those inside kernels too, which a count of the
tensors seen from Python would miss. The resident size also holds what was released but not given back to the system.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STATUS = Path("/proc/self/status")


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that the call held at once, its result included, what was there before it not.

    >>> import torch
    >>> peak_bytes(lambda: torch.zeros(1000, 250).exp())                     # two of 1 MB at once
    2000000
    """
    gc.collect()
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    held = peak = 0
    events: Any = watched.profiler.kineto_results.events()  # type: ignore[union-attr]  # in the order of time
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def resident_bytes(
    make: Callable[..., Callable[[], object]], *arguments: object, warm: tuple[object, ...]
) -> int | None:
    """By how many bytes a fresh process grows at most while `make(*arguments)()` runs, after `make(*warm)()` has run.

    Args:
        make: a function of a module, for the fresh process imports it; what it makes first does not count.
        warm: arguments of a small call, which loads what any call needs.

    Returns:
        None where the system is not Linux, which tells the peak of one address space: `ru_maxrss` would count the
        parent's memory too, of which a process is a copy until it loads its own program.
    """
    if not STATUS.exists():
        return None
    with _usual_allocator(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(_grown, torch.get_num_threads(), make, arguments, warm).result()


@contextmanager
def _usual_allocator() -> Iterator[None]:
    """A process started in here has the system's allocator as it comes, whatever this one was started with."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("MALLOC_")}
    try:
        yield
    finally:
        os.environ.update(kept)


def _grown(
    threads: int, make: Callable[..., Callable[[], object]], arguments: tuple[object, ...], warm: tuple[object, ...]
) -> int:
    torch.set_num_threads(threads)
    make(*warm)()
    call = make(*arguments)
    before = _highest()
    call()
    return _highest() - before


def _highest() -> int:
    """The most bytes this process has ever occupied."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler announces itself on stderr, past Python's; that says nothing here."""
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
