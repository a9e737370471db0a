"""Fault `softmax-low-precision`: scores or softmax are computed in half precision, and large logits lose their differences."""

from __future__ import annotations

from collections.abc import Iterator

from intently.edits import float32_inside
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises.in_half import (
    EXPLAINED,
    Rounding,
    measured,
    plain_condition,
    precision_of,
    reference_logits,
    roundings,
)
from intently.report import Witness
from intently.sites import Site

_WHERE = {
    "scores": "the scores are rounded before the softmax",
    "softmax": "the softmax itself runs in half precision",
    "sum": "the weighted sum is made in half precision",
}


def look(seen: Examination) -> Iterator[Suspicion]:
    name, condition = precision_of(seen.trial), plain_condition(seen.trial)
    if name is None or condition is None:
        return
    if not any(c.promise == "backends-agree" and c.condition == name and c.verdict == "broken" for c in seen.cells):
        return
    exact = {s.key_name: s for s in seen.trial.sites(condition)}
    for found in roundings(seen.trial):
        if found.units <= EXPLAINED:
            continue
        left = _repaired(seen, found, exact[found.site.key_name])
        cured = left is not None and left <= EXPLAINED
        yield Suspicion(
            fault=FAULT,
            promise="backends-agree",
            site=found.site,
            message=f"in {name} the output is {found.units:.0f} units of the last place off, where rounding of in- and output explains "
            f"a few: {_WHERE[found.stage]}, and logits reach {found.largest:.3g}",
            witness=Witness(
                f"from the same {name} queries and keys a weight is off by {found.weight_off:.3g}",
                None,
                {"units": found.units, "weight": found.weight_off, "largest logit": found.largest},
            ),
            severity="note" if seen.trial.target.known else None,
            condition=condition.name,
            proven_by=f"computed in float32 inside this call, the output is {left:.1f} units off" if cured else "",
            unprovable="" if cured else "computing this call in float32 was not enough",
        )


def _repaired(seen: Examination, found: Rounding, exact: Site) -> float | None:
    """Units by which the call is off with scores, softmax and sum in float32."""
    condition = plain_condition(seen.trial)
    assert condition is not None
    key = found.site.key_name
    repair = float32_inside(lambda site: reference_logits(site, exact))
    mended = seen.trial.repaired({key: lambda site, batch: repair(site)}, [condition])
    site = next((s for s in mended.sites_in(found.dtype, condition) if s.key_name == key), None)
    left = measured(site, exact) if site is not None else None
    return None if left is None else left.units


FAULT = Fault(
    name="softmax-low-precision",
    stage="normalize",
    promises=("backends-agree",),
    severity="warning",
    summary="Scores or softmax are computed in half precision, so that large logits lose their differences.",
    symptom="A model that is right in float32 is worse in bfloat16, the more its logits have grown.",
    why_silent="Small logits hide it; only where scores are large is a unit of the last place a difference that matters.",
    fix="Multiply queries and keys in float32 and cast after the softmax, or use F.scaled_dot_product_attention, which keeps float32 inside.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        nn.init.constant_(self.qkv.bias[:64], 4.0)

    def forward(self, x):
        q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / 32**0.5
        return (scores.softmax(-1) @ v)[:, 0]

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
        nn.init.constant_(self.qkv.bias[:64], 4.0)

    def forward(self, x):
        q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ k.to(wide).mT / 32**0.5
        return (scores.softmax(-1).to(v.dtype) @ v)[:, 0]

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.full()))
""",
    sources=("PyTorch documentation of F.scaled_dot_product_attention: float32 inside for half-precision inputs",),
    look=look,
)
