"""Fault `scale-wrong-width`: The scale is made from another width than the head's (the model's width, the number of heads, or a square root the wrong way round)."""

from __future__ import annotations

from intently.faults import scale
from intently.faults.base import Fault

FAULT = Fault(
    name="scale-wrong-width",
    stage="scale",
    promises=("scaled", "responsive", "sees-all"),
    severity="error",
    summary="The scale is made from another width than the head's (the model's width, the number of heads, or a square root the wrong way round).",
    symptom="Attention is too flat or too sharp by a constant factor, which changes with the number of heads.",
    why_silent="The factor has the right form and order of magnitude.",
    fix="Use the width that q and k have where they meet: 1 / math.sqrt(q.shape[-1]).",
    bad="""
from intently import Intent, Mask, Target

def attention(q, k, v):
    return (q @ k.mT / (2 * q.shape[-1]) ** 0.5).softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.full()))
""",
    good="""
from intently import Intent, Mask, Target

def attention(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.full()))
""",
    sources=("Vaswani et al. 2017, section 3.2.1: arXiv:1706.03762",),
    look=scale.looker("scale-wrong-width", lambda: FAULT),
)
