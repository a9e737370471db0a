"""Promise `sees-all`: every key that the mask allows does move the query's output."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Trial
from intently.report import Cell


def unseen(trial: Trial, condition: Condition) -> dict[str, Tensor]:
    """Per stream, bool [output, tested position]: allowed and real, and yet the output of sample 0 does not move at all."""
    influence = trial.influence(condition)
    outputs = influence.base.shape[1]
    rows = trial.real_rows(condition, outputs)[0][:, None]
    scale = trial.threshold(influence.base)
    found = {}
    for stream in trial.target.streams:
        if stream.part == "query":
            continue  # a query moves its own output alone
        positions = influence.positions[stream.argument]
        moved = influence.moved[stream.argument][:, 0].T
        allowed = torch.ones(outputs, len(positions), dtype=torch.bool)
        if (
            stream in trial.target.seen_through_mask
            and trial.intent.mask is not None
            and cells.has_positions(trial, influence)
        ):
            allowed = trial.intent.mask.matrix(outputs, stream.positions(trial.lengths[stream.argument]))[
                :, positions
            ].clone()
        real = cells.real_positions(trial, condition, stream.argument, positions)
        # A difference below the noise floor may be a faint effect; only one that is rounding's zero counts as hidden.
        still = moved <= min(scale, 1e-13 * float(influence.base.abs().amax()))
        found[stream.argument] = allowed & still & rows & real
    return found


def try_on(trial: Trial) -> Iterable[Cell]:
    if trial.intent.mask is None and len(trial.target.streams) == 1:
        return cells.inapplicable("sees-all", trial, "no intent is stated")
    found = []
    for condition in trial.conditions:
        if cells.ill(trial, condition):
            found.append(cells.untried("sees-all", condition, "real outputs are not finite"))
        elif same := cells.same_as(trial, condition):
            found.append(cells.inherited("sees-all", condition, same, found))
        else:
            missing = unseen(trial, condition)
            count = sum(int(m.sum()) for m in missing.values())
            note = f"{count} allowed pairs have no effect" if count else ""
            noise = trial.threshold(trial.influence(condition).base)
            found.append(cells.cell("sees-all", condition, float(count), noise, broken=count > 0, note=note))
    return found


PROMISE = Promise(
    name="sees-all",
    statement="Every key the mask allows does move the query's output: nothing more is hidden than was meant.",
    applies_to="all",
    how="Each real position is overwritten in turn; every output that may see it must move by more than rounding. "
    "`error` counts allowed pairs without any effect.",
    sources=("pytorch#90137 and other reports of causal masks in encoders",),
    try_on=try_on,
)
