"""Fault `rope-stale-offset`: angles of an earlier call, or of other places than those at which the tokens of a piece stand."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from intently.edits import turn_again
from intently.faults import rope
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.faults.rope_in_pieces import misplaced
from intently.promises.order_aware import stale
from intently.report import Witness
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
    for found in misplaced(seen):
        fed, held = f"the piece after {found.meant} tokens", {"position": found.meant, "angles of": found.place}
        said = f"{fed} is turned by the angles of position {found.place} on, the whole forward by those of its own"
        yield Suspicion(
            fault=FAULT,
            promise="cache-equal",
            site=found.site,
            message=f"{said}: its positions do not go on from what is cached",
            witness=Witness(
                f"{fed}: queries stand at position {found.place}, in the whole forward at {found.meant}", None, held
            ),
            repair=found.repair,
            condition=found.condition.name,
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
    promises=("order-aware", "cache-equal"),
    severity="error",
    summary="Angles kept from an earlier call, or counted from 0 though tokens are cached, turn queries and keys.",
    symptom="Packed rows, left-padded batches and steps after a cache go wrong, while a plain forward pass is right.",
    why_silent="The first call is right, and so is every later one that starts at the same position.",
    fix="Keep a table over all positions and read it at the positions of the call, or make the angles anew from them; where none are "
    "given, count from the number of tokens in the cache.",
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
