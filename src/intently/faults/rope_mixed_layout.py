"""Fault `rope-mixed-layout`: tables of one layout turn the pairs of another, so that more than the distance counts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from intently.edits import turn_again
from intently.faults import rope
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises.order_aware import wrong_pairs
from intently.sites import Site


def look(seen: Examination) -> Iterator[Suspicion]:
    for condition in seen.broken("order-aware"):
        for site in seen.trial.sites(condition):
            apart = wrong_pairs(site)
            if not apart:
                continue
            query, key = rope.pair_of(site)
            if query.keeps_norm and key.keeps_norm:
                said = "queries and keys are turned in different pairs of features, or only one of them is"
            else:
                said = "the two features of a pair are turned by two angles, so that its norm goes by position"
            promise, where = rope.promise(seen, condition)
            yield Suspicion(
                fault=FAULT,
                promise=promise,
                site=site,
                message=f"{said}: a query and a key at one position meet differently from place to place, by {apart:.2g} of their product",
                witness=rope.witness(site, said, {"apart": apart}),
                repair=lambda s, batch: turn_again(_agreeing)(s),
                severity=rope.severity(seen),
                condition=where,
            )


def _agreeing(site: Site) -> tuple[Tensor, Tensor] | None:
    query, key = site.rotation("query"), site.rotation("key")
    if query is None or key is None or query.maps.shape != key.maps.shape:
        return None
    right = rope.agreeing(query, key)
    return None if right is None else (right, right)


FAULT = Fault(
    name="rope-mixed-layout",
    stage="project",
    promises=("order-aware", "position-shift"),
    severity="error",
    summary="Tables of angles laid out for one pairing of features turn the pairs of another.",
    symptom="A port gives nonsense with the right weights, or a model trained so forgets what lies further back and suffers from left padding.",
    why_silent="Both layouts have the same shapes and numbers, and a model trained with the mixture still learns.",
    fix="Half-split pairs (i, i + d/2) need torch.cat([angles, angles], -1), neighbouring pairs (2i, 2i + 1) need "
    "angles.repeat_interleave(2, -1); turn queries and keys alike.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

def turn(x):
    angles = torch.arange(x.shape[-2])[:, None] / 100 ** (torch.arange(4) / 4)
    angles = angles.repeat_interleave(2, -1)
    a, b = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(23, 24), nn.Linear(24, 72)

    def forward(self, ids):
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return y.transpose(1, 2).flatten(2)

def build():
    torch.manual_seed(0)
    return Target(Decoder(), Intent(Mask.causal()), tokens=23)
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

def turn(x):
    angles = torch.arange(x.shape[-2])[:, None] / 100 ** (torch.arange(4) / 4)
    angles = torch.cat([angles, angles], -1)
    a, b = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(23, 24), nn.Linear(24, 72)

    def forward(self, ids):
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return y.transpose(1, 2).flatten(2)

def build():
    torch.manual_seed(0)
    return Target(Decoder(), Intent(Mask.causal()), tokens=23)
""",
    sources=("Su et al. 2021, RoFormer, section 3.4.2: arXiv:2104.09864",),
    look=look,
)
