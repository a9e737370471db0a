"""Promise `causal`: no output moves when a later input changes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Trial
from intently.report import Cell


def forbidden(trial: Trial, positions: int) -> Tensor:
    """bool [output, input]: later inputs that no number of layers of the intended mask can bring to an output.

    Of packed documents each is judged by itself; that they see nothing of each other is a promise of its own.
    """
    assert trial.intent.mask is not None
    allowed = cells.reach(trial.intent.mask.matrix(positions))
    later = torch.ones(positions, positions, dtype=torch.bool).triu(1)
    return ~allowed & later if trial.target.together is None else ~allowed & later & trial.target.together


def leaks(trial: Trial, condition: Condition) -> Tensor:
    """[output, tested position]: how far an output of sample 0 moves for an input it must not see; 0 elsewhere."""
    influence = trial.influence(condition)
    parts = []
    for stream in trial.target.seen_through_mask:
        positions = influence.positions[stream.argument]
        moved = influence.moved[stream.argument][:, 0].T
        never = forbidden(trial, influence.base.shape[1])[:, positions]
        never = never & cells.real_positions(trial, condition, stream.argument, positions)
        never = never & trial.real_rows(condition, influence.base.shape[1])[0][:, None]
        parts.append(torch.where(never, moved, torch.zeros_like(moved)))
    return torch.stack(parts).amax(0)


def try_on(trial: Trial) -> Iterable[Cell]:
    mask = trial.intent.mask
    if mask is None:
        return cells.inapplicable("causal", trial, "no intent is stated")
    main = trial.target.main
    count = main.positions(trial.lengths[main.argument])
    if not forbidden(trial, count).any():
        return cells.inapplicable(
            "causal", trial, f"the intent ({trial.intent}) lets every output depend on later inputs"
        )
    found = []
    for condition in trial.conditions:
        if cells.ill(trial, condition):
            found.append(cells.untried("causal", condition, "real outputs are not finite"))
        elif same := cells.same_as(trial, condition):
            found.append(cells.inherited("causal", condition, same, found))
        elif not cells.has_positions(trial, trial.influence(condition)):
            found.append(cells.untried("causal", condition, "the output has no position axis"))
        else:
            noise = trial.threshold(trial.influence(condition).base)
            worst = float(leaks(trial, condition).amax())
            found.append(cells.cell("causal", condition, worst, noise, broken=worst > noise))
    return found


PROMISE = Promise(
    name="causal",
    statement="Outputs up to t do not change when inputs after t change.",
    applies_to="decoders and every intent that hides later keys",
    how="Each position of one sample is overwritten in turn; every output before it must stay within the noise floor. "
    "Tried with the mask absent, of ones and real, alone and in a batch, under every backend.",
    sources=("Vaswani et al. 2017, section 3.2.3: arXiv:1706.03762",),
    try_on=try_on,
)
