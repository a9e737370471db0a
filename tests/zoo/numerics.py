"""Faults of numbers and cost, in four styles: sums that are not 1, leftovers of other lengths, saturation, slow kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.case import plant
from torch import Tensor, nn

from intently import Intent, Mask, Target

WIDTH, HEADS, INPUT = 32, 4, 13


class Mixer(nn.Module):
    """Causal attention; `mix` turns queries, keys and values `[batch, heads, token, width]` and a mask into an output."""

    def __init__(self) -> None:
        super().__init__()
        self.d = WIDTH // HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, self.d)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


def future(q: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)


class Matmul(Mixer):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / self.d**0.5).masked_fill(future(q), -torch.inf).softmax(-1) @ v


class Einsum(Mixer):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = torch.einsum("bhqd,bhkd->bhqk", q, k) / self.d**0.5
        e = e.masked_fill(future(q), -torch.inf).exp()
        return torch.einsum("bhqk,bhkd->bhqd", e / e.sum(-1, keepdim=True), v)


class Fused(Mixer):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Multihead(nn.Module):
    weights = False

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attention(x, x, x, attn_mask=hidden, need_weights=self.weights)[0]


# -- planted lines --------------------------------------------------------------------------------------------------


class ScaledAfterTheSoftmax(Matmul):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q / self.d**0.5
        return (q @ k.mT).masked_fill(future(q), -torch.inf).softmax(-1) * self.d**0.5 @ v


class SoftmaxUnused(Matmul):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / self.d**0.5).masked_fill(future(q), 0.0)
        scores.softmax(-1)
        return scores @ v


class NeverDivided(Einsum):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = torch.einsum("bhqd,bhkd->bhqk", q, k) / self.d**0.5
        return torch.einsum("bhqk,bhkd->bhqd", e.masked_fill(future(q), -torch.inf).exp(), v)


class StretchedForGood(Matmul):
    """Positions stretched by the longest sequence so far."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.longest = max(self.longest, q.shape[-2])
        distance = torch.arange(q.shape[-2])[:, None] - torch.arange(q.shape[-2])
        scores = q @ k.mT / self.d**0.5 - distance.to(q) / self.longest
        return scores.masked_fill(future(q), -torch.inf).softmax(-1) @ v


class CutFromTheEnd(Fused):
    """A triangle made once, for the longest sequence so far, and cut at the wrong end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        if self.seen is None or self.seen.shape[-1] < length:
            self.seen = torch.ones(length, length, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen[-length:, :length])


class LargeFused(Fused):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.qkv.weight, std=2.0)


class LargeMatmul(Matmul):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.qkv.weight, std=2.0)


class FarMatmul(Matmul):
    """Queries and keys far from the origin: a large part of every logit is the same for all keys."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.qkv.bias[: 2 * WIDTH], 5.0)


class FarEinsum(FarMatmul):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = torch.einsum("bhqd,bhkd->bhqk", q * self.d**-0.5, k).masked_fill(future(q), -torch.inf)
        return torch.einsum("bhqk,bhkd->bhqd", e.softmax(-1), v)


class FarAndWide(FarMatmul):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        return super().mix(q.to(wide), k.to(wide), v.to(wide)).to(v.dtype)


def first_of(q: Tensor) -> Tensor:
    return (torch.arange(q.shape[-2]) == 0).to(q)


class SinkFused(Fused):
    """All look at the first token."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = (5 * first_of(q)).expand(q.shape[-2], -1).masked_fill(future(q), -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class EmptySinkFused(SinkFused):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(q, k, v * (1 - 0.9999 * first_of(q))[:, None])


class SinkMatmul(Matmul):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / self.d**0.5 + 5 * first_of(q)
        return scores.masked_fill(future(q), -torch.inf).softmax(-1) @ v


class EmptySinkMatmul(SinkMatmul):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(q, k, v * (1 - 0.9999 * first_of(q))[:, None])


class NarrowValues(Fused):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(q, k, v[..., :-1]).repeat_interleave(2, -1)[..., : self.d]


class TriangleGiven(Fused):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~future(q))


class WeightsAskedFor(Multihead):
    weights = True


# -- models ---------------------------------------------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self, mixers: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUT, WIDTH)
        self.norms, self.mixers = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in mixers), nn.ModuleList(m() for m in mixers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return x


def tower(*mixers: type[nn.Module]) -> Target:
    torch.manual_seed(23)
    return Target(Tower(mixers).eval(), Intent(Mask.causal()), features=INPUT)


ONE = "mixers.1"

CASES = (
    *plant("sdpa", "weight-is-not-effect", "an empty sink", ONE, build=tower, bad=(Fused, EmptySinkFused), good=(Fused, SinkFused)),
    *plant("matmul", "weight-is-not-effect", "an empty sink", ONE, build=tower, bad=(Matmul, EmptySinkMatmul), good=(Matmul, SinkMatmul)),
    *plant("matmul", "not-normalized", "scaled after the softmax", ONE, build=tower, bad=(Matmul, ScaledAfterTheSoftmax), good=(Matmul, Matmul)),
    *plant("matmul", "not-normalized", "the softmax is not used", ONE, build=tower, bad=(Matmul, SoftmaxUnused), good=(Matmul, Matmul)),
    *plant("einsum", "not-normalized", "exponentials that nothing divides", ONE, build=tower, bad=(Einsum, NeverDivided), good=(Einsum, Einsum)),
    *plant("matmul", "softmax-low-precision", "large scores in half", ONE, build=tower, bad=(Matmul, FarMatmul), good=(Matmul, FarAndWide)),
    *plant("einsum", "softmax-low-precision", "large scores in half", ONE, build=tower, bad=(Einsum, FarEinsum), good=(Einsum, FarAndWide)),
    *plant("matmul", "stale-state", "stretched by the longest so far", ONE, build=tower, bad=(Matmul, StretchedForGood), good=(Matmul, Matmul)),
    *plant("sdpa", "stale-state", "a triangle cut at the wrong end", ONE, build=tower, bad=(Fused, CutFromTheEnd), good=(Fused, Fused)),
    *plant("sdpa", "saturated-logits", "large weights", ONE, build=tower, bad=(Fused, LargeFused), good=(Fused, Fused)),
    *plant("matmul", "saturated-logits", "large weights", ONE, build=tower, bad=(Matmul, LargeMatmul), good=(Matmul, Matmul)),
    *plant("sdpa", "slow-path", "narrow values", ONE, build=tower, bad=(Fused, NarrowValues), good=(Fused, Fused)),
    *plant("sdpa", "slow-path", "a triangle for a mask", ONE, build=tower, bad=(Fused, TriangleGiven), good=(Fused, Fused)),
    *plant("matmul", "slow-path", "written out", ONE, build=tower, bad=(Fused, Matmul), good=(Fused, Fused)),
    *plant("einsum", "slow-path", "written out", ONE, build=tower, bad=(Fused, Einsum), good=(Fused, Fused)),
    *plant("multihead", "slow-path", "need_weights", f"{ONE}.attention", build=tower, bad=(Fused, WeightsAskedFor), good=(Fused, Fused)),
)  # fmt: skip

IMPOSSIBLE = {
    ("sdpa", "softmax-low-precision"): "the fused call keeps float32 inside",
    ("sdpa", "not-normalized"): "the weights are made inside the call",
    ("multihead", "not-normalized"): "the weights are made inside torch's layer",
}
