"""Names for what is broken: every fault looks at the evidence, and one cause keeps one name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from intently.errors import CannotCheck
from intently.faults import FAULTS, Examination, Suspicion
from intently.promises import PROMISES
from intently.report import Cell
from intently.targets.running import PLAIN

# The first of two names for one call explains the second: an inverted mask also leaks and also hides.
_EXPLAINS = {
    "mask-inverted": (
        "padding-leak", "mask-ignored", "causal-leak", "causal-extra", "window-off-by-one", "window-ignored", "memory-mask-ignored",
        "documents-leak", "mask-misrouted", "not-finite",
    ),
    "cross-miswired": (
        "causal-leak", "causal-extra", "padding-leak", "mask-ignored", "memory-mask-ignored", "window-off-by-one",
        "window-ignored",
    ),
    "mask-misrouted": ("padding-leak", "mask-ignored", "causal-extra", "window-off-by-one", "memory-mask-ignored", "not-finite"),
    "memory-mask-ignored": ("padding-leak", "mask-ignored"),
    "mask-ignored": (
        "padding-leak", "causal-leak", "window-ignored", "documents-leak", "scale-wrong-width", "not-normalized",
    ),
    "causal-leak": ("window-off-by-one", "window-ignored"),
    "heads-interleaved": ("causal-leak", "causal-extra", "padding-leak", "mask-ignored", "documents-leak"),
    "softmax-wrong-axis": ("mask-ignored",),
    "scale-missing": ("saturated-logits",),
    "scale-wrong-width": ("saturated-logits",),
    "causal-extra": ("window-off-by-one", "window-ignored", "not-finite"),
    # Pieces, whose cache may hold no more than the window, cannot follow a whole forward without it.
    "window-ignored": ("cache-misaligned",),
    "window-off-by-one": ("cache-misaligned",),
}  # fmt: skip


class Selection:
    """Which promises and faults are wanted, by the names of either. Raises `CannotCheck` for a name that nothing has."""

    def __init__(self, select: Sequence[str] | None, ignore: Sequence[str] | None):
        known = [*PROMISES, *FAULTS]
        for name in (*(select or ()), *(ignore or ())):
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise CannotCheck(
                    f"no promise or fault is named {name!r}", hint=near[0] if near else "intently explain"
                )
        self.select, self.ignore = select, ignore or ()

    def promise(self, name: str) -> bool:
        """Whether a promise is wanted by its name or by that of a fault that breaks it."""
        if name in self.ignore:
            return False
        if self.select is None:
            return True
        return name in self.select or any(name in FAULTS[n].promises for n in self.select if n in FAULTS)

    def fault(self, name: str) -> bool:
        """Whether a fault is wanted by its name or by that of a promise that it breaks."""
        promises = FAULTS[name].promises
        if name in self.ignore or all(p in self.ignore for p in promises):
            return False
        return self.select is None or name in self.select or any(p in self.select for p in promises)


def suspects(seen: Examination) -> list[Suspicion]:
    """One suspicion a fault and call, under the condition that shows it best. The side channel is looked for later."""
    found: dict[tuple[str, str], Suspicion] = {}
    for name, fault in FAULTS.items():
        if name == "side-channel":
            continue
        for suspicion in fault.look(seen):
            place = suspicion.site.key_name if suspicion.site is not None else suspicion.place
            key = (name, place)
            if key not in found or _shows_better(suspicion, found[key], seen.cells):
                found[key] = suspicion

    def plain(suspicion: Suspicion) -> bool:
        return seen.trial.named(suspicion.condition).switch.name == PLAIN.name

    return _one_name_each(list(found.values()), plain)


def _shows_better(new: Suspicion, old: Suspicion, cells: Sequence[Cell]) -> bool:
    """Of two looks at one fault, the one under a condition that breaks its promise."""

    def broken(s: Suspicion) -> bool:
        return any(c.promise == s.promise and c.condition == s.condition and c.verdict == "broken" for c in cells)

    return broken(new) and not broken(old)


def _one_name_each(found: list[Suspicion], plain: Callable[[Suspicion], bool]) -> list[Suspicion]:
    """`plain` tells whether a suspicion is of the model as it is, no switch being thrown."""
    names = {(s.fault.name, s.site.key_name) for s in found if s.site is not None}

    def explained(s: Suspicion) -> bool:
        return s.site is not None and any(
            (strong, s.site.key_name) in names and s.fault.name in weak for strong, weak in _EXPLAINS.items()
        )

    found = [s for s in found if not explained(s)]
    # A call that is at fault as it is runs otherwise when looked at because that path is right.
    at_fault = {s.site.key_name for s in found if s.site is not None and s.fault.stage == "mask" and plain(s)}
    found = [s for s in found if s.fault.name != "observer-effect" or s.site is None or s.site.key_name not in at_fault]
    # What only informs can wait where something is wrong.
    wrong = {s.site.key_name for s in found if s.site is not None and (s.severity or s.fault.severity) == "error"}
    found = [s for s in found if not (s.informs and s.site is not None and s.site.key_name in wrong)]
    # Two paths disagree because one of them is wrong: where its fault has a name, that is told.
    named = {
        s.site.key_name for s in found if s.site is not None and s.fault.name != "backend-disagrees" and not s.informs
    }
    return [
        s
        for s in found
        if s.fault.name != "backend-disagrees" or not (named if s.site is None else {s.site.key_name} & named)
    ]
