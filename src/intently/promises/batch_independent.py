"""Promise `batch-independent`: a sample's output depends neither on its batch mates nor on being alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Trial, difference
from intently.report import Cell
from intently.targets.stream import Batch


def crossed(trial: Trial, condition: Condition) -> float:
    """How far other samples move when sample 0 changes."""
    influence = trial.influence(condition)
    rows = trial.real_rows(condition, influence.base.shape[1])[1:]
    worst = [float(m[:, 1:][:, rows].amax()) for m in influence.moved.values() if m.numel()]
    return max(worst, default=0.0)


def alone(trial: Trial, condition: Condition) -> float | None:
    """How far the last sample is from itself run as a batch of one; None where that cannot run."""
    batch = trial.batch(condition.layout)
    last = batch.samples - 1
    arguments = dict(batch.arguments)
    for stream in trial.target.streams:
        content = arguments[stream.argument]
        arguments[stream.argument] = content[:, last:] if stream.sequence_first else content[last:]
        if stream.padding is not None and stream.padding.argument in arguments:
            arguments[stream.padding.argument] = stream.padding.value(batch.kept[stream.argument][last:])
    arguments.update(trial.target.told(1, batch.lengths[trial.target.main.argument]))
    for name, value in trial.target.constants.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == batch.samples:
            arguments[name] = value[last:]
    try:
        single = trial.run(Batch(arguments, batch.lengths, 1, {}), condition.switch)[0]
    except Exception:
        return None
    together = trial.output(condition)[last]
    return float(difference(single, together).amax()) if single.shape == together.shape else None


def try_on(trial: Trial) -> Iterable[Cell]:
    if trial.target.samples == 1:
        return cells.inapplicable("batch-independent", trial, "the model takes one sample at a time")
    found = []
    for condition in trial.conditions:
        if condition.layout.samples < 2 or condition.layout.padded:
            continue
        if cells.ill(trial, condition):
            found.append(cells.untried("batch-independent", condition, "real outputs are not finite"))
            continue
        if same := cells.same_as(trial, condition):
            found.append(cells.inherited("batch-independent", condition, same, found))
            continue
        noise = trial.threshold(trial.influence(condition).base)
        worst, note = crossed(trial, condition), ""
        repeats = difference(trial.output(condition), trial.output(condition, seed=1)).amax() <= noise
        if worst <= noise and bool(repeats):
            other = alone(trial, condition)
            # Float32 steps inside a float64 model round otherwise for another number of samples.
            single = cells.single_steps(trial, trial.output(condition))
            if other is not None and other > max(100 * noise, single):
                worst, note = other, "batch mates have no effect, but being alone has"
        found.append(cells.cell("batch-independent", condition, worst, noise, broken=worst > noise, note=note))
    return found


PROMISE = Promise(
    name="batch-independent",
    statement="A sample's output depends neither on its batch mates nor on its place in the batch.",
    applies_to="all, in eval",
    how="Sample 0 is changed position by position, and no other sample may move; the last sample is run alone as well.",
    sources=("pytorch/pytorch reports of sequence-first layers fed batch-first data",),
    try_on=try_on,
)
