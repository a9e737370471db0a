"""Small helpers that promises share: which pairs an intent allows, and cells of the grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from intently.promises.trial import Condition, Influence, Trial, difference
from intently.report import Cell
from intently.targets.running import PLAIN


def reach(seen: Tensor) -> Tensor:
    """Which positions reach which through any number of layers that all use the mask `seen` (bool [query, key])."""
    path = seen | torch.eye(seen.shape[0], seen.shape[1], dtype=torch.bool)
    while True:
        longer = (path.double() @ path.double()) > 0
        if torch.equal(longer, path):
            return path
        path = longer


def has_positions(trial: Trial, influence: Influence) -> bool:
    """Whether outputs stand at the positions of the main stream (a pooled output does not)."""
    main = trial.target.main
    return influence.base.shape[1] == main.positions(trial.lengths[main.argument]) and influence.base.shape[1] > 1


def real_positions(trial: Trial, condition: Condition, stream: str, positions: Tensor) -> Tensor:
    """bool per tested position of sample 0: it is not a pad."""
    kept = trial.kept(condition.layout).get(stream)
    return torch.ones(len(positions), dtype=torch.bool) if kept is None else kept[0][positions]


def as_plain(trial: Trial, condition: Condition) -> bool:
    """True when a switch leaves every real output as it is without it: then the same promises are kept or broken."""
    if condition.switch.name == PLAIN.name or trial.edits:
        return False
    plain = Condition(PLAIN, condition.layout)
    mine, theirs = trial.output(condition), trial.output(plain)
    if mine.shape != theirs.shape:
        return False
    rows = trial.real_rows(condition, mine.shape[1])
    return bool((difference(mine, theirs)[rows] <= trial.threshold(theirs)).all())


def like_plain(promise: str, condition: Condition, found: Sequence[Cell]) -> Cell:
    """The verdict without the switch, which also holds with it."""
    plain = next((c for c in found if c.condition == condition.layout.name), None)
    if plain is None:
        return untried(promise, condition, "not tried without the switch either")
    return replace(plain, condition=condition.name, note="as without the switch")


def cell(promise: str, condition: Condition, error: float, noise: float, *, broken: bool, note: str = "") -> Cell:
    return Cell(promise, condition.name, "broken" if broken else "kept", error, noise, note)


def inapplicable(promise: str, trial: Trial, why: str) -> list[Cell]:
    return [Cell(promise, c.name, "not-applicable", note=why) for c in trial.conditions]


def untried(promise: str, condition: Condition, why: str) -> Cell:
    return Cell(promise, condition.name, "not-tried", note=why)


def ill(trial: Trial, condition: Condition) -> bool:
    """Whether real outputs are not numbers here, so that nothing can be said of what moves them."""
    output = trial.output(condition)
    return not bool(torch.isfinite(output[trial.real_rows(condition, output.shape[1])]).all())
