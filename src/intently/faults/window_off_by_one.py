"""Fault `window-off-by-one`: a window sees one key more, or one less, than was meant."""

from __future__ import annotations

from intently.faults.base import Fault
from intently.faults.windows import looker

FAULT = Fault(
    name="window-off-by-one",
    stage="mask",
    promises=("windowed", "sees-all"),
    severity="error",
    summary="A window is one key wider or narrower than was meant.",
    symptom="Outputs differ a little from those of the model's other implementations, from about the window's length on.",
    why_silent="Tests are shorter than the window, and one key among thousands hardly shows in a loss.",
    fix="Say whether the window counts the query's own key: transformers' sliding_window=w sees j > i - w, which is w keys with its "
    "own; flash-attention's window_size=(left, right) are radii, so it takes (w - 1, 0).",
    bad="""
import torch
from intently import Intent, Mask, Target

WINDOW = 3

def attention(q, k, v):
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    seen = (j <= i) & (j >= i - WINDOW)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.causal() & Mask.window(WINDOW)))
""",
    good="""
import torch
from intently import Intent, Mask, Target

WINDOW = 3

def attention(q, k, v):
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    seen = (j <= i) & (j > i - WINDOW)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.causal() & Mask.window(WINDOW)))
""",
    sources=("Beltagy et al. 2020, section 3.1: arXiv:2004.05150",),
    look=looker(lambda: FAULT, one=True),
)
