"""Faults of positions: counted from the pads, or turned along a wrong axis, in wrong pairs, by stale tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.case import STYLES, plant
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


# -- turned queries and keys: complex numbers before a fused call, halves in an einsum, neighbours in a product --------


def angles(positions: Tensor, count: int) -> Tensor:
    """`[..., position, pair]`."""
    return positions[..., None] / 30 ** (torch.arange(count) / count)


class Turned(nn.Module):
    """One causal layer over features; its parts turn queries and keys in their own layout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def turn(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        raise NotImplementedError

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(self.mix(self.turn(q, position_ids), self.turn(k, position_ids), v).flatten(2))


class Complex(Turned):
    """Pairs of neighbours as complex numbers, in `[batch, position, heads, width]`, as in the first Llama."""

    def table(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        positions = torch.arange(x.shape[1]) if position_ids is None else position_ids
        turns = angles(positions, x.shape[-1] // 2)
        turns = turns.double()
        return torch.polar(torch.ones_like(turns), turns)[..., None, :]

    def turn(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.table(x, position_ids)).flatten(3).type_as(x)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class ComplexOverHeads(Complex):
    def table(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        turns = angles(torch.arange(x.shape[2]), x.shape[-1] // 2).double()
        return torch.polar(torch.ones_like(turns), turns)


class ComplexOnceMade(Complex):
    def table(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        if not hasattr(self, "made") or self.made.shape[-3] != x.shape[1]:
            made = super().table(x, position_ids)
            self.made = made[0] if made.dim() > 3 else made
        return self.made


class Halves(Turned):
    """Half-split pairs with tables as wide as the head, of which a quarter is left unturned."""

    def table(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        positions = torch.arange(x.shape[1]) if position_ids is None else position_ids
        turns = angles(positions, 3)
        return torch.cat([turns, turns], -1)[..., None, :]

    def turn(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        turned, left = x[..., :6], x[..., 6:]
        table = self.table(x, position_ids)
        beside = torch.cat([-turned[..., 3:], turned[..., :3]], -1)
        return torch.cat([turned * table.cos() + beside * table.sin(), left], -1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class HalvesWithNeighboursTable(Halves):
    def table(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        positions = torch.arange(x.shape[1]) if position_ids is None else position_ids
        return angles(positions, 3).repeat_interleave(2, -1)[..., None, :]


class HalvesOverHeads(Halves):
    def table(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        turns = angles(torch.arange(x.shape[2]), 3)
        return torch.cat([turns, turns], -1)


class Neighbours(Turned):
    """Pairs of neighbours, written into place in `[batch, heads, position, width]`; the tables grow when they must."""

    def table(self, positions: Tensor) -> Tensor:
        return angles(positions, 4)

    def turn(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        x = x.transpose(1, 2)
        positions = torch.arange(x.shape[2])[None] if position_ids is None else position_ids
        table = self.table(positions)[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        turned = torch.empty_like(x)
        turned[..., ::2] = even * table.cos() - odd * table.sin()
        turned[..., 1::2] = even * table.sin() + odd * table.cos()
        return turned

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5 + torch.full((q.shape[2], q.shape[2]), -torch.inf).triu(1)
        return (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


class NeighboursCounted(Neighbours):
    """Positions passed are never looked at."""

    def table(self, positions: Tensor) -> Tensor:
        return angles(torch.arange(positions.shape[-1])[None], 4)


class NeighboursWithHalvesTable(Neighbours):
    def turn(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        x = x.transpose(1, 2)
        positions = torch.arange(x.shape[2])[None] if position_ids is None else position_ids
        table = self.table(positions)[:, None]
        table = torch.cat([table, table], -1)
        beside = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * table.cos() + beside * table.sin()


class Stack(nn.Module):
    def __init__(self, layers: tuple[type[Turned], ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for layer in layers)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, position_ids)
        return x


def turned(*layers: type[Turned]) -> Target:
    torch.manual_seed(33)
    return Target(Stack(layers).eval(), Intent(Mask.causal()), features=WIDTH)


ONE, ALL = ("layers.1",), ("layers.0", "layers.1")
AXIS, PAIRS, STALE = "rope-wrong-axis", "rope-mixed-layout", "rope-stale-offset"
C, H, N = Complex, Halves, Neighbours

IMPOSSIBLE = {(style, "order-blind"): "it is a warning, told in tests/promises" for style in STYLES}

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
    *plant("sdpa", AXIS, "complex over heads", *ONE, build=turned, bad=(C, ComplexOverHeads), good=(C, C)),
    *plant(
        "einsum", AXIS, "halves over heads", *ALL, build=turned, bad=(HalvesOverHeads, HalvesOverHeads), good=(H, H)
    ),
    *plant(
        "einsum",
        PAIRS,
        "halves, table of neighbours",
        *ONE,
        build=turned,
        bad=(H, HalvesWithNeighboursTable),
        good=(H, H),
    ),
    *plant(
        "matmul",
        PAIRS,
        "neighbours, table of halves",
        *ONE,
        build=turned,
        bad=(N, NeighboursWithHalvesTable),
        good=(N, N),
    ),
    *plant("sdpa", STALE, "made in the first call", *ONE, build=turned, bad=(C, ComplexOnceMade), good=(C, C)),
    *plant("matmul", STALE, "positions not looked at", *ONE, build=turned, bad=(N, NeighboursCounted), good=(N, N)),
)
