"""Fault `rope-stale-offset`: angles of an earlier call are used again, whatever positions the call is given."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from intently.edits import turn_again
from intently.faults import rope
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises.order_aware import stale
from intently.sites import Site
from intently.targets.stream import Batch


def look(seen: Examination) -> Iterator[Suspicion]:
    for condition in seen.broken("order-aware"):
        argument, sites = stale(seen.trial, condition)
        for site in sites:
            said = f"a call with other {argument} turns by the same angles as the one before"
            yield Suspicion(
                fault=FAULT,
                promise="order-aware",
                site=site,
                message=f"{said}: the table is kept, or {argument} never reaches it",
                witness=rope.witness(site, said, {"argument": argument}),
                repair=lambda s, batch, a=argument: turn_again(lambda now: _at(now, batch, a))(s),
                severity=rope.severity(seen),
                condition=condition.name,
            )


def _at(site: Site, batch: Batch, argument: str) -> tuple[Tensor, Tensor] | None:
    """The maps at the positions that the call was given, the table taken to start at 0."""
    given, rotation = batch.arguments.get(argument), site.rotation("query")
    if given is None or rotation is None:
        return None
    step = rotation.step(2)
    if step is None:
        return None
    positions = given if isinstance(given, Tensor) and given.numel() > 1 else torch.arange(site.queries) + int(given)
    right = rope.spread_over(rope.powers(step, positions, rotation.maps[0, 0, 0]), rotation)
    return right, right


FAULT = Fault(
    name="rope-stale-offset",
    stage="project",
    promises=("order-aware",),
    severity="error",
    summary="Angles kept from an earlier call turn queries and keys, whatever positions the call is given.",
    symptom="Packed rows, left-padded batches and steps after a cache go wrong, while a plain forward pass is right.",
    why_silent="The first call is right, and so is every later one that starts at the same position.",
    fix="Keep a table over all positions and read it at the positions of the call, or make the angles anew from them.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.kept = nn.Embedding(23, 24), nn.Linear(24, 72), {}

    def turn(self, x, positions):
        if x.shape[2] not in self.kept:
            self.kept[x.shape[2]] = positions[0, None, :, None] / 100 ** (torch.arange(4) / 4)
        angles = self.kept[x.shape[2]]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, ids, position_ids=None):
        places = torch.arange(ids.shape[1])[None] if position_ids is None else position_ids
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        q, k = self.turn(q, places), self.turn(k, places)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

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
        self.embed, self.qkv, self.kept = nn.Embedding(23, 24), nn.Linear(24, 72), {}

    def turn(self, x, positions):
        angles = positions[:, None, :, None] / 100 ** (torch.arange(4) / 4)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, ids, position_ids=None):
        places = torch.arange(ids.shape[1])[None] if position_ids is None else position_ids
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        q, k = self.turn(q, places), self.turn(k, places)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

def build():
    torch.manual_seed(0)
    return Target(Decoder(), Intent(Mask.causal()), tokens=23)
""",
    sources=("Su et al. 2021, RoFormer: arXiv:2104.09864",),
    look=look,
)
