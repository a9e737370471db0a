"""Grouped-query attention whose groups are summed."""

import torch
from grouped_query_attention_pytorch.attention import MultiheadGQA
from torch import Tensor, nn

from intently import Intent, Mask, Target


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = MultiheadGQA(64, query_heads=8, kv_heads=2, layer_norm=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x, x, x)[0]


def build() -> Target:
    torch.manual_seed(0)
    return Target(Block().eval(), Intent(Mask.full()), features=64)
