"""Promise `position-shift`: where the pads stand, before the tokens or behind them, changes no real output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.padding_inert import stirred
from intently.promises.trial import Condition, Trial, difference
from intently.report import Cell
from intently.targets.positions import position_argument
from intently.targets.stream import Batch, Stream

# A run of one batch: the trial's own, or one in which positions are given or counted.
Run = Callable[[Batch], Tensor]


def shifted_stream(trial: Trial, condition: Condition) -> Stream | None:
    """The stream that has pads in front; None where none has, or its positions cannot be moved."""
    left = [name for name, side in condition.layout.pads.items() if side == "left"]
    stream = trial.target.stream(left[0]) if left else None
    movable = stream is not None and stream.kind in ("tokens", "features") and stream.heads is None and not stream.part
    return stream if movable else None


def placed(trial: Trial, condition: Condition, stream: Stream, before: int, fill: int | None = None) -> Batch:
    """The condition's batch with `before` of its pads in front of the short sample and the others behind it.

    `fill` is the id that every pad holds; None leaves there what stands there.
    """
    batch = trial.batch(condition.layout)
    kept = {k: v.clone() for k, v in batch.kept.items()}
    pads = int((~kept[stream.argument][0]).sum())
    content = batch.arguments[stream.argument].clone()
    mine = content[:, 0] if stream.sequence_first else content[0]
    mine.copy_(mine.roll(before - pads, 0))
    kept[stream.argument][0] = kept[stream.argument][0].roll(before - pads)
    if fill is not None:
        mine[~kept[stream.argument][0]] = fill
    arguments = {**batch.arguments, stream.argument: content}
    assert stream.padding is not None
    arguments[stream.padding.argument] = stream.padding.value(kept[stream.argument])
    return Batch(arguments, batch.lengths, batch.samples, kept)


def shift(trial: Trial, condition: Condition, stream: Stream, run: Run, fill: int | None = None) -> Tensor:
    """`[amount, real output]`: how far the outputs of the short sample move when all or all but one of its pads go behind it."""
    main = trial.target.main.argument
    first = placed(trial, condition, stream, int((~trial.kept(condition.layout)[stream.argument][0]).sum()), fill)

    def rows(batch: Batch) -> Tensor:
        output = run(batch)[:1]
        return output[:, batch.kept[main][0]] if output.shape[1] == batch.kept[main].shape[1] else output

    base = rows(first)
    return torch.cat([difference(rows(placed(trial, condition, stream, n, fill)), base) for n in (0, 1)])


def pad_id(trial: Trial, stream: Stream) -> int | None:
    """The id that the model itself takes for a pad: some count positions by it."""
    model = trial.target.model
    said = getattr(getattr(model, "config", None), "pad_token_id", None)
    if stream.kind != "tokens" or not isinstance(model, nn.Module):
        return None
    if isinstance(said, int) and 0 <= said < stream.vocab:
        return said
    found = [m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]
    return next((i for i in found if 0 <= i < stream.vocab), None)


def moved(trial: Trial, condition: Condition, stream: Stream) -> float:
    """How far real outputs move with the place of the pads."""

    def run(batch: Batch) -> Tensor:
        return trial.run(batch, condition.switch)

    worst = float(shift(trial, condition, stream, run).amax())
    fill = pad_id(trial, stream)
    if fill is not None and worst > trial.threshold(trial.output(condition)):
        worst = min(worst, float(shift(trial, condition, stream, run, fill).amax()))
    return worst


def rounding(trial: Trial, condition: Condition) -> float:
    """What counts as rounding here: angles of late positions are often made in float32, and a shift moves far more."""
    output = trial.output(condition)
    size = float(output[torch.isfinite(output)].abs().amax())
    return max(20 * trial.threshold(output), 1e-5 * size)


def _unmoved_mask(trial: Trial) -> bool:
    """Whether the intended mask is the same for sequences that start later."""
    mask = trial.intent.mask
    if mask is None:
        return True
    if mask.document_numbers is not None:
        return False
    main = trial.target.main
    seen = mask.matrix(main.positions(trial.lengths[main.argument]))
    return seen.dim() == 2 and bool((seen[1:, 1:] == seen[:-1, :-1]).all())


def _leaks(trial: Trial, condition: Condition) -> bool:
    """Whether the pads themselves move real outputs, on either side: then their place says nothing of positions."""
    right = replace(condition.layout, pads=dict.fromkeys(condition.layout.pads, "right"))
    beside = [c for c in trial.conditions if c.switch == condition.switch and c.layout.pads == right.pads]
    noise = trial.threshold(trial.output(condition))
    return any(bool((stirred(trial, c) > noise).any()) for c in (condition, *beside) if not cells.ill(trial, c))


def try_on(trial: Trial) -> Iterable[Cell]:
    tried = [c for c in trial.conditions if shifted_stream(trial, c) is not None]
    if not tried:
        return (
            [] if trial.edits else cells.inapplicable("position-shift", trial, "no stream of tokens takes a key mask")
        )
    if not _unmoved_mask(trial):
        return cells.inapplicable(
            "position-shift", trial, f"the intent ({trial.intent}) counts from the first position"
        )
    found: list[Cell] = []
    for condition in tried:
        same = cells.same_as(trial, condition)
        found.append(cells.inherited("position-shift", condition, same, found) if same else _cell(trial, condition))
    return found


def _cell(trial: Trial, condition: Condition) -> Cell:
    stream = shifted_stream(trial, condition)
    assert stream is not None
    if cells.ill(trial, condition):
        return cells.untried("position-shift", condition, "real outputs are not finite")
    if not trial.edits and not cells.has_positions(trial, trial.influence(condition)):
        return cells.untried("position-shift", condition, "the output has no position axis")
    if not trial.edits and _leaks(trial, condition):
        return cells.untried("position-shift", condition, "the content of pads moves real outputs")
    noise = rounding(trial, condition)
    try:
        worst = moved(trial, condition, stream)
    except Exception as error:  # masks with pads on both sides are refused by some
        return cells.untried("position-shift", condition, f"pads on both sides are refused ({type(error).__name__})")
    if worst > noise and trial.target.known and position_argument(trial.target, stream.argument) is None:
        said = "positions are the architecture's own and no argument takes others: pad on the right"
        return Cell("position-shift", condition.name, "not-applicable", note=said)
    return cells.cell("position-shift", condition, worst, noise, broken=worst > noise)


PROMISE = Promise(
    name="position-shift",
    statement="Padding on the left, by any number, changes no real output.",
    applies_to="models that take a key mask, where positions are relative or follow from the mask",
    how="The tokens of one sample are run behind its pads, before them, and between them, in a batch of the same shape; its "
    "real outputs must stay within the noise floor.",
    sources=("huggingface/trl#469",),
    try_on=try_on,
)
