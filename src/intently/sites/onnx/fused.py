"""Attention nodes of onnxruntime's own domain (`com.microsoft`), said in stages: what its graph optimiser writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Attributes = Mapping[str, Any]


def packed_attention(
    a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None, mask: Tensor | None = None,
    past: Tensor | None = None, added: Tensor | None = None, *_: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """`Attention`: projection to q, k and v in one, then heads; `unidirectional` is a triangle."""
    if past is not None or "qkv_hidden_sizes" in a or a.get("do_rotary"):
        raise NotImplementedError("com.microsoft.Attention with a past, sizes of its own or rotation")
    projected = torch.matmul(x, weight)
    projected = projected if bias is None else projected + bias
    query, key, value = (_split(each, a["num_heads"]) for each in projected.chunk(3, -1))
    seen = _key_mask(mask, key.shape[0], key.shape[-2])
    return _attend(a, query, key, value, seen, added, causal=bool(a.get("unidirectional", 0))), None


def multi_head(
    a: Attributes, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, bias: Tensor | None = None,
    mask: Tensor | None = None, added: Tensor | None = None, *rest: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """`MultiHeadAttention`: three projected streams `[batch, length, heads · width]`."""
    past = [each for each in rest if each is not None and each.numel()]
    if key is None or value is None or key.dim() != 3 or query.dim() != 3 or past:
        raise NotImplementedError("com.microsoft.MultiHeadAttention with packed inputs or a past")
    if bias is not None:
        first, second = query.shape[-1], query.shape[-1] + key.shape[-1]
        query, key, value = query + bias[:first], key + bias[first:second], value + bias[second:]
    query, key, value = (_split(each, a["num_heads"]) for each in (query, key, value))
    seen = _key_mask(mask, key.shape[0], key.shape[-2])
    return _attend(a, query, key, value, seen, added, causal=bool(a.get("unidirectional", 0))), key, value


def grouped(
    a: Attributes, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, past_key: Tensor | None = None,
    past_value: Tensor | None = None, last: Tensor | None = None, total: Tensor | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None, *rest: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """`GroupQueryAttention` over a whole prompt: causal, each kv head read by a group of query heads.

    `last` holds the number of keys of each sample less one: what comes later is a pad on the right.
    """
    past = past_key is not None and past_key.numel()
    if past or any(each is not None for each in rest) or a.get("softcap") or a.get("local_window_size", -1) > 0:
        raise NotImplementedError("com.microsoft.GroupQueryAttention with a past, a window, a softcap or a mask")
    heads, shared = a["num_heads"], a["kv_num_heads"]
    if key is None or value is None:
        width = query.shape[-1] // (heads + 2 * shared)
        query, key, value = query.split([heads * width, shared * width, shared * width], -1)
    queries, keys, values = _split(query, heads), _split(key, shared), _split(value, shared)
    if a.get("do_rotary"):
        assert cos is not None and sin is not None
        count, interleaved = queries.shape[-2], bool(a.get("rotary_interleaved", 0))
        queries, keys = (_rotate(x, cos[:count], sin[:count], interleaved) for x in (queries, keys))
    seen = None
    if last is not None:
        seen = (torch.arange(keys.shape[-2]) <= last.reshape(-1, 1).to(torch.int64))[:, None, None, :]
        seen = seen.expand(keys.shape[0], 1, 1, keys.shape[-2])
    group = heads // shared
    wide = [x.repeat_interleave(group, 1) if group > 1 else x for x in (keys, values)]
    return _attend(a, queries, wide[0], wide[1], seen, None, causal=True), keys, values


def rotary(a: Attributes, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`RotaryEmbedding`: pairs of features turned by angles that positions pick from two tables."""
    count = x.shape[-2] if x.dim() == 4 else x.shape[1]
    places = positions + torch.arange(count) if positions.numel() == 1 else positions
    places = places.reshape(-1, count)
    heads = a.get("num_heads", 0) or x.shape[-1] // (2 * cos.shape[-1])
    split = x if x.dim() == 4 else _split(x, heads)
    turned = _rotate(split, cos[places][:, None], sin[places][:, None], bool(a.get("interleaved", 0)))
    return turned if x.dim() == 4 else turned.transpose(1, 2).reshape(x.shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = first * cos - second * sin, second * cos + first * sin
    made = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((made, rest), -1) if rest.shape[-1] else made


def _split(x: Tensor, heads: int) -> Tensor:
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def _key_mask(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """Which keys are seen: `[batch, key]` or `[batch, query, key]` of 0 and 1, or `[batch]` numbers of keys."""
    if mask is None:
        return None
    if mask.dim() == 1 and mask.shape[0] == batch:
        return (torch.arange(keys) < mask[:, None])[:, None, None, :]
    if mask.dim() not in (2, 3, 4):
        raise NotImplementedError("a mask of starts and ends")
    return (mask != 0).reshape(
        mask.shape[0], 1, *([1] if mask.dim() == 2 else []), *mask.shape[1 if mask.dim() < 4 else 2 :]
    )


def _attend(
    a: Attributes, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, added: Tensor | None, *, causal: bool
) -> Tensor:
    scale = a.get("scale", 0.0) or 1 / math.sqrt(query.shape[-1])
    logits = torch.matmul(query, key.transpose(-2, -1)) * scale
    logits = logits if added is None else logits + added
    if causal:
        triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(key.shape[-2] - query.shape[-2])
        logits = torch.where(triangle, logits, torch.tensor(float("-inf"), dtype=logits.dtype))
    if seen is not None:
        logits = torch.where(seen, logits, torch.tensor(a.get("mask_filter_value", -10000.0), dtype=logits.dtype))
    output = torch.matmul(torch.softmax(logits, -1), value)
    return output.transpose(1, 2).reshape(output.shape[0], output.shape[2], -1)
