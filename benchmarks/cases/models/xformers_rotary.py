"""Rotary positions of xformers on the layout that its attention takes, [batch, position, heads, width]."""

import torch
from torch import Tensor, nn
from xformers.components.positional_embedding import RotaryEmbedding

from intently import Intent, Mask, Target


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 64)
        self.rotary = RotaryEmbedding(8)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (t.reshape(*x.shape[:2], 4, 8) for t in self.qkv(x).chunk(3, -1))
        q, k = self.rotary(q, k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + y.transpose(1, 2).flatten(2))


def build() -> Target:
    torch.manual_seed(0)
    return Target(Attention().eval(), Intent(Mask.causal()), tokens=64)
