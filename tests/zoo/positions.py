"""Faults of positions: counted from the pads, or turned along a wrong axis, in wrong pairs, by stale tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.case import plant
from torch import Tensor, nn

from intently import Intent, Mask, Target

WIDTH, HEADS, VOCABULARY = 24, 3, 21


def counted(kept: Tensor) -> Tensor:
    """Positions from the mask: the first real token stands at 0."""
    return (kept.long().cumsum(-1) - 1).clamp(min=0)


# -- einsum: learned positions in a decoder of tokens ---------------------------------------------------------------


class Learned(nn.Module):
    """A table of positions, read by the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return x + self.table(counted(kept))


class LearnedFromTheFirst(Learned):
    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]))


class EinsumAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(HEADS, WIDTH, 8) * 0.3) for _ in range(4))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnc,hcd->bhnd", x, w) for w in (self.q, self.k, self.v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / 8**0.5
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & kept[:, None, None, :].bool()
        weights = scores.masked_fill(~seen, -torch.inf).masked_fill(~seen.any(-1, keepdim=True), 0).softmax(-1)
        return x + torch.einsum("bhij,bhjd,hcd->bic", weights, v, self.o)


class EinsumDecoder(nn.Module):
    def __init__(self, positions: Learned) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), positions
        self.layers = nn.ModuleList(EinsumAttention() for _ in range(2))

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        kept = torch.ones_like(ids) if attention_mask is None else attention_mask
        x = self.positions(self.embed(ids), kept)
        for layer in self.layers:
            x = layer(x, kept)
        return x @ self.embed.weight.T


def einsum_decoder(positions: type[Learned]) -> Target:
    torch.manual_seed(31)
    return Target(EinsumDecoder(positions()).eval(), Intent(Mask.causal()), tokens=VOCABULARY)


# -- sdpa: waves in a decoder of features, whose mask hides -----------------------------------------------------------


class Waves(nn.Module):
    """Sines and cosines from a buffer, read by the mask."""

    def __init__(self) -> None:
        super().__init__()
        angle = torch.arange(64)[:, None] / 40 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
        self.register_buffer("waves", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return x + self.waves[counted(kept)]


class WavesFromTheFirst(Waves):
    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return x + self.waves[: x.shape[1]]


class FusedDecoder(nn.Module):
    def __init__(self, positions: Waves) -> None:
        super().__init__()
        self.positions = positions
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        kept = torch.ones(x.shape[:2], dtype=torch.bool) if key_padding_mask is None else ~key_padding_mask
        x = self.positions(x, kept)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & kept[:, None, None, :]
        for qkv in self.layers:
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        return x


def fused_decoder(positions: type[Waves]) -> Target:
    torch.manual_seed(32)
    return Target(FusedDecoder(positions()).eval(), Intent(Mask.causal()), features=WIDTH)


CASES = (
    *plant(
        "einsum",
        "position-shifted-by-padding",
        "learned positions from the first pad",
        "positions",
        build=einsum_decoder,
        bad=(LearnedFromTheFirst,),
        good=(Learned,),
    ),
    *plant(
        "sdpa",
        "position-shifted-by-padding",
        "waves from the first pad",
        "positions",
        build=fused_decoder,
        bad=(WavesFromTheFirst,),
        good=(Waves,),
    ),
)
