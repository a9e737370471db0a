"""Promise `repeatable`: two eval calls are equal under different random seeds."""

from __future__ import annotations

from collections.abc import Iterable

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Trial, difference
from intently.report import Cell


def try_on(trial: Trial) -> Iterable[Cell]:
    found = []
    for condition in trial.conditions:
        if condition.layout.padded or condition.layout.samples < 2:
            continue
        if same := cells.same_as(trial, condition):
            found.append(cells.inherited("repeatable", condition, same, found))
            continue
        first, second = trial.output(condition), trial.output(condition, seed=1)
        worst = float(difference(first, second).amax())
        noise = trial.threshold(first)
        found.append(cells.cell("repeatable", condition, worst, noise, broken=worst > noise))
    return found


PROMISE = Promise(
    name="repeatable",
    statement="Two eval calls are equal under different random seeds.",
    applies_to="all, in eval",
    how="The same inputs are run under two seeds.",
    sources=(
        "pytorch/pytorch documentation of F.scaled_dot_product_attention: dropout_p is applied whatever the mode",
    ),
    try_on=try_on,
)
