"""What every fault file provides: one text, one look at the evidence, one repair that would prove it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from intently.report import Severity, Source, Witness

if TYPE_CHECKING:
    from intently.sites import Site


@dataclass(frozen=True)
class Suspicion:
    """A candidate finding, before proof: where, why, and the repair that would take the symptom away.

    `repair` is an edit of the site (see `intently.edits`); None where no repair can prove the fault, with the
    reason in `unprovable`.
    """

    fault: Fault
    promise: str
    site: Site | None
    message: str
    witness: Witness
    repair: Any = None
    heads: tuple[int, ...] | None = None
    severity: Severity | None = None
    condition: str = ""
    unprovable: str = ""
    place: str = ""  # a module's path, where no site is concerned
    source: Source | None = None  # a line, where no site is concerned
    undoes: bool = False  # the repair makes a run with a switch like the run without it
    proven_by: str = ""  # set by a fault that made its own proof

    @property
    def informs(self) -> bool:
        """Whether it is a note: it explains no other fault, and hides none at the same call."""
        return (self.severity or self.fault.severity) == "note"


@dataclass(frozen=True)
class Fault:
    """A named way to break a promise.

    The texts feed `intently explain`, the reports and the docs site; there is no second copy of them. `bad` and
    `good` are complete runnable modules that define `build()`, returning a `Target`: the tests check that the first
    is flagged under this name and that the second is silent.
    """

    name: str
    stage: str  # project | score | mask | scale | normalize | aggregate | outside
    promises: tuple[str, ...]
    severity: Severity
    summary: str  # one line: the bad pattern
    symptom: str  # what a user sees
    why_silent: str
    fix: str
    bad: str
    good: str
    sources: tuple[str, ...]
    look: Callable[[Any], Iterable[Suspicion]]  # given the Examination, see intently.check
    since: str = "0.1"
