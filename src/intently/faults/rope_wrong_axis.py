"""Fault `rope-wrong-axis`: the angles of rotary positions run over heads or samples, not over the sequence."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from intently.edits import turn_again
from intently.faults import rope
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises.order_aware import wrong_axis
from intently.sites import Site
from intently.targets.positions import position_argument
from intently.targets.stream import Batch

_AXES = {0: "samples of the batch", 1: "heads"}


def look(seen: Examination) -> Iterator[Suspicion]:
    argument = position_argument(seen.trial.target, seen.trial.target.main.argument)

    def given(batch: Batch) -> Tensor | None:
        return batch.arguments.get(argument) if argument is not None else None

    for condition in seen.broken("order-aware"):
        for site in seen.trial.sites(condition):
            axis = wrong_axis(site)
            if axis is None:
                continue
            query, key = rope.pair_of(site)
            along = next(r for r in (query, key) if r.varies(axis) and r.step(axis) is not None)
            step = along.step(axis)
            assert step is not None
            said = f"the angles go from one to the next of the {_AXES[axis]} and are the same at all {site.queries} positions"
            yield Suspicion(
                fault=FAULT,
                promise="order-aware",
                site=site,
                message=f"queries and keys are turned, but {said}: the scores know no distance",
                witness=rope.witness(site, said, {"axis": axis, "positions": site.queries}),
                repair=lambda s, batch, step=step, first=along.maps[0, 0, 0]: turn_again(
                    lambda now: _by_position(now, step, first, given(batch))
                )(s),
                severity=rope.severity(seen),
                condition=condition.name,
            )


def _by_position(site: Site, step: Tensor, first: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor] | None:
    query = site.rotation("query")
    if query is None:
        return None
    positions = torch.arange(site.queries) if given is None else given
    right = rope.spread_over(rope.powers(step, positions, first), query)
    return right, right


FAULT = Fault(
    name="rope-wrong-axis",
    stage="project",
    promises=("order-aware",),
    severity="error",
    summary="The angles of rotary positions run over heads or samples, not over the sequence.",
    symptom="The model hardly knows the order of words, and learns it, if at all, from the mask; long contexts do not help.",
    why_silent="Heads and positions are both axes of the tensor: every shape fits, or is broadcast, and norms are kept.",
    fix="Take the length from the sequence axis of the layout at hand: axis 1 of [batch, sequence, heads, width], axis 2 of "
    "[batch, heads, sequence, width], and give the table that axis.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

def turn(x):
    angles = torch.arange(x.shape[-2])[:, None] / 100 ** (torch.arange(4) / 4)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(23, 24), nn.Linear(24, 72)

    def forward(self, ids):
        q, k, v = (t.unflatten(-1, (3, 8)) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        q, k, v = turn(q).transpose(1, 2), turn(k).transpose(1, 2), v.transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

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
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(23, 24), nn.Linear(24, 72)

    def forward(self, ids):
        q, k, v = (t.unflatten(-1, (3, 8)) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        q, k, v = turn(q.transpose(1, 2)), turn(k.transpose(1, 2)), v.transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

def build():
    torch.manual_seed(0)
    return Target(Decoder(), Intent(Mask.causal()), tokens=23)
""",
    sources=("facebookresearch/xformers#841", "Su et al. 2021, RoFormer: arXiv:2104.09864"),
    look=look,
)
