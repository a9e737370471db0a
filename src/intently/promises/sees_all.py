"""Promise `sees-all`: every key that the mask allows does move the query's output."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Influence, Trial
from intently.report import Cell
from intently.targets.stream import Batch, Stream

FINE = 1e-12  # a coarser unit of rounding swallows the effect of a key of small weight as a whole


def unseen(trial: Trial, condition: Condition) -> dict[str, Tensor]:
    """Per stream, bool [output, tested position]: allowed and real, and yet the output of sample 0 does not move at all."""
    influence = trial.influence(condition)
    outputs = influence.base.shape[1]
    rows = trial.real_rows(condition, outputs)[0][:, None]
    # A difference below the noise floor may be a faint effect; only one that is rounding's zero counts as hidden.
    least = min(trial.threshold(influence.base), 1e-13 * float(influence.base.abs().amax()))
    found = {}
    for stream in trial.target.streams:
        allowed = _allowed(trial, influence, stream, outputs)
        if allowed is None:
            continue
        moved = influence.moved[stream.argument]
        if stream.part == "value":  # a key is seen when it moves the output itself or through its value
            moved = torch.maximum(moved, influence.moved[stream.follows or stream.argument])
        real = cells.real_positions(trial, condition, stream.argument, influence.positions[stream.argument])
        found[stream.argument] = allowed & (least >= moved[:, 0].T) & rows & real
        if trial.runner.resolution > FINE and bool(found[stream.argument].any()):
            found[stream.argument] &= ~_faint(trial, condition, stream, outputs)
        asked = found[stream.argument]
        lost = asked.any(0) & (asked == (allowed & rows & real)).all(0)
        tested = influence.positions[stream.argument]
        if bool(lost.any()) and (
            cells.is_chosen_from(trial, trial.conditions[0], stream, tested[lost])
            or not _reaches_attention(trial, condition, stream, tested[lost])
        ):
            found[stream.argument] = asked & ~lost
    return found


def _reaches_attention(trial: Trial, condition: Condition, stream: Stream, positions: Tensor) -> bool:
    """Whether anything that a call attends with depends on these positions: what is cut off before (by a convolution
    whose stride leaves a rest) is not hidden by attention."""
    batch = trial.batch(condition.layout)
    changed = batch.arguments[stream.argument]
    for position in positions.tolist():
        changed = stream.change(changed, 0, position, trial.seed + 1)
    other = Batch({**batch.arguments, stream.argument: changed}, batch.lengths, batch.samples, batch.kept)
    pairs = [
        (getattr(a.tensors, part), getattr(b.tensors, part))
        for a, b in zip(trial.sites(condition), trial.traced(other, condition.switch)[1], strict=False)
        for part in ("query", "key", "value")
    ]
    known = bool(pairs) and all(a is not None and b is not None and a.shape == b.shape for a, b in pairs)
    return not known or trial.runner.opaque or any(not torch.equal(a, b) for a, b in pairs)


def _faint(trial: Trial, condition: Condition, stream: Stream, outputs: int) -> Tensor:
    """bool [output, tested position]: pairs that calls do see, so that only a coarse precision hides what they do."""
    positions = trial.influence(condition).positions[stream.argument]
    count = stream.positions(trial.lengths[stream.argument])
    seen = torch.zeros(outputs, count, dtype=torch.bool)
    for site in trial.sites(condition):
        if site.visible is not None and site.visible.shape[-2:] == seen.shape:
            seen |= site.visible[0].any(0)
    return (cells.reach(seen) if outputs == count else seen)[:, positions]


def _allowed(trial: Trial, influence: Influence, stream: Stream, outputs: int) -> Tensor | None:
    """bool [output, tested position]: what the intent lets an output see of a stream; None where it says nothing."""
    positions = influence.positions[stream.argument]
    if stream.part in ("query", "key"):
        return None  # a query moves its own output alone, and keys are judged together with their values
    everything = torch.ones(outputs, len(positions), dtype=torch.bool)
    if stream not in trial.target.seen_through_mask or not cells.has_positions(trial, influence):
        return everything
    if trial.intent.mask is None:
        return None
    return trial.intent.mask.matrix(outputs, stream.positions(trial.lengths[stream.argument]))[:, positions]


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
    error_means="pairs without effect:",
)
