"""Heads that share keys and values, and what is added to their logits: in several styles, fused and written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.case import plant
from torch import Tensor, nn

from intently import Intent, Mask, Target

WIDTH, HEADS, KV_HEADS, VOCABULARY = 24, 6, 2, 23
GROUP, D = HEADS // KV_HEADS, WIDTH // HEADS


class Expanded(nn.Module):
    """Keys and values are repeated, one for each query head, before a fused call."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, KV_HEADS * D), nn.Linear(WIDTH, KV_HEADS * D)

    def keys(self, k: Tensor) -> Tensor:
        return k.repeat_interleave(GROUP, 1)

    def values(self, v: Tensor) -> Tensor:
        return v[:, :, None].expand(-1, -1, GROUP, -1, -1).flatten(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, D)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.attend(q, self.keys(k), self.values(v)).transpose(1, 2).flatten(2))


class ByHand(Expanded):
    """The same with an explicit product and softmax."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.mT / D**0.5).masked_fill(later, float("-inf")).softmax(-1) @ v


class Grouped(nn.Module):
    """Queries keep their group as an axis of its own; keys and values are never repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * KV_HEADS * D, bias=False)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def split(self, q: Tensor) -> Tensor:
        """`[batch, query, kv head, group, width]`."""
        return q.view(*q.shape[:2], KV_HEADS, GROUP, D)

    def merge(self, y: Tensor) -> Tensor:
        return y.flatten(2)

    def normalized(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.split(self.to_q(x)), (t.unflatten(-1, (KV_HEADS, D)) for t in self.to_kv(x).chunk(2, -1))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        logits = torch.einsum("bihgd,bjhd->bhgij", q, k) * D**-0.5
        weights = self.normalized(logits.masked_fill(later, float("-inf")))
        return self.to_out(self.merge(torch.einsum("bhgij,bjhd->bihgd", weights, v)))


class Tabled(ByHand):
    """With a table of biases by distance, of this layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.relative_bias = nn.Embedding(129, HEADS)

    def bias(self, length: int) -> Tensor:
        step = torch.arange(length)
        return self.relative_bias(step - step[:, None] + 64).permute(2, 0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        logits = q @ k.mT / D**0.5 + self.bias(q.shape[2])
        return logits.masked_fill(later, float("-inf")).softmax(-1) @ v


class Sloped(Expanded):
    """With slopes by distance, given to the fused call as a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1.0))

    def bias(self, length: int) -> Tensor:
        step = torch.arange(length)
        return -self.slopes[:, None, None] * (step - step[:, None]).abs()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        added = self.bias(q.shape[2]).to(q).masked_fill(later, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added.expand(q.shape[0], -1, -1, -1))


class Sinking(Grouped):
    """With one more logit a head, to which no value belongs."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(KV_HEADS, GROUP))

    def normalized(self, logits: Tensor) -> Tensor:
        sink = self.sinks[:, :, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


class Model(nn.Module):
    def __init__(self, attentions: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.norms, self.attentions = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in attentions), nn.ModuleList()
        self.attentions.extend(a() for a in attentions)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x))
        return self.head(x)


def decoder(*attentions: type[nn.Module]) -> Target:
    torch.manual_seed(21)
    return Target(Model(attentions).eval(), Intent(Mask.causal()), tokens=VOCABULARY)


# -- the planted lines ------------------------------------------------------------------------------------------------


class Repeats(Expanded):
    def keys(self, k: Tensor) -> Tensor:
        return k.repeat(1, GROUP, 1, 1)

    def values(self, v: Tensor) -> Tensor:
        return v.repeat(1, GROUP, 1, 1)


class ExpandsInFront(Expanded):
    def values(self, v: Tensor) -> Tensor:
        return v[:, None].expand(-1, GROUP, -1, -1, -1).flatten(1, 2)


class TilesKeys(ByHand):
    def keys(self, k: Tensor) -> Tensor:
        return torch.tile(k, (1, GROUP, 1, 1))


class Stacks(ByHand):
    def keys(self, k: Tensor) -> Tensor:
        return torch.cat([k] * GROUP, 1)

    values = keys


class GroupOutside(Grouped):
    def split(self, q: Tensor) -> Tensor:
        return q.view(*q.shape[:2], GROUP, KV_HEADS, D).transpose(2, 3)

    def merge(self, y: Tensor) -> Tensor:
        return y.transpose(2, 3).flatten(2)


class NoTable(Tabled):
    def bias(self, length: int) -> Tensor:
        return torch.zeros(length, length)


class TableByRows(Tabled):
    def bias(self, length: int) -> Tensor:
        return self.relative_bias(torch.arange(length)).T[..., None]


class NoSlopes(Sloped):
    def bias(self, length: int) -> Tensor:
        return torch.zeros(HEADS, length, length)


class NoSink(Sinking):
    def normalized(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


ONE, ALL = ("attentions.1",), ("attentions.0", "attentions.1")
E, H, G, T, S, K = Expanded, ByHand, Grouped, Tabled, Sloped, Sinking
FAULT = "kv-heads-misordered"

CASES = (
    *plant("sdpa", FAULT, "repeat instead of repeat_interleave", *ONE, build=decoder, bad=(E, Repeats), good=(E, E)),
    *plant("sdpa", FAULT, "repeated everywhere", *ALL, build=decoder, bad=(Repeats, Repeats), good=(E, E)),
    *plant("sdpa", FAULT, "values expanded in front", *ONE, build=decoder, bad=(E, ExpandsInFront), good=(E, E)),
    *plant("matmul", FAULT, "keys tiled", "attentions.0", build=decoder, bad=(TilesKeys, H), good=(H, H)),
    *plant("matmul", FAULT, "stacked by cat", *ONE, build=decoder, bad=(H, Stacks), good=(H, H)),
    *plant("einsum", FAULT, "queries viewed group first", *ONE, build=decoder, bad=(G, GroupOutside), good=(G, G)),
    *plant("matmul", "bias-ignored", "a table never added", *ONE, build=decoder, bad=(T, NoTable, T), good=(T, T, T)),
    *plant("matmul", "bias-ignored", "a table along rows", *ALL, build=decoder, bad=(TableByRows,) * 2, good=(T, T)),
    *plant(
        "sdpa", "bias-ignored", "slopes never given to the call", *ALL, build=decoder, bad=(NoSlopes,) * 2, good=(S, S)
    ),
    *plant("einsum", "bias-ignored", "a sink never seen", "attentions.0", build=decoder, bad=(NoSink, K), good=(K, K)),
)
