"""The attention block of a diffusion model's U-Net, on a map of one row."""

import torch
from labml_nn.diffusion.ddpm.unet import AttentionBlock
from torch import Tensor, nn

from intently import Intent, Mask, Target


class Row(nn.Module):
    """`[batch, place, channel]` in and out. The group norm over all places, which is meant, is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.block = AttentionBlock(32, n_heads=1, d_k=8)
        self.block.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.mT[:, :, None].contiguous())[:, :, 0].mT


def build() -> Target:
    torch.manual_seed(0)
    return Target(Row().eval(), Intent(Mask.full()), features=32)
