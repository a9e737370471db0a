"""Fault `position-shifted-by-padding`: positions are counted from the pads in front, not from the first token."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises import Condition, Trial
from intently.promises.order_aware import wrong_pairs
from intently.promises.position_shift import Run, pad_id, rounding, shift, shifted_stream
from intently.report import Severity, Source, Witness
from intently.targets.positions import Counting, counted, position_argument
from intently.targets.stream import Batch, Stream

_STARTS = (0, 1, 2)  # what a model may call its first position


def look(seen: Examination) -> Iterator[Suspicion]:
    for condition in seen.broken("position-shift"):
        cell, stream = seen.cell("position-shift", condition), shifted_stream(seen.trial, condition)
        if cell is None or stream is None:
            continue
        if any(wrong_pairs(s) for c in seen.broken("order-aware") for s in seen.trial.sites(c)):
            return  # scores that know more than the distance move with every shift
        argument = position_argument(seen.trial.target, stream.argument)
        given = argument is not None and _given(seen.trial, condition, stream, argument)
        place, source, cured = _counted(seen.trial, condition, stream)
        how = ""
        if given:
            how = f"with {argument} counted from the mask, position-shift is kept ({condition.name})"
        elif cured:
            how = f"with the positions that are added here counted from the mask, position-shift is kept ({condition.name})"
        pads = int((~seen.trial.kept(condition.layout)[stream.argument][0]).sum())
        yield Suspicion(
            fault=FAULT,
            promise="position-shift",
            site=None,
            place=place,
            source=source,
            message=f"{pads} pads in front of the tokens move their outputs by {cell.error:.3g}, hidden as the pads are: positions "
            "are counted from the first pad" + (f"; {argument} can be passed, and was not" if argument else ""),
            witness=Witness(
                f"the same tokens behind {pads} pads and in front of them: outputs differ by {cell.error:.3g}",
                None,
                {"pads": pads, "moved": cell.error},
            ),
            severity=_severity(seen.trial, argument, bool(how)),
            condition=condition.name,
            proven_by=how,
            unprovable="positions counted from the mask could not be put in place, or do not cure it",
        )
        return  # one condition tells it; the grid shows the others


def _severity(trial: Trial, argument: str | None, proven: bool) -> Severity:
    """Where the caller can pass positions, in encoders and in released types it depends on the caller."""
    alone = len(trial.target.streams) == 1  # a decoder that reads a memory is given whole targets, padded behind
    decoder = alone and bool(trial.intent.is_causal)
    return "error" if proven and decoder and argument is None and not trial.target.known else "warning"


def _given(trial: Trial, condition: Condition, stream: Stream, argument: str) -> bool:
    """Whether positions counted from the mask, passed by the caller, cure it."""
    for start in _STARTS:

        def run(batch: Batch, start: int = start) -> Tensor:
            positions = counted(batch.kept[stream.argument]) + start
            arguments = {**batch.arguments, argument: positions}
            return trial.run(Batch(arguments, batch.lengths, batch.samples, batch.kept), condition.switch)

        if _cures(trial, condition, stream, run):
            return True
    return False


def _counted(trial: Trial, condition: Condition, stream: Stream) -> tuple[str, Source | None, bool]:
    """Where a table of positions is added to the content, and whether reading it by the mask cures it."""
    places: dict[str, Source | None] = {}

    def run(batch: Batch) -> Tensor:
        with Counting(trial.runner.model, batch.kept[stream.argument]) as mode:
            output = trial.run(batch, condition.switch)
        places.update(mode.places)
        return output

    cured = _cures(trial, condition, stream, run)
    place, source = next(iter(places.items()), ("", None))
    return place, source, cured


def _cures(trial: Trial, condition: Condition, stream: Stream, run: Run) -> bool:
    noise = rounding(trial, condition)
    try:
        return any(
            bool((shift(trial, condition, stream, run, fill) <= noise).all())
            for fill in dict.fromkeys((None, pad_id(trial, stream)))
        )
    except Exception:  # positions beyond the table, or an argument that means something else
        return False


FAULT = Fault(
    name="position-shifted-by-padding",
    stage="project",
    promises=("position-shift",),
    severity="error",
    summary="Positions are counted from the pads in front of the tokens, not from the first token.",
    symptom="Generation from a left-padded batch is worse than one prompt at a time, the more so the longer the pads.",
    why_silent="The pads are hidden as they should be and every shape fits; learned positions only stand for other places.",
    fix="Number the positions from the mask, (attention_mask.cumsum(-1) - 1).clamp(min=0), or pass such positions where the "
    "model takes them.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place, self.qkv = nn.Embedding(23, 16), nn.Embedding(64, 16), nn.Linear(16, 48)

    def forward(self, input_ids, attention_mask=None):
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = torch.arange(input_ids.shape[1])
        q, k, v = self.qkv(self.embed(input_ids) + self.place(positions))[:, None].chunk(3, -1)
        seen = torch.ones(q.shape[2], q.shape[2]).tril().bool() & keep[:, None, None, :].bool()
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)[:, 0]

def build():
    torch.manual_seed(0)
    return Target(Decoder(), Intent(Mask.causal()), tokens=23)
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place, self.qkv = nn.Embedding(23, 16), nn.Embedding(64, 16), nn.Linear(16, 48)

    def forward(self, input_ids, attention_mask=None):
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (keep.cumsum(-1) - 1).clamp(min=0)
        q, k, v = self.qkv(self.embed(input_ids) + self.place(positions))[:, None].chunk(3, -1)
        seen = torch.ones(q.shape[2], q.shape[2]).tril().bool() & keep[:, None, None, :].bool()
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)[:, 0]

def build():
    torch.manual_seed(0)
    return Target(Decoder(), Intent(Mask.causal()), tokens=23)
""",
    sources=("huggingface/trl#469",),
    look=look,
)
