"""Promise `observer-neutral`: asking for weights, or tracing, changes no output."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.padding_inert import PADS, pads_part
from intently.promises.trial import Condition, Trial, difference
from intently.report import Cell
from intently.targets.running import PLAIN


def try_on(trial: Trial) -> Iterable[Cell]:
    found = []
    for condition in trial.conditions:
        if condition.switch.looking:
            theirs = trial.output(Condition(PLAIN, condition.layout))
            mine = trial.output(condition)
            if mine.shape != theirs.shape:
                found.append(
                    cells.untried(
                        "observer-neutral",
                        condition,
                        f"the output's shape is {list(mine.shape)}, else {list(theirs.shape)}",
                    )
                )
                continue
            rows = trial.real_rows(condition, mine.shape[1])
            worst = float(difference(mine, theirs)[rows].amax())
            noise = 4 * trial.threshold(theirs)
            if worst > noise and cells.rounding_only(trial, condition, Condition(PLAIN, condition.layout), worst):
                noise = worst
            if worst > noise and pads_part(trial, condition):
                found.append(cells.untried("observer-neutral", condition, PADS))
                continue
            found.append(cells.cell("observer-neutral", condition, worst, noise, broken=worst > noise))
        elif condition.switch.name == PLAIN.name and not trial.edits and cells.same_as(trial, condition) is None:
            plain, traced = trial.output(condition), trial.traced_output(condition)
            worst = float(difference(plain, traced).amax())
            same = torch.equal(torch.nan_to_num(plain), torch.nan_to_num(traced))
            note = "tracing changes no bit" if same else "tracing changed the output"
            broken = worst > trial.threshold(plain)
            if trial.runner.replayed:  # how near the replay comes says nothing of the model
                note = f"sites are looked at in a replay that differs by {worst:.1g}"
                found.append(Cell("observer-neutral", condition.name, "not-applicable", note=note))
                continue
            found.append(cells.cell("observer-neutral", condition, worst, 0.0, broken=broken, note=note))
    return found


PROMISE = Promise(
    name="observer-neutral",
    statement="Asking for weights or tracing changes no output.",
    applies_to="all",
    how="Arguments that ask for weights or a cache are switched, and the traced run is compared with the plain one.",
    sources=("huggingface/transformers#30652: output_attentions made Llama's decoder bidirectional",),
    try_on=try_on,
)
