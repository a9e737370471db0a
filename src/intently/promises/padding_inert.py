"""Promise `padding-inert`: what stands in the pads, and how many there are, changes no real output."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Trial, difference
from intently.report import Cell
from intently.targets.running import PLAIN
from intently.targets.stream import Batch


def stirred(trial: Trial, condition: Condition) -> torch.Tensor:
    """[real output, pad]: how far outputs of the padded sample move when one pad's content is overwritten."""
    influence = trial.influence(condition)
    rows = trial.real_rows(condition, influence.base.shape[1])[0]
    parts = []
    for name in trial.padded(condition.layout):
        pads = ~cells.real_positions(trial, condition, name, influence.positions[name])
        parts.append(influence.moved[name][pads, 0][:, rows].T)
    return torch.cat(parts, 1) if parts else torch.zeros(int(rows.sum()), 0)


PADS = "the content of pads moves real outputs, and what a pad that sees nothing gives is each path's own"


def pads_part(trial: Trial, condition: Condition) -> bool:
    """Whether pads reach real outputs with and without a switch: that is told, and two paths make other things of pads by design."""
    if trial.edits or not trial.padded(condition.layout):
        return False
    both = (condition, Condition(PLAIN, condition.layout))
    return all(bool((stirred(trial, c) > trial.threshold(trial.output(c))).any()) for c in both)


def alone(trial: Trial, condition: Condition) -> float | None:
    """Largest difference between the padded sample's real outputs and the same sample alone without pads (right pads only)."""
    layout = condition.layout
    if any(side == "left" for side in layout.pads.values()) or any(s.length for s in trial.target.streams):
        return None
    if trial.runner.follows_sources and any(s.argument in layout.padded for s in trial.target.sources):
        return None  # pads that stand before the tokens move their positions
    batch, kept = trial.batch(layout), trial.kept(layout)
    arguments = dict(batch.arguments)
    lengths = dict(batch.lengths)
    for stream in trial.target.streams:
        content = arguments[stream.argument]
        sample = content[:, :1] if stream.sequence_first else content[:1]
        if stream.argument in layout.padded:
            count = int(kept[stream.argument][0].sum())
            axis = {"tokens": 1, "features": 1, "frames": 2}.get(stream.kind)
            if axis is None or stream.heads is not None:
                return None
            axis = 0 if stream.sequence_first else axis
            sample = sample.narrow(axis, 0, count * stream.stride)
            lengths[stream.argument] = count
        arguments[stream.argument] = sample
        if stream.padding is not None and stream.padding.argument in arguments:
            ones = torch.ones(1, stream.positions(lengths[stream.argument]), dtype=torch.bool)
            arguments[stream.padding.argument] = stream.padding.value(ones)
    arguments.update(trial.target.told(1, lengths[trial.target.main.argument]))
    for name, value in trial.target.constants.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == batch.samples:
            arguments[name] = value[:1]
    try:
        single = trial.run(Batch(arguments, lengths, 1, {}), condition.switch)[0]
    except Exception:
        return None
    together = trial.output(condition)[0]
    rows = trial.real_rows(condition, together.shape[0])[0]
    together = together[rows]
    if single.shape != together.shape:
        return None
    return float(difference(single, together).amax())


def try_on(trial: Trial) -> Iterable[Cell]:
    if not any(c.layout.padded for c in trial.conditions):
        if trial.edits:
            return []
        return cells.inapplicable("padding-inert", trial, "the model takes no key mask: it has no way to ignore pads")
    found = []
    for condition in trial.conditions:
        if not condition.layout.padded:
            continue
        if cells.ill(trial, condition):
            found.append(cells.untried("padding-inert", condition, "real outputs are not finite"))
            continue
        if same := cells.same_as(trial, condition):
            found.append(cells.inherited("padding-inert", condition, same, found))
            continue
        noise = trial.threshold(trial.influence(condition).base)
        moved = stirred(trial, condition)
        worst = float(moved.amax()) if moved.numel() else 0.0
        note = ""
        if worst <= noise and cells.repeats(trial, condition):
            other = alone(trial, condition)
            # Another length means other roundings: a wider floor.
            # Float32 steps inside a float64 model round otherwise at another length.
            if other is not None and other > max(100 * noise, cells.single_steps(trial, trial.output(condition))):
                worst, note = other, "the content of the pads has no effect, their number has"
        found.append(cells.cell("padding-inert", condition, worst, noise, broken=worst > noise, note=note))
    return found


PROMISE = Promise(
    name="padding-inert",
    statement="Content and amount of padding change no real output.",
    applies_to="every model that takes a key mask",
    how="Pads on the right and on the left are overwritten one by one; real outputs must stay within the noise floor. "
    "With right pads the sample is also run alone, without any.",
    sources=("huggingface/transformers#14521 and other reports of pads that leak",),
    try_on=try_on,
)
