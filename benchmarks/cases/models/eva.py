"""EVA's attention, unfused: the mask is filled in behind the softmax."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from intently import Intent, Mask, Target

sys.path.insert(0, str(Path(__file__).parent))
import _timm  # noqa: F401
from timm.models.eva import EvaAttention


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = EvaAttention(32, num_heads=4)
        self.attn.fused_attn = False

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return x + self.attn(x, attn_mask=attn_mask)


def build() -> Target:
    torch.manual_seed(0)
    return Target(Block().eval(), Intent(Mask.full()), features=32, padding="attn_mask:keep")
