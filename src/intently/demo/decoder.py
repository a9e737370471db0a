"""A small decoder written by hand, honest and with three faults that raise no error: what `intently demo` checks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention with a key mask, as in many tutorials."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = self.scores(q, k)
        scores = scores.masked_fill(self.future(length), float("-inf"))
        if keep is not None:
            scores = scores.masked_fill(self.hidden(keep), torch.finfo(scores.dtype).min)
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])

    def future(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(1)

    def hidden(self, keep: Tensor) -> Tensor:
        return (keep == 0)[:, None, None, :]


class WithoutScale(Attention):
    """Fault: the division is gone."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1)


class SeesTheFuture(Attention):
    """Fault: the triangle starts one key too late, so that each query sees the next token, the one it shall predict."""

    def future(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(2)


class InvertedMask(Attention):
    """Fault: True means "hide" to masked_fill, and "keep" in the mask that comes in."""

    def hidden(self, keep: Tensor) -> Tensor:
        return (keep == 1)[:, None, None, :]


class Block(nn.Module):
    def __init__(self, attention: Attention, width: int):
        super().__init__()
        self.attn = attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm1(x), keep)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Tokens in, logits out; `attention_mask` is 1 at real tokens, as in transformers."""

    def __init__(self, layers: list[type[Attention]], vocab: int = 50, width: int = 32, heads: int = 4):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(layer(width, heads), width) for layer in layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.tokens(input_ids) + self.positions((kept.cumsum(-1) - 1).clamp(min=0))
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.head(self.norm(x))
