"""Decoders with a cache, in three styles: what a step or a chunk sees, and what is carried from one piece to the next."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from tests.zoo.case import plant
from torch import Tensor, nn

from intently import Intent, Mask, Target

WIDTH, HEADS, VOCABULARY = 24, 3, 23
Pair = tuple[Tensor, Tensor]


def turned(x: Tensor, first: int) -> Tensor:
    """Rotary positions from `first` on, half-split pairs; `[..., position, width]`."""
    half = x.shape[-1] // 2
    angles = torch.arange(first, first + x.shape[-2])[:, None] / 50 ** (torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def aligned(queries: int, keys: int) -> Tensor:
    """bool [query, key]: the last query is the last key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


class Attention(nn.Module):
    """Fused calls; the cache of a layer is a pair of keys and values that is handed back longer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def seen(self, queries: int, keys: int) -> Tensor:
        return aligned(queries, keys)

    def kept(self, k: Tensor, v: Tensor) -> Pair:
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        seen = self.seen(q.shape[2], k.shape[2])
        seen = seen if keep is None else seen & self.pads(keep, q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    def pads(self, keep: Tensor, queries: int) -> Tensor:
        return keep[:, None, None, :].bool()

    def turn(self, x: Tensor, held: int) -> Tensor:
        return x

    def forward(self, x: Tensor, past: Pair | None, keep: Tensor | None) -> tuple[Tensor, Pair]:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = (self.turn(t, past[0].shape[2] if past is not None else 0) for t in (q, k))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return self.out(self.attend(q, k, v, keep).transpose(1, 2).flatten(2)), self.kept(k, v)


class Block(nn.Module):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(WIDTH), attention()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))

    def forward(self, x: Tensor, past: Pair | None, keep: Tensor | None) -> tuple[Tensor, Pair]:
        y, present = self.attn(self.ln(x), past, keep)
        x = x + y
        return x + self.mlp(x), present


class Decoder(nn.Module):
    """GPT style: learned positions that go on where the cache ends; the caches of all layers come back in a list."""

    def __init__(self, attentions: tuple[type[Attention], ...]) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Block(a) for a in attentions)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: list[Pair] | None = None
    ) -> tuple[Tensor, list[Pair]]:
        first = past_key_values[0][0].shape[2] if past_key_values is not None else 0
        places = torch.arange(first, first + input_ids.shape[1])
        if attention_mask is not None:  # it covers what is in the cache, too
            places = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        x, presents = self.wte(input_ids) + self.wpe(places), []
        for number, layer in enumerate(self.layers):
            x, present = layer(x, past_key_values[number] if past_key_values is not None else None, attention_mask)
            presents.append(present)
        return self.head(x), presents


class TopLeft(Attention):
    def seen(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril()


class MissesTheNewest(Attention):
    def seen(self, queries: int, keys: int) -> Tensor:
        return (
            aligned(queries, keys) if queries == keys else aligned(queries, keys).roll(-1, 1).tril(keys - queries - 1)
        )


class NoTriangleForAChunk(Attention):
    def seen(self, queries: int, keys: int) -> Tensor:
        return aligned(queries, keys) if queries == keys else torch.ones(queries, keys, dtype=torch.bool)


class StepsSeePads(Attention):
    def pads(self, keep: Tensor, queries: int) -> Tensor:
        return super().pads(keep, queries) if queries > 1 else torch.ones(1, dtype=torch.bool)


class Turning(Attention):
    def turn(self, x: Tensor, held: int) -> Tensor:
        return turned(x, held)


class CountsFromZero(Attention):
    def turn(self, x: Tensor, held: int) -> Tensor:
        return turned(x, 0)


# -- einsum: the model keeps its cache, and is told where a piece begins --------------------------------------------


class Remembering(nn.Module):
    """Llama's reference style: buffers filled from `start_pos` on."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.register_buffer("cache_k", torch.zeros(4, 64, HEADS, WIDTH // HEADS), persistent=False)
        self.register_buffer("cache_v", torch.zeros(4, 64, HEADS, WIDTH // HEADS), persistent=False)

    def hidden(self, queries: int, start_pos: int) -> Tensor:
        new = torch.ones(queries, queries, dtype=torch.bool).triu(1)
        return torch.cat([torch.zeros(queries, start_pos, dtype=torch.bool), new], 1)

    def held(self, start_pos: int, count: int) -> slice:
        return slice(0, start_pos + count)

    def forward(self, x: Tensor, start_pos: int) -> Tensor:
        samples, count = x.shape[:2]
        q, k, v = (w(x).unflatten(-1, (HEADS, -1)) for w in (self.wq, self.wk, self.wv))
        self.cache_k[:samples, start_pos : start_pos + count] = k
        self.cache_v[:samples, start_pos : start_pos + count] = v
        held = self.held(start_pos, count)
        k, v = self.cache_k[:samples, held], self.cache_v[:samples, held]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
        scores = scores.masked_fill(self.hidden(count, start_pos), float("-inf"))
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))


class Rememberer(nn.Module):
    def __init__(self, attentions: tuple[type[Remembering], ...]) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers, self.norm = nn.ModuleList(a() for a in attentions), nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        x = self.embed(tokens) + self.places.weight[start_pos : start_pos + tokens.shape[1]]
        for layer in self.layers:
            x = x + layer(self.norm(x), start_pos)
        return self.head(x)


class TriangleOverTheFirst(Remembering):
    def hidden(self, queries: int, start_pos: int) -> Tensor:
        return torch.ones(queries, start_pos + queries, dtype=torch.bool).triu(1)


class NoTriangleOnceCached(Remembering):
    def hidden(self, queries: int, start_pos: int) -> Tensor:
        return super().hidden(queries, start_pos) & (start_pos == 0)


# -- matmul: a list of dicts is passed in and grows -----------------------------------------------------------------


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def hide(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~aligned(*scores.shape[-2:]), torch.finfo(scores.dtype).min)

    def turn(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        return x

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1))
        q, k = self.turn(q, cache), self.turn(k, cache)
        if "k" in cache:
            k, v = torch.cat([cache["k"], k], -2), torch.cat([cache["v"], v], -2)
        cache["k"], cache["v"] = k, v
        scores = self.hide(torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5)
        return self.proj(torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2).reshape(x.shape))


class Grower(nn.Module):
    def __init__(self, attentions: tuple[type[Growing], ...]) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks, self.lm_head = nn.ModuleList(a() for a in attentions), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, cache: list[dict[str, Tensor]] | None = None) -> Tensor:
        h = self.emb(x)
        for number, block in enumerate(self.blocks):
            h = h + block(self.norm(h), cache[number] if cache is not None else {})
        return self.lm_head(h)


class HidesTheOldest(Growing):
    def hide(self, scores: Tensor) -> Tensor:
        scores = super().hide(scores)
        queries, keys = scores.shape[-2:]
        return scores if queries == keys else scores.masked_fill(torch.arange(keys) == 0, torch.finfo(scores.dtype).min)


class GrowingTurning(Growing):
    def turn(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        return turned(x, cache["k"].shape[-2] if "k" in cache else 0)


class GrowingOneBehind(Growing):
    """Once something is cached, the newest token is placed where the last one stands."""

    def turn(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        return turned(x, cache["k"].shape[-2] - 1 if "k" in cache else 0)


def decoder(*attentions: type[Attention]) -> Target:
    torch.manual_seed(21)
    return Target(Decoder(attentions).eval(), Intent(Mask.causal()), tokens=VOCABULARY)


def rememberer(*attentions: type[Remembering]) -> Target:
    torch.manual_seed(22)
    return Target(Rememberer(attentions).eval(), Intent(Mask.causal()), tokens=VOCABULARY)


def grower(*attentions: type[Growing]) -> Target:
    torch.manual_seed(23)
    return Target(Grower(attentions).eval(), Intent(Mask.causal()), tokens=VOCABULARY)


A, R, G = Attention, Remembering, Growing
fused, einsum, matmul = (partial(plant, style) for style in ("sdpa", "einsum", "matmul"))

CASES = (
    *fused(
        "cache-misaligned",
        "a triangle aligned at the start",
        "layers.1.attn",
        build=decoder,
        bad=(A, TopLeft),
        good=(A, A),
    ),
    *fused(
        "cache-misaligned",
        "a step misses the newest key",
        "layers.0.attn",
        build=decoder,
        bad=(MissesTheNewest, A),
        good=(A, A),
    ),
    *fused(
        "causal-leak",
        "no triangle for a chunk",
        "layers.1.attn",
        build=decoder,
        bad=(A, NoTriangleForAChunk),
        good=(A, A),
    ),
    *fused("padding-leak", "steps see pads", "layers.0.attn", build=decoder, bad=(StepsSeePads, A), good=(A, A)),
    *fused(
        "rope-stale-offset",
        "a step counts from 0",
        "layers.1.attn",
        build=decoder,
        bad=(Turning, CountsFromZero),
        good=(Turning, Turning),
    ),
    *matmul(
        "rope-stale-offset",
        "a step stands on the last token",
        "blocks.0",
        build=grower,
        bad=(GrowingOneBehind, GrowingTurning),
        good=(GrowingTurning, GrowingTurning),
    ),
    *einsum(
        "cache-misaligned",
        "a triangle over the first keys",
        "layers.1",
        build=rememberer,
        bad=(R, TriangleOverTheFirst),
        good=(R, R),
    ),
    *einsum(
        "causal-leak",
        "no triangle once cached",
        "layers.0",
        build=rememberer,
        bad=(NoTriangleOnceCached, R),
        good=(R, R),
    ),
    *matmul(
        "cache-misaligned", "the oldest key is hidden", "blocks.1", build=grower, bad=(G, HidesTheOldest), good=(G, G)
    ),
)
