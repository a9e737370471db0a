"""Fault `order-blind`: no position enters, so that reversed tokens give the reversed outputs and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises.order_aware import blind, wrong_axis
from intently.report import Witness


def look(seen: Examination) -> Iterator[Suspicion]:
    for condition in seen.broken("order-aware"):
        if any(wrong_axis(s) is not None for s in seen.trial.sites(condition)) or not blind(seen.trial, condition):
            continue
        yield Suspicion(
            fault=FAULT,
            promise="order-aware",
            site=None,
            message="tokens in reverse give the reversed outputs: the model takes a text for a bag of words",
            witness=Witness("outputs of the reversed tokens, reversed, are those of the tokens"),
            severity="note" if seen.trial.target.known else "warning",
            condition=condition.name,
            unprovable="which scheme of positions is meant cannot be known, so none can be put in place",
        )
        return


FAULT = Fault(
    name="order-blind",
    stage="project",
    promises=("order-aware",),
    severity="warning",
    summary="No position enters: permuting the tokens permutes the outputs and does nothing else.",
    symptom="Word order makes no difference; the model does well where a bag of words is enough, and no better.",
    why_silent="Attention over a set is a fine thing, and the loss falls as far as counting words takes it.",
    fix="Add positions: learned or sinusoidal ones to the embeddings, or turn or bias the scores by distance; where the tokens "
    "are a set, waive order-aware in the intent.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(23, 16), nn.Linear(16, 48)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]

def build():
    torch.manual_seed(0)
    return Target(Encoder(), Intent(Mask.full()), tokens=23)
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place, self.qkv = nn.Embedding(23, 16), nn.Embedding(64, 16), nn.Linear(16, 48)

    def forward(self, ids):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]

def build():
    torch.manual_seed(0)
    return Target(Encoder(), Intent(Mask.full()), tokens=23)
""",
    sources=("Vaswani et al. 2017, section 3.5: arXiv:1706.03762",),
    look=look,
)
