"""Promise `memory-respected`: the source moves the output, sample by sample, and what is masked of it does not."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Trial, difference
from intently.report import Cell
from intently.targets.stream import Batch, Stream


def silent(trial: Trial, condition: Condition) -> tuple[str, ...]:
    """Sources that move nothing: no change of a real position of sample 0 moves any of its outputs."""
    influence = trial.influence(condition)
    noise = trial.threshold(influence.base)
    names = []
    for stream in trial.target.sources:
        tested = influence.positions[stream.argument]
        real = cells.real_positions(trial, condition, stream.argument, tested)
        moved = influence.moved[stream.argument][real, 0]
        still = moved.numel() and float(moved.amax()) <= min(noise, 1e-13 * float(influence.base.abs().amax()))
        if still and not cells.is_chosen_from(trial, condition, stream, tested[real]):
            names.append(stream.argument)
    return tuple(names)


def leaked(trial: Trial, condition: Condition) -> float:
    """How far real outputs of sample 0 move when what is masked of its source is overwritten."""
    influence = trial.influence(condition)
    rows = trial.real_rows(condition, influence.base.shape[1])[0]
    worst = 0.0
    for stream in trial.target.sources:
        positions = influence.positions[stream.argument]
        masked = ~cells.real_positions(trial, condition, stream.argument, positions)
        moved = influence.moved[stream.argument][masked, 0][:, rows]
        worst = max(worst, float(moved.amax()) if moved.numel() else 0.0)
    return worst


def exchanged(trial: Trial, condition: Condition) -> float | None:
    """How far outputs are from following their source when two samples, otherwise alike, exchange theirs.

    None where one sample runs alone, or arguments that are passed on as they are belong to samples.
    """
    samples = condition.layout.samples
    held = trial.target.constants.values()
    if samples < 2 or any(isinstance(v, Tensor) and v.dim() and v.shape[0] == samples for v in held):
        return None
    straight = list(range(samples))
    turned = [1, 0, *straight[2:]]
    first, second = (trial.run(_fed(trial, condition, order), condition.switch) for order in (straight, turned))
    rows = trial.real_rows(condition, first.shape[1])[:1].expand(samples, -1)
    return float(difference(first[turned], second)[rows].amax())


def _fed(trial: Trial, condition: Condition, order: list[int]) -> Batch:
    """The batch with sample 0's content in every sample, and the sources in this order."""
    batch = trial.batch(condition.layout)
    sources = {s.argument for s in trial.target.sources}
    arguments, kept = dict(batch.arguments), dict(batch.kept)
    for stream in trial.target.streams:
        chosen = order if (stream.follows or stream.argument) in sources else [0] * len(order)
        arguments[stream.argument] = _chosen(stream, arguments[stream.argument], chosen)
        kept[stream.argument] = kept[stream.argument][chosen]
        if stream.padding is not None and stream.padding.argument in arguments:
            arguments[stream.padding.argument] = stream.padding.value(kept[stream.argument])
    return Batch(arguments, batch.lengths, batch.samples, kept)


def _chosen(stream: Stream, content: Tensor, samples: list[int]) -> Tensor:
    return content[:, samples] if stream.sequence_first else content[samples]


def try_on(trial: Trial) -> Iterable[Cell]:
    if not trial.target.sources:
        return cells.inapplicable("memory-respected", trial, "the model reads one sequence and no source besides")
    found = []
    for condition in trial.conditions:
        if cells.ill(trial, condition):
            found.append(cells.untried("memory-respected", condition, "real outputs are not finite"))
        elif same := cells.same_as(trial, condition):
            found.append(cells.inherited("memory-respected", condition, same, found))
        else:
            found.append(_tried(trial, condition))
    return found


def _tried(trial: Trial, condition: Condition) -> Cell:
    noise = trial.threshold(trial.influence(condition).base)
    if names := silent(trial, condition):
        said = f"no change of {' or of '.join(names)} moves any output"
        return cells.cell("memory-respected", condition, 0.0, noise, broken=True, note=said)
    worst = leaked(trial, condition)
    if worst > noise:
        return cells.cell("memory-respected", condition, worst, noise, broken=True, note="what is masked has an effect")
    if cells.repeats(trial, condition) and (gap := exchanged(trial, condition)) is not None:
        # Another place in the batch means other roundings.
        if gap > 20 * noise:
            said = "samples that exchange their sources do not exchange their outputs"
            return cells.cell("memory-respected", condition, gap, noise, broken=True, note=said)
        worst = max(worst, min(gap, noise))
    return cells.cell("memory-respected", condition, worst, noise, broken=False)


PROMISE = Promise(
    name="memory-respected",
    statement="The source moves the output of its own sample, and what is masked of it moves nothing.",
    applies_to="encoder-decoders and conditional models: whatever reads a second sequence (a memory, a context, a picture)",
    how="Each position of the source is overwritten in turn: unmasked ones must move some output, masked ones none. Two "
    "samples that are alike but for their sources exchange them, masks included, and must exchange their outputs. "
    "Tried with the source's mask absent, of ones and real, alone and in a batch, under every switch.",
    sources=("huggingface/transformers#47946", "Bahdanau et al. 2015: arXiv:1409.0473"),
    try_on=try_on,
)
