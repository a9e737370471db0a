"""Fault `window-ignored`: a call does not keep to the window that was meant."""

from __future__ import annotations

from intently.faults.base import Fault
from intently.faults.windows import looker

FAULT = Fault(
    name="window-ignored",
    stage="mask",
    promises=("windowed", "sees-all"),
    severity="error",
    summary="A call sees far beyond the window that was meant, or another window.",
    symptom="On sequences longer than the window outputs differ from those the model was trained with; memory grows with the length.",
    why_silent="Up to the window's length nothing differs, and most tests are shorter.",
    fix="Bring the window into every code path, also where no mask is given and is_causal=True takes its place: "
    "attn_mask=(j <= i) & (j > i - window).",
    bad="""
import torch
import torch.nn.functional as F
from intently import Intent, Mask, Target

WINDOW = 3

def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

def build():
    return Target(attention, Intent(Mask.causal() & Mask.window(WINDOW)))
""",
    good="""
import torch
import torch.nn.functional as F
from intently import Intent, Mask, Target

WINDOW = 3

def attention(q, k, v):
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) & (j > i - WINDOW))

def build():
    return Target(attention, Intent(Mask.causal() & Mask.window(WINDOW)))
""",
    sources=("huggingface/transformers#33586",),
    look=looker(lambda: FAULT, one=False),
)
