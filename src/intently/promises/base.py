"""What every promise file provides: one text, and how it is tried on the untouched model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from intently.report import Cell


@dataclass(frozen=True)
class Promise:
    """One statement about behaviour that an intent implies.

    `try_on` gets a `Trial` (see `intently.check`): the model, its inputs and the intent under one or more conditions.
    It returns cells of the grid as evidence and never raises for "broken".
    """

    name: str
    statement: str  # one sentence: what is promised
    applies_to: str
    how: str  # how it is tried, in words
    sources: tuple[str, ...]
    try_on: Callable[[Any], Iterable[Cell]]
    error_means: str = "outputs differ by"  # what a cell's `error` is, before the number
    per_site: bool = False  # judged at each site of a traced run rather than from outside
    since: str = "0.1"
