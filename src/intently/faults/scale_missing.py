"""Fault `scale-missing`: The logits are the bare q·k: nothing divides them by the square root of the head's width."""

from __future__ import annotations

from intently.faults import scale
from intently.faults.base import Fault

FAULT = Fault(
    name="scale-missing",
    stage="scale",
    promises=("scaled", "responsive", "sees-all"),
    severity="error",
    summary="The logits are the bare q·k: nothing divides them by the square root of the head's width.",
    symptom="Training stalls or plateaus early, the more so the wider the head; attention weights are close to one-hot.",
    why_silent="No error, no warning; the loss still falls. The learning rate gets the blame.",
    fix="Divide the scores by math.sqrt(q.shape[-1]) before the softmax.",
    bad="""
from intently import Intent, Mask, Target

def attention(q, k, v):
    return (q @ k.mT).softmax(-1) @ v

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
    look=scale.looker("scale-missing", lambda: FAULT),
)
