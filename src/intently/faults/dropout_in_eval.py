"""Fault `dropout-in-eval`: attention weights are dropped at random although the model is in eval mode."""

from __future__ import annotations

from collections.abc import Iterator

from intently.edits import drop_nothing
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.report import Witness


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks(seen.broken("repeatable")):
        site = each.site
        if site.dropout <= 0:
            continue
        cell = seen.cell("repeatable", each.condition)
        moved = cell.error if cell is not None and cell.error is not None else 0.0
        yield Suspicion(
            fault=FAULT,
            promise="repeatable",
            site=site,
            message=f"weights are dropped with probability {site.dropout:g} though the model is in eval mode",
            witness=Witness(
                f"two calls on the same input differ by {moved:.3g}",
                None,
                {"dropout": site.dropout, "difference": moved},
            ),
            repair=lambda s, batch: drop_nothing()(s),
            condition=each.condition.name,
        )


FAULT = Fault(
    name="dropout-in-eval",
    stage="normalize",
    promises=("repeatable",),
    severity="error",
    summary="Attention dropout is active in eval mode.",
    symptom="Two eval calls on the same input differ; evaluation is noisy and a little worse than it should be.",
    why_silent="F.scaled_dot_product_attention and F.dropout apply their probability whatever mode the module is in.",
    fix="dropout_p=self.p if self.training else 0.0, or nn.Dropout as a module, or F.dropout(x, p, training=self.training).",
    bad="""
import torch.nn.functional as F
from intently import Intent, Mask, Target

def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)

def build():
    return Target(attention, Intent(Mask.full()))
""",
    good="""
import torch.nn.functional as F
from intently import Intent, Mask, Target

def attention(q, k, v, training=False):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if training else 0.0)

def build():
    return Target(attention, Intent(Mask.full()))
""",
    sources=(
        "huggingface/pytorch-image-models#1978",
        "PyTorch documentation of F.scaled_dot_product_attention, dropout_p",
    ),
    look=look,
)
