"""Fault `saturated-logits`: q·k is so large that most heads of a call are one-hot and let no gradient through."""

from __future__ import annotations

from collections.abc import Iterator

from intently.edits import norm_queries_and_keys
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises.responsive import Sharpness, sharpness
from intently.report import Table, Witness


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks(seen.broken("responsive")):
        found = sharpness(each.site)
        if found is None or float(found.saturated.double().mean()) <= 0.5:
            continue
        heads = tuple(int(h) for h in found.saturated.nonzero().flatten())
        first = heads[0]
        yield Suspicion(
            fault=FAULT,
            promise="responsive",
            site=each.site,
            heads=None if len(heads) == each.site.heads else heads,
            message=f"{len(heads)} of {each.site.heads} heads are one-hot: scaled q·k reaches {float(found.largest[first]):.3g}, and a row's "
            f"weights have an entropy of {float(found.entropy[first]):.2g} nats where even weights have {float(found.uniform[first]):.2g}; "
            f"the softmax lets {float(found.gradient[first]):.1g} of a gradient through",
            witness=_witness(found),
            repair=lambda s, batch: norm_queries_and_keys()(s),
            severity="note" if seen.trial.target.known else None,
            condition=each.condition.name,
        )


def _witness(found: Sharpness) -> Witness:
    shown = range(min(6, found.gradient.numel()))
    rows = (
        ("gradient", found.gradient),
        ("entropy", found.entropy),
        ("spread of q·k", found.spread),
        ("largest q·k", found.largest),
    )
    table = Table(
        "median over rows",
        tuple(f"head {h}" for h in shown),
        tuple((name, tuple(float(f"{float(values[h]):.3g}") for h in shown)) for name, values in rows),
        tuple((0, h) for h in shown if found.saturated[h]),
    )
    worst = int(found.spread.argmax())
    return Witness(
        f"head {worst}: the scaled q·k of a row spread by {float(found.spread[worst]):.3g} nats around their mean",
        table,
        {"spread": float(found.spread[worst]), "gradient": float(found.gradient[worst])},
    )


FAULT = Fault(
    name="saturated-logits",
    stage="scale",
    promises=("responsive", "sees-all"),
    severity="warning",
    summary="The scaled q·k is so large that the weights are one-hot and the gradient is near 0.",
    symptom="Training stalls or diverges; attention does not change any more; half precision and float32 pick different keys.",
    why_silent="The forward pass is valid attention, and the loss still falls a little through the rest of the model.",
    fix="Normalise queries and keys before their product (QK-norm), check the scale 1/√width, or start from smaller weights of q and k.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        nn.init.normal_(self.qkv.weight, std=1.0)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

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
        nn.init.normal_(self.qkv.weight, std=32**-0.5)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.full()))
""",
    sources=("Zhai et al. 2023: arXiv:2303.06296", "Dehghani et al. 2023, QK-norm: arXiv:2302.05442"),
    look=look,
)
