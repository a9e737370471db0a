"""Small decoders that remember in ways of their own, each fed by hand as its author would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.zoo.caches import Attention as Fused
from tests.zoo.caches import Decoder, Grower, Growing, Remembering, aligned
from tests.zoo.caches import Rememberer as Told
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY = 24, 3, 23


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def start(self, ids: Tensor, first: int) -> Tensor:
        return self.embed(ids) + self.place(torch.arange(first, first + ids.shape[1]))

    def split(self, x: Tensor) -> Iterator[Tensor]:
        return (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def end(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        seen = aligned(q.shape[2], k.shape[2]) if seen is None else seen
        return self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))


class Inside(Base):
    """Remembers in an attribute once `use_cache` is asked for, until `reset_cache`."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: tuple[Tensor, Tensor] | None = None

    def reset_cache(self) -> None:
        self.cache = None

    def forward(self, idx: Tensor, use_cache: bool = False) -> Tensor:
        x = self.start(idx, self.cache[0].shape[2] if use_cache and self.cache is not None else 0)
        q, k, v = self.split(x)
        if use_cache:
            if self.cache is not None:
                k, v = torch.cat([self.cache[0], k], 2), torch.cat([self.cache[1], v], 2)
            self.cache = (k, v)
        return self.end(x, q, k, v)


class Store:
    def __init__(self) -> None:
        self.held: list[tuple[Tensor, Tensor]] = []

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.held.append((k, v))
        return torch.cat([k for k, _ in self.held], 2), torch.cat([v for _, v in self.held], 2)


class Stored(Base):
    """Takes an object that it fills, and is told where a piece begins."""

    def make_cache(self) -> Store:
        return Store()

    def forward(self, tokens: Tensor, kv_cache: Store | None = None, offset: int = 0) -> Tensor:
        x = self.start(tokens, offset)
        q, k, v = self.split(x)
        if kv_cache is not None:
            k, v = kv_cache.update(k, v)
        return self.end(x, q, k, v)


class SetUp(Base):
    """Buffers made by `setup_caches`, filled at `input_pos`: keys that are not there yet are hidden."""

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        shape = (max_batch_size, HEADS, max_seq_length, WIDTH // HEADS)
        self.k, self.v = (torch.zeros(shape, dtype=self.head.weight.dtype) for _ in range(2))

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        x = self.embed(idx) + self.place(torch.arange(idx.shape[1]) if input_pos is None else input_pos)
        q, k, v = self.split(x)
        if input_pos is None:
            return self.end(x, q, k, v)
        self.k[:, :, input_pos], self.v[:, :, input_pos] = k, v
        return self.end(x, q, self.k, self.v, aligned(self.k.shape[2], self.k.shape[2])[input_pos])


class Memories(nn.Module):
    """Remembers hidden states, which come back in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.attn, self.head = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, past: Tensor | None = None) -> dict[str, Tensor]:
        first = 0 if past is None else past.shape[1]
        x = self.embed(input_ids) + self.place(torch.arange(first, first + input_ids.shape[1]))
        held = x if past is None else torch.cat([past, x], 1)
        y, _ = self.attn(x, held, held, attn_mask=~aligned(x.shape[1], held.shape[1]), need_weights=False)
        return {"logits": self.head(x + y), "past": held}


@dataclass(frozen=True)
class ByHand:
    """`feed(model, ids, cuts)` gives the output of each piece, written out for one model."""

    name: str
    build: Callable[[], nn.Module]
    feed: Callable[[Any, Tensor, tuple[int, ...]], Iterator[Tensor]]
    whole: Callable[[Any, Tensor], Tensor]
    cache: str  # the argument that takes the cache
    start: str = ""

    def __str__(self) -> str:
        return self.name


def cut(ids: Tensor, cuts: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
    first = 0
    for count in cuts:
        yield first, ids[:, first : first + count]
        first += count


def returned(model: Any, ids: Tensor, cuts: tuple[int, ...]) -> Iterator[Tensor]:
    past = None
    for _, piece in cut(ids, cuts):
        output, past = model(piece, past_key_values=past)
        yield output


def told(model: Any, ids: Tensor, cuts: tuple[int, ...]) -> Iterator[Tensor]:
    for first, piece in cut(ids, cuts):
        yield model(piece, first)


def grown(model: Any, ids: Tensor, cuts: tuple[int, ...]) -> Iterator[Tensor]:
    cache: list[dict[str, Tensor]] = [{}, {}]
    for _, piece in cut(ids, cuts):
        yield model(piece, cache)


def remembered(model: Any, ids: Tensor, cuts: tuple[int, ...]) -> Iterator[Tensor]:
    model.reset_cache()
    for _, piece in cut(ids, cuts):
        yield model(piece, use_cache=True)


def stored(model: Any, ids: Tensor, cuts: tuple[int, ...]) -> Iterator[Tensor]:
    store = Store()
    for first, piece in cut(ids, cuts):
        yield model(piece, store, first)


def set_up(model: Any, ids: Tensor, cuts: tuple[int, ...]) -> Iterator[Tensor]:
    model.setup_caches(ids.shape[0], ids.shape[1])
    for first, piece in cut(ids, cuts):
        yield model(piece, torch.arange(first, first + piece.shape[1]))


def kept_states(model: Any, ids: Tensor, cuts: tuple[int, ...]) -> Iterator[Tensor]:
    past = None
    for _, piece in cut(ids, cuts):
        output = model(piece, past)
        past = output["past"]
        yield output["logits"]


MODELS = (
    ByHand("returned", lambda: Decoder((Fused, Fused)), returned, lambda m, x: m(x)[0], "past_key_values"),
    ByHand("told", lambda: Told((Remembering, Remembering)), told, lambda m, x: m(x, 0), "", "start_pos"),
    ByHand("grown", lambda: Grower((Growing, Growing)), grown, lambda m, x: m(x), "cache"),
    ByHand("remembered", Inside, remembered, lambda m, x: m(x), ""),
    ByHand("stored", Stored, stored, lambda m, x: m(x), "kv_cache", "offset"),
    ByHand("set up", SetUp, set_up, lambda m, x: m(x), "", "input_pos"),
    ByHand("kept states", Memories, kept_states, lambda m, x: m(x)["logits"], "past"),
)
