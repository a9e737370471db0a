"""Local attention against loops over the keys in reach, and against a dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check
from tests.mechanism.largest import largest

from intently import Mask
from intently.mechanism import attention
from intently.mechanism.forms.local import local_attention


def tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "query": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width),
        "key": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.width),
        "value": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.value_width),
    }


def options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    kept = [max(0, sizes.keys - 2)] * max(1, sizes.batch)
    return {
        "causal": {"left": 2, "right": 0},
        "both sides": {"left": 1, "right": 2},
        "own key alone": {"left": 0, "right": 0},
        "wider than all": {"left": 99, "right": 99},
        "a last row that sees nothing": {"left": 1, "right": 0, "mask": Mask.padding(kept)},
        "sink and cap": {"left": 2, "right": 1, "sink": draw.normal(sizes.heads), "softcap": 0.8},
    }


def in_loops(query, key, value, *, left, right, mask=None, sink=None, softcap=None):
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    group = query.shape[1] // key.shape[1]
    for batch, head, i in np.ndindex(query.shape[:3]):
        seen = list(range(max(0, i - left), min(key.shape[2], i + right + 1)))
        seen = [j for j in seen if mask is None or mask[batch % len(mask), 0, i, j]]
        logits = np.array([query[batch, head, i] @ key[batch, head // group, j] for j in seen])
        logits = logits / np.sqrt(query.shape[-1])
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        shares = np.exp(logits)
        total = shares.sum() + (0 if sink is None else np.exp(sink[head]))
        for share, j in zip(shares, seen, strict=True):
            output[batch, head, i] += share / total * value[batch, head // group, j]
    return output


def slip(*, left=0, right=0, **changed):
    def call(query, key, value, **given):
        moved = {"left": max(0, given["left"] + left), "right": max(0, given["right"] + right)}
        return local_attention(query, key, value, **{**given, **moved, **changed})

    return call


def by_mask(query, key, value, *, left, right, mask=None, **options):
    window = Mask.window(left, right)
    mask = window if mask is None else window & mask
    return attention(query, key, value, mask=mask, backend="stages", **options)


test_local = every_check(
    Form(
        "local",
        local_attention,
        in_loops,
        tensors,
        wrong={
            "one more to the left": slip(left=1),
            "one less to the right": slip(right=-1),
            "no scale": slip(scale=1.0),
        },
        options=options,
        stages=by_mask,
        blind="a last row that sees nothing",
        sizes=Sizes(queries=7, keys=7),
    )
)


@given(st.integers(1, 300), st.integers(0, 12), st.integers(0, 12))
def test_equals_the_dense_window(length, left, right):
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(1, 1, length, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    position = torch.arange(length)
    distance = position - position[:, None]
    dense = attention(query, key, value, mask=(distance >= -left) & (distance <= right), backend="stages")
    torch.testing.assert_close(local_attention(query, key, value, left=left, right=right), dense)


def test_memory_grows_with_the_length():
    draw = Draw.seeded()
    short, long = ({name: draw.normal(1, 2, n, 4) for name in ("query", "key", "value")} for n in (1024, 2048))

    def call(**tensors):
        return local_attention(**tensors, left=20, right=20)

    assert largest(call, **long) <= 2.1 * largest(call, **short)
    assert largest(call, **long) < 2048**2 / 10
    dense = largest(lambda **tensors: local_attention(**tensors, left=20, right=20, backend="stages"), **short)
    assert dense >= 1024**2


def test_a_radius_below_zero_is_refused():
    states = torch.zeros(1, 3, 2)
    with pytest.raises(ValueError, match="left radius is at least 0, not -1"):
        local_attention(states, states, states, left=-1, right=0)
