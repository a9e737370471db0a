"""Fault `heads-interleaved`: the rows of the scores are not tokens; heads, samples and positions are mixed up by a reshape."""

from __future__ import annotations

from collections.abc import Iterator

from intently.edits import split_heads
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, streams_of
from intently.report import Witness
from intently.sites import Site


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks():
        rows = each.site.rows
        if rows.are_tokens or each.condition.layout.samples < 2:
            continue
        promise = _promise(seen, each.condition, over_batch=bool(rows.over_batch))
        main = seen.trial.target.main
        length = main.positions(seen.trial.lengths[main.argument])
        yield Suspicion(
            fault=FAULT,
            promise=promise,
            site=each.site,
            message=_message(each.site),
            witness=_witness(seen, each),
            repair=lambda site, batch, n=length, b=each.site: split_heads(lambda s: seen.wanted(s, batch), n, b)(site),
            condition=each.condition.name,
        )


def _promise(seen: Examination, condition, *, over_batch: bool) -> str:
    order = (
        ("batch-independent", "causal", "padding-inert", "sees-all")
        if over_batch
        else ("causal", "padding-inert", "sees-all")
    )
    return next((p for p in order if seen.breaks(p, condition)), "backends-agree")


def _message(site: Site) -> str:
    if site.rows.over_batch:
        return (
            f"the {site.queries} queries of a call are the samples of the batch, not the tokens of one sample: a layer that "
            "expects the sequence first is given the batch first"
        )
    names = " and ".join(site.rows.scrambled)
    return f"a row of one head in the {names} holds different features at different positions: a reshape without the transpose"


def _witness(seen: Examination, each) -> Witness:
    query, _ = streams_of(seen.trial.target, seen.trial.lengths, each.site)
    if each.site.rows.over_batch:
        return Witness(f"{each.batch.samples} samples are in the batch, and the call has {each.site.queries} queries")
    influence = seen.trial.influence(each.condition)
    stream = (query or seen.trial.target.main).argument
    if stream not in influence.moved or influence.moved[stream].shape[-1] < 2:
        return Witness("rows of the scores are not tokens")
    moved = influence.moved[stream][0, 0]
    outputs = [int(i) for i in (moved > seen.trial.threshold(influence.base)).nonzero().flatten()[:8]]
    return Witness(f"changing the token at position 0 moves the outputs at {outputs}", None, {"moved": outputs})


FAULT = Fault(
    name="heads-interleaved",
    stage="project",
    promises=("causal", "padding-inert", "sees-all", "batch-independent", "backends-agree"),
    severity="error",
    summary="The heads are split or merged by a view without the transpose, so that a row of the scores is no token.",
    symptom="Tokens mix before or after attention; a decoder sees the future although its mask is right; samples mix in the batch.",
    why_silent="The number of elements is the same, so view and reshape accept it.",
    fix="x.view(batch, length, heads, width).transpose(1, 2) on the way in, .transpose(1, 2).reshape(batch, length, -1) on the way "
    "out; batch_first=True for nn.MultiheadAttention.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (t.reshape(batch, 3, length, 8) for t in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, 24))

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.causal()))
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (t.reshape(batch, length, 3, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, 24))

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.causal()))
""",
    sources=("PyTorch documentation of nn.MultiheadAttention, batch_first",),
    look=look,
)
