"""Fault `backend-disagrees`: another kernel or code path of the same model gives other outputs."""

from __future__ import annotations

from collections.abc import Iterator

from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.faults.paths import lost, otherwise


def look(seen: Examination) -> Iterator[Suspicion]:
    conditions = [c for c in seen.broken("backends-agree") if c.switch.backend]
    return otherwise(seen, lambda: FAULT, "backends-agree", conditions, besides=lambda s, o: lost(s, o)[0] != "")


FAULT = Fault(
    name="backend-disagrees",
    stage="outside",
    promises=("backends-agree",),
    severity="error",
    summary="Another backend, or another code path behind a flag, gives other outputs on the same input.",
    symptom="A model that was trained with one kernel is worse when it is served with another.",
    why_silent="Each path works for itself; tests compare shapes, or one unpadded batch.",
    fix="Build mask, factor and bias once, before the choice of the path, and compare the paths row by row on a padded batch.",
    bad="""
import torch
import torch.nn.functional as F
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.use_flash = nn.Linear(16, 48), True

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        step = torch.arange(x.shape[1])
        far = (step - step[:, None]).abs().to(x)
        if self.use_flash:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=-far / 2)
        return (q @ k.mT / 4 - far).softmax(-1) @ v

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.full()))
""",
    good="""
import torch
import torch.nn.functional as F
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.use_flash = nn.Linear(16, 48), True

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        step = torch.arange(x.shape[1])
        far = (step - step[:, None]).abs().to(x)
        if self.use_flash:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=-far / 2)
        return (q @ k.mT / 4 - far / 2).softmax(-1) @ v

def build():
    torch.manual_seed(0)
    return Target(Attention(), Intent(Mask.full()))
""",
    sources=("PyTorch documentation of F.scaled_dot_product_attention: the equivalent code",),
    look=look,
)
