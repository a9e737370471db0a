"""Fault `weight-is-not-effect`: one position takes most of the weight, and what it adds to the output is next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises import Condition, Trial, difference
from intently.promises.cells import ill
from intently.promises.in_half import plain_condition
from intently.report import Witness
from intently.sites import Replacement, Site

WEIGHT = 0.5  # mean weight from which on a position takes most of it
EFFECT = 0.01  # of what the rest does to the output
FEWEST = 3  # keys that a row must see to be counted


@dataclass(frozen=True)
class Favourite:
    """The key with the largest mean weight at a call; `share` is its part of the sum of weight × |value|."""

    key: int
    weight: float
    share: float


def favourite(site: Site) -> Favourite | None:
    """The key that takes most of the weight of most rows; None where none does."""
    tensors = site.tensors
    if (
        tensors is None
        or tensors.value is None
        or site.visible is None
        or site.partial
        or site.deferred
        or not site.rows.are_tokens
    ):
        return None
    weights, value = tensors.weights.double(), tensors.value.double()
    if weights.shape != site.visible.shape or value.shape[-2] != weights.shape[-1] or site.negative:
        return None
    rows = (site.visible.sum(-1, keepdim=True) >= FEWEST).double()
    if not bool(rows.any()):
        return None
    mean = (weights * rows).sum((0, 1, 2)) / rows.sum()
    key = int(mean.argmax())
    if float(mean[key]) < WEIGHT:
        return None
    parts = weights * rows * value.norm(dim=-1)[..., None, :]
    return Favourite(key, float(mean[key]), float(parts[..., key].sum() / parts.sum().clamp_min(1e-300)))


def look(seen: Examination) -> Iterator[Suspicion]:
    trial, condition = seen.trial, plain_condition(seen.trial)
    if condition is None or ill(trial, condition):
        return
    for site in trial.sites(condition):
        found = favourite(site)
        if found is None or found.share > 5 * EFFECT:
            continue
        alone, rest = (
            _without(trial, condition, site, keep)
            for keep in (lambda k, j=found.key: k != j, lambda k, j=found.key: k == j)
        )
        if rest <= 0 or alone > EFFECT * rest:
            continue
        yield Suspicion(
            fault=FAULT,
            promise="responsive",
            site=site,
            message=f"key {found.key} takes {found.weight:.0%} of the weight and gives {found.share:.1%} of the output's size, since its values "
            "are small: a map of weights does not show what this call does",
            witness=Witness(
                f"without what key {found.key} adds an output moves by {alone:.2g}, without what the others add by {rest:.2g}",
                None,
                {"key": found.key, "weight": found.weight, "share": found.share, "effect": alone / rest},
            ),
            condition=condition.name,
            proven_by=f"its weight taken away at this call, and no other changed, moves the output by {alone / rest:.2%} of what the rest does",
        )


def _without(trial: Trial, condition: Condition, site: Site, keep: Callable[[Tensor], Tensor]) -> float:
    """How far an output moves when the weights of other keys than those kept are taken away at a call, not shared out."""

    def edit(here: Site, batch: object) -> Replacement | None:
        if here.tensors is None:
            return None
        kept = keep(torch.arange(here.keys))
        return Replacement(here.tensors.weights * kept.to(here.tensors.weights), here.tensors.logits)

    output = trial.repaired({site.key_name: edit}, [condition]).output(condition)
    return float(difference(output, trial.output(condition)).amax())


FAULT = Fault(
    name="weight-is-not-effect",
    stage="aggregate",
    promises=("responsive",),
    severity="note",
    summary="A position takes most of the weight, and taking it away changes almost nothing: its values are next to zero.",
    symptom="Maps of attention point at one token (often the first) that explains nothing.",
    why_silent="It is a way for a head to do nothing, and right as such; only who reads weights as importance is misled.",
    fix="Read weight × |value| or the effect of taking the key away, not the weight; a learned sink or an off-by-one softmax gives heads a "
    "way to do nothing that no token has to carry.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        first = (torch.arange(x.shape[1]) == 0).to(x)
        v = v * (1 - 0.999 * first)[:, None]
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=4 * first[None]).transpose(1, 2).flatten(2)

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.full()))
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        first = (torch.arange(x.shape[1]) == 0).to(x)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=4 * first[None]).transpose(1, 2).flatten(2)

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.full()))
""",
    sources=(
        "Kobayashi et al. 2020, attention is not only a weight: arXiv:2004.10102",
        "Xiao et al. 2023, attention sinks: arXiv:2309.17453",
    ),
    look=look,
)
