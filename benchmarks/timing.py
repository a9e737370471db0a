"""Times of alternatives, taken in turns, so that what slows the machine slows them all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements between its quartiles."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quartiles of the values; a single value is all three.

        >>> Spread.of([5.0, 1.0, 3.0, 2.0, 4.0])
        Spread(low=2.0, middle=3.0, high=4.0)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        digits = 2 if self.middle < 10 else 1
        return f"{self.middle:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    budget: float = 10.0,
    least: int = 3,
    most: int = 15,
    warm: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call, round by round: every round runs every call once, every other round in reverse order.

    Args:
        calls: the alternatives by name.
        budget: seconds after which no new round starts, once there are `least` rounds.
        least, most: how many rounds at least and at most.
        warm: whether the calls have run before; else each runs once more at first, uncounted.
        clock: tells the seconds.
    """
    for call in () if warm else calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    started = clock()
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # the collector would charge one alternative for what another left behind
    try:
        for number in range(most):
            if number >= least and clock() - started >= budget:
                break
            for name in list(calls)[:: -1 if number % 2 else 1]:
                start = clock()
                calls[name]()
                times[name].append(clock() - start)
    finally:
        if collecting:
            gc.enable()
    return times


def ratio(times: Sequence[float], others: Sequence[float]) -> Spread:
    """How many times as long as the other: the quotient of each round, so that a slow round counts against both.

    >>> ratio([2.0, 20.0, 6.0], [1.0, 10.0, 2.0])
    Spread(low=2.0, middle=2.0, high=2.5)
    """
    return Spread.of([one / other for one, other in zip(times, others, strict=True)])


def percent(spread: Spread) -> str:
    """What a ratio adds, in percent.

    >>> percent(Spread(0.99, 1.02, 1.035))
    '+2.0 % (-1.0 to +3.5)'
    """
    low, middle, high = ((each - 1) * 100 for each in (spread.low, spread.middle, spread.high))
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"


def milliseconds(times: Sequence[float]) -> str:
    """The median in milliseconds, with three figures.

    >>> milliseconds([0.0123456]), milliseconds([2.5])
    ('12.3', '2500')
    """
    value = statistics.median(times) * 1e3
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f}"


def note() -> str:
    """How the figures of a table were taken, for the line above it."""
    threads = torch.get_num_threads()
    return (
        f"{threads} thread{'s' * (threads > 1)}, {torch.backends.cpu.get_cpu_capability()}; "
        "alternatives in turns, medians (quartiles), released memory kept for reuse"
    )
