"""Fault `scale-twice`: The scale is applied twice, so that the logits are q·k / width."""

from __future__ import annotations

from intently.faults import scale
from intently.faults.base import Fault

FAULT = Fault(
    name="scale-twice",
    stage="scale",
    promises=("scaled",),
    severity="error",
    summary="The scale is applied twice, so that the logits are q·k / width.",
    symptom="Attention is almost uniform at first and learns slowly.",
    why_silent="A flatter softmax looks like a cautious model. It happens when q is scaled by hand and then given to a kernel that scales too.",
    fix="Scale once: pass scale=1.0 to the kernel, or do not scale q.",
    bad="""
from intently import Intent, Mask, Target

def attention(q, k, v):
    return (q @ k.mT / q.shape[-1]).softmax(-1) @ v

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
    look=scale.looker("scale-twice", lambda: FAULT),
)
