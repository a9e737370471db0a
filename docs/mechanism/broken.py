"""Attention broken at one stage each, in a line or two; the pages on the stages check them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Reshaped(nn.Module):
    """Project: heads are cut out by a reshape without the transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.reshape(len(x), 3, -1, 8) for each in self.qkv(x).chunk(3, dim=-1))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(output.transpose(1, 2).flatten(2))


def reshaped() -> nn.Module:
    torch.manual_seed(0)
    return Reshaped()


def unscaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scale: left out."""
    return (query @ key.mT).softmax(dim=-1) @ value


def inverted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Mask: made for a function that takes True for "hide"."""
    later = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).triu(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=later)


def across(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Normalize: the softmax over the queries."""
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(dim=-2) @ value
