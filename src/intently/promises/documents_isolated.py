"""Promise `documents-isolated`: documents packed into one row are as they are alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Trial, difference
from intently.report import Cell
from intently.targets.stream import Batch

NAME = "documents-isolated"


def crossed(trial: Trial, condition: Condition) -> Tensor:
    """[document changed, document]: how far outputs of a document move when all of another is overwritten."""
    base = trial.output(condition)
    batch = trial.batch(condition.layout)
    numbers = torch.tensor(trial.target.documents)
    count = int(numbers.max()) + 1
    moved = torch.zeros(count, count, dtype=base.dtype)
    for document in range(count):
        other = trial.run(overwritten(trial, batch, document), condition.switch)
        gap = difference(other, base)[0]
        for each in set(range(count)) - {document}:
            moved[document, each] = gap[numbers == each].amax()
    return moved


def overwritten(trial: Trial, batch: Batch, document: int) -> Batch:
    """The batch with other content at every position of one document of sample 0."""
    arguments = dict(batch.arguments)
    places = [i for i, number in enumerate(trial.target.documents) if number == document]
    for stream in trial.target.streams:
        for place in places:
            arguments[stream.argument] = stream.change(arguments[stream.argument], 0, place, trial.seed + 1)
    return Batch(arguments, batch.lengths, batch.samples, batch.kept)


def from_alone(trial: Trial, condition: Condition) -> float | None:
    """Largest difference between a document of sample 0 and the same document as a batch of its own; None where that cannot run."""
    together, batch = trial.output(condition)[0], trial.batch(condition.layout)
    numbers, worst = torch.tensor(trial.target.documents), 0.0
    for document in range(int(numbers.max()) + 1):
        places = (numbers == document).nonzero().flatten()
        count = len(places)
        arguments = {**batch.arguments, **{t.argument: t.value(1, (0,) * count) for t in trial.target.tellings}}
        for stream in trial.target.streams:
            content = arguments[stream.argument]
            sample = content[:, :1] if stream.sequence_first else content[:1]
            axis = 0 if stream.sequence_first else 1 if stream.kind == "tokens" else sample.dim() - 2
            arguments[stream.argument] = sample.index_select(axis, places)
            if stream.padding is not None and stream.padding.argument in arguments:
                arguments[stream.padding.argument] = stream.padding.value(torch.ones(1, count, dtype=torch.bool))
        try:
            single = trial.run(Batch(arguments, dict.fromkeys(batch.lengths, count), 1, {}), condition.switch)[0]
        except Exception:
            return None
        if single.shape != together[places].shape:
            return None
        worst = max(worst, float(difference(single, together[places]).amax()))
    return worst


def told_positions(trial: Trial) -> bool:
    """Whether a document's positions are its own: they are passed, or there are none."""
    return any(t.form == "positions" for t in trial.target.tellings) or trial.target.main.part != ""


def try_on(trial: Trial) -> Iterable[Cell]:
    if not trial.target.documents:
        return cells.inapplicable(NAME, trial, "nothing is packed here: the intent names no documents")
    found = []
    for condition in trial.conditions:
        if condition.layout.padded:
            continue
        if cells.ill(trial, condition):
            found.append(cells.untried(NAME, condition, "outputs are not finite"))
        elif same := cells.same_as(trial, condition):
            found.append(cells.inherited(NAME, condition, same, found))
        elif trial.output(condition).shape[1] != len(trial.target.documents):
            found.append(cells.untried(NAME, condition, "the output has no position axis"))
        else:
            found.append(_judged(trial, condition))
    return found


def _judged(trial: Trial, condition: Condition) -> Cell:
    noise = trial.threshold(trial.output(condition))
    moved = crossed(trial, condition)
    worst, note = float(moved.amax()), ""
    if worst > noise:
        changed, hit = (int(i) for i in (moved == moved.amax()).nonzero()[0])
        note = f"overwriting document {changed} moves document {hit}"
    else:
        gap = from_alone(trial, condition)
        # Another length means other roundings; float32 steps inside a float64 model, more so.
        scale = float(trial.output(condition).abs().amax())
        if gap is not None and gap > max(100 * noise, 2e-6 * scale if "float32" in trial.in_precision else 0.0):
            said = f"documents do not move each other, yet differ by {gap:.3g} from themselves alone"
            if told_positions(trial) and not trial.target.known:
                worst, note = gap, said
            else:
                note = f"{said} (positions that run on, it may be)"
    return cells.cell(NAME, condition, worst, noise, broken=worst > noise, note=note)


PROMISE = Promise(
    name=NAME,
    statement="Documents packed into one row are as they are alone: none moves another, with and without a mask of ones.",
    applies_to="intents that name documents, and models that are told of them (document_ids, cu_seqlens, positions that start again)",
    how="Each document of a packed row is overwritten, and no output of another may move by more than the noise floor. "
    "Where positions are passed, each is run as a batch of its own too. Nothing is tried with pads, and no cache is asked for.",
    sources=(
        "huggingface/transformers#46634",
        "Krell et al. 2021, packing without cross-contamination: arXiv:2107.02027",
    ),
    try_on=try_on,
)
