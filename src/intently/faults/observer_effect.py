"""Fault `observer-effect`: asking for the weights (or the cache) changes the output."""

from __future__ import annotations

from collections.abc import Iterator

from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.faults.paths import otherwise


def look(seen: Examination) -> Iterator[Suspicion]:
    conditions = [c for c in seen.broken("observer-neutral") if c.switch.looking]
    return otherwise(seen, lambda: FAULT, "observer-neutral", conditions)


FAULT = Fault(
    name="observer-effect",
    stage="outside",
    promises=("observer-neutral",),
    severity="error",
    summary="Asking for weights changes the output: another code path runs.",
    symptom="A heat map is drawn from a model that is not the one deployed.",
    why_silent="Nobody compares the outputs with and without weights.",
    fix="Build mask and scale once, before the choice of the path.",
    bad="""
import torch
import torch.nn.functional as F
from intently import Intent, Mask, Target

def attention(q, k, v, need_weights=False):
    if need_weights:
        distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
        weights = (q @ k.mT / q.shape[-1] ** 0.5 - 0.1 * distance.abs()).softmax(-1)
        return weights @ v, weights
    return F.scaled_dot_product_attention(q, k, v)

def build():
    return Target(attention, Intent(Mask.full()))
""",
    good="""
import torch.nn.functional as F
from intently import Intent, Mask, Target

def attention(q, k, v, need_weights=False):
    if need_weights:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return weights @ v, weights
    return F.scaled_dot_product_attention(q, k, v)

def build():
    return Target(attention, Intent(Mask.full()))
""",
    sources=("huggingface/transformers#30652",),
    look=look,
)
