"""Attention over the places of a feature map, unfused: the factor is made from the number of heads."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from intently import Intent, Mask, Target

sys.path.insert(0, str(Path(__file__).parent))
import _timm  # noqa: F401
from timm.layers.attention2d import Attention2d


class Places(nn.Module):
    """`[batch, place, channel]` in and out, laid out as a map of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention2d(32, num_heads=2)
        self.attn.fused_attn = False

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x.mT[:, :, None])[:, :, 0].mT


def build() -> Target:
    torch.manual_seed(0)
    return Target(Places().eval(), Intent(Mask.full()), features=32)
