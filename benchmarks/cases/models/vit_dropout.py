"""A vision transformer's attention with dropout, fused, in eval mode."""

import sys
from pathlib import Path

import torch

from intently import Intent, Mask, Target

sys.path.insert(0, str(Path(__file__).parent))
import _timm  # noqa: F401
from timm.models.vision_transformer import Attention


def build() -> Target:
    torch.manual_seed(0)
    model = Attention(32, num_heads=4, attn_drop=0.2).eval()
    model.fused_attn = True
    return Target(model, Intent(Mask.full()), features=32)
