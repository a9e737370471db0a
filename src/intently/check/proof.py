"""Proof by repair: kept with the suspect call repaired, broken again when everything else is repaired but not it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from intently.edits import apply_all
from intently.errors import CannotCheck
from intently.faults import Examination, Suspicion
from intently.promises import PROMISES, Condition, Trial
from intently.report import Cell
from intently.sites import Site
from intently.targets.running import PLAIN
from intently.targets.stream import Batch


def edits_of(suspicions: Sequence[Suspicion]) -> dict[str, Any]:
    """The repairs of all suspicions, by site."""
    by_site: dict[str, list[Any]] = {}
    for s in suspicions:
        if s.repair is not None and s.site is not None:
            by_site.setdefault(s.site.key_name, []).append(s.repair)

    def joined(repairs: list[Any]) -> Callable[[Site, Batch], Any]:
        return lambda site, batch: apply_all([lambda s, r=r: r(s, batch) for r in repairs])(site)

    return {key: joined(repairs) for key, repairs in by_site.items()}


# Promises that hold two runs against each other.
BETWEEN_RUNS = ("observer-neutral", "backends-agree")
# Promises that are broken where one changed position breaks them, whatever the others do.
AT_ONE_POSITION = ("causal", "sees-all", "padding-inert", "batch-independent", "windowed")
_MOST_ALONE = 4  # suspects by one line of code that are proven each by itself


class Prover:
    """Tries promises again on the model with some of its suspects repaired; each repaired model runs once under a condition."""

    def __init__(self, trial: Trial, cells: Sequence[Cell]):
        self.trial = trial
        self.cells = tuple(cells)
        self._verdicts: dict[tuple[Any, ...], str] = {}
        self._models: dict[tuple[tuple[str, str], ...], Trial] = {}

    def prove(self, suspicion: Suspicion, everyone: Sequence[Suspicion]) -> tuple[bool, str]:
        """Kept with every suspect repaired, and broken again with all but this one: it is this site."""
        if suspicion.proven_by:
            return True, suspicion.proven_by
        if suspicion.repair is None or suspicion.site is None:
            return False, suspicion.unprovable or "no repair of one site can take this fault away"
        kin = self._kin(suspicion, everyone)
        if len(kin) > _MOST_ALONE and suspicion not in kin[:_MOST_ALONE]:
            # The same line at work in many layers: the first ones were proven each by itself, the others together with them.
            first, _ = self.prove(kin[0], everyone)
            return first, f"the same line as at {kin[0].site.path if kin[0].site else ''}, repaired together with it"
        first_note = ""
        for condition in self._conditions(suspicion):
            proven, note = self._prove_under(condition, suspicion, everyone)
            if proven:
                return True, note
            first_note = first_note or note
        return False, first_note

    def follows(self, suspicion: Suspicion, everyone: Sequence[Suspicion]) -> bool:
        """Whether two runs part outside every call only because of calls at fault: repaired in both, the runs agree."""
        if suspicion.site is not None or suspicion.promise not in BETWEEN_RUNS:
            return False
        others = [s for s in everyone if s.repair is not None and s.site is not None and not (s.undoes or s.informs)]
        condition = self.trial.named(suspicion.condition)
        return bool(others) and self.verdict(suspicion.promise, condition, others) == "kept"

    def _conditions(self, suspicion: Suspicion) -> list[Condition]:
        """The condition that showed the fault, then others that break its promise without a switch."""
        first = self.trial.named(suspicion.condition)
        broken = {c.condition for c in self.cells if c.promise == suspicion.promise and c.verdict == "broken"}
        others = [
            c for c in self.trial.everything if c.name in broken and c.switch == first.switch and c.name != first.name
        ]
        return [first, *others[:2]]

    def _prove_under(
        self, condition: Condition, suspicion: Suspicion, everyone: Sequence[Suspicion]
    ) -> tuple[bool, str]:
        promise, site = suspicion.promise, suspicion.site
        undo = suspicion.undoes
        allies = [s for s in everyone if s.site is not None and s.repair is not None]
        allies = [s for s in allies if s.undoes == undo]
        # Another name for the same call would repair it too: what counts is this repair beside those of other calls.
        others = [s for s in allies if s.site is not None and site is not None and s.site.key_name != site.key_name]
        everything = self.verdict(promise, condition, [*others, suspicion], undo=undo)
        if everything != "kept":
            others = [s for s in allies if s is not suspicion]
            everything = self.verdict(promise, condition, allies, undo=undo)
        if everything != "kept":
            if others and self.verdict(promise, condition, [suspicion], undo=undo) == "kept":
                return True, f"repaired at this call, {promise} is kept ({condition.name})"
            return False, f"{promise} stays {everything} after the repair ({condition.name})"
        kept = f"repaired at this call, {promise} is kept ({condition.name})"
        if not others and self._broken(promise, condition):
            return True, kept
        if self._broken_again(promise, condition, others, suspicion, undo=undo):
            return (
                True,
                f"{kept}, and broken again when all other suspects are repaired but not this one" if others else kept,
            )
        if self._broken(promise, condition) and self.verdict(promise, condition, [suspicion], undo=undo) == "kept":
            return True, kept
        if promise == "finite" and self._heals(suspicion, condition, others):
            return True, (
                f"repaired, this call's output is finite ({condition.name}); left alone it is not, though only pads suffer from it"
            )
        if not self._broken(promise, condition) and self._gone(suspicion, condition, others):
            return True, (
                f"no output shows it, since other calls let it through; measured at the call, the repair takes it away "
                f"({condition.name})"
            )
        return False, "the promise is kept with or without this repair: other repairs are enough"

    def _broken_again(
        self, promise: str, condition: Condition, others: Sequence[Suspicion], left: Suspicion, *, undo: bool
    ) -> bool:
        """Whether a promise is broken with all repairs but one. The positions that this one stills are changed first."""
        key = (promise, condition.name, _key(others))
        if promise in AT_ONE_POSITION and key not in self._verdicts:
            whole = self.repaired([*others, left], [condition])
            telling = self.trial.stilled(condition, whole)
            if telling is not None:
                glance = self.repaired(others, [condition]).glancing(telling)
                if _tried(promise, glance, condition) == "broken":
                    self._verdicts[key] = "broken"
        return self.verdict(promise, condition, others, undo=undo) == "broken"

    @staticmethod
    def _kin(suspicion: Suspicion, everyone: Sequence[Suspicion]) -> list[Suspicion]:
        """Suspicions of the same fault by the same line of code, under the same condition."""

        def mark(s: Suspicion) -> tuple[Any, ...]:
            return (s.fault.name, s.condition, s.site.source if s.site else None)

        return [s for s in everyone if s.site is not None and s.repair is not None and mark(s) == mark(suspicion)]

    def _broken(self, promise: str, condition: Condition) -> bool:
        return any(c.promise == promise and c.condition == condition.name and c.verdict == "broken" for c in self.cells)

    def _gone(self, suspicion: Suspicion, condition: Condition, others: Sequence[Suspicion]) -> bool:
        """Whether the fault is seen at its call without the repair, and not with it, everything else being repaired."""

        def seen(suspicions: Sequence[Suspicion]) -> bool:
            trial = self.repaired(suspicions, [condition])
            looks = suspicion.fault.look(Examination(trial, self.cells))
            return any(
                s.site is not None and suspicion.site is not None and s.site.key_name == suspicion.site.key_name
                for s in looks
            )

        return seen(others) and not seen([*others, suspicion])

    def _heals(self, suspicion: Suspicion, condition: Condition, others: Sequence[Suspicion]) -> bool:
        """Whether the call itself is finite with its repair and not without it, everything else being repaired."""

        def finite(suspicions: Sequence[Suspicion]) -> bool:
            sites = self.repaired(suspicions, [condition]).sites(condition)
            mine = [
                s
                for s in sites
                if suspicion.site is not None and s.key_name == suspicion.site.key_name and s.tensors is not None
            ]
            return bool(mine) and all(
                bool(torch.isfinite(s.tensors.output).all()) for s in mine if s.tensors is not None
            )

        return finite([*others, suspicion]) and not finite(others)

    def verdict(
        self, promise: str, condition: Condition, suspicions: Sequence[Suspicion], *, undo: bool = False
    ) -> str:
        """`kept`, `broken` or `untried`: a promise under one condition with the repairs of some suspicions.

        Repairs that undo a switch are made only where `undo` asks for them, and then alone.
        """
        suspicions = [s for s in suspicions if s.undoes == undo]
        key = (promise, condition.name, _key(suspicions))
        if key not in self._verdicts:
            repaired = self.repaired(suspicions, [condition])
            if undo and promise in BETWEEN_RUNS and condition.switch.name != PLAIN.name:
                repaired = self.trial.repaired(edits_of(suspicions), [condition])
                repaired.assume(Condition(PLAIN, condition.layout), self.trial)
            self._verdicts[key] = _tried(promise, repaired, condition)
        return self._verdicts[key]

    def repaired(self, suspicions: Sequence[Suspicion], conditions: Iterable[Condition]) -> Trial:
        """The model with the repairs of some suspicions, under some conditions."""
        key = _key(suspicions)
        if key not in self._models:
            self._models[key] = self.trial.repaired(edits_of(suspicions), self.trial.everything)
        return self._models[key].narrowed(conditions)

    def still_broken(self, broken: Sequence[Cell], suspicions: Sequence[Suspicion]) -> list[Cell]:
        """Of broken cells those that stay broken with the repairs of some suspicions.

        All conditions are tried on one repaired model, so that those which give the same outputs there are tried once.
        """
        suspicions = [s for s in suspicions if not s.undoes]
        left = []
        for promise in dict.fromkeys(c.promise for c in broken):
            names = [c.condition for c in broken if c.promise == promise]
            concerned = [c for c in self.trial.everything if c.name in names]
            repaired = self.repaired(suspicions, concerned)
            try:
                found = list(PROMISES[promise].try_on(repaired))
            except CannotCheck:
                found = []
            for cell in (c for c in broken if c.promise == promise):
                if _together([c for c in found if c.condition == cell.condition]) == "broken":
                    left.append(cell)
        return left


def _key(suspicions: Sequence[Suspicion]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((s.fault.name, s.site.key_name) for s in suspicions if s.repair is not None and s.site))


def _tried(promise: str, trial: Trial, condition: Condition) -> str:
    try:
        return _together([c for c in PROMISES[promise].try_on(trial) if c.condition == condition.name])
    except CannotCheck:
        return "untried"


def _together(cells: Sequence[Cell]) -> str:
    """One verdict of several cells."""
    verdicts = {c.verdict for c in cells}
    return "broken" if "broken" in verdicts else "kept" if "kept" in verdicts else "untried"
