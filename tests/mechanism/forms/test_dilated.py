"""Dilated and strided attention against loops over the pairs, and against dense masks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check
from tests.mechanism.largest import largest

from intently.mechanism import attention
from intently.mechanism.forms.dilated import dilated_attention, strided_attention


def tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "query": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width),
        "key": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.width),
        "value": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.value_width),
    }


def last_is_blind(draw: Draw, sizes: Sizes, seen: Callable[[int, int], bool]) -> torch.Tensor:
    """Which keys to keep so that the last query, and not every query, sees nothing."""
    last = sizes.queries - 1
    return torch.tensor([not seen(last, j) for j in range(sizes.keys)]).expand(sizes.batch, -1)


def dilated(left: int, right: int, dilation: int) -> Callable[[int, int], bool]:
    return lambda i, j: (j - i) % dilation == 0 and -left <= (j - i) // dilation <= right


def strided(stride: int) -> Callable[[int, int], bool]:
    """Section 4.3 word for word: A1 = {max(0, i - l), ..., i}, A2 = {j : (i - j) mod l = 0}, both up to i."""
    return lambda i, j: j <= i and (max(0, i - stride) <= j or (i - j) % stride == 0)


def dilated_options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    return {
        "both sides": {"left": 1, "right": 1, "dilation": 2},
        "causal": {"left": 2, "right": 0, "dilation": 3},
        "uneven": {"left": 0, "right": 3, "dilation": 2},
        "no gaps": {"left": 2, "right": 1, "dilation": 1},
        "longer than the line": {"left": 9, "right": 9, "dilation": 40},
        "filler": {"left": 2, "right": 0, "dilation": 2, "keep": last_is_blind(draw, sizes, dilated(2, 0, 2))},
        "sink": {"left": 1, "right": 2, "dilation": 2, "sink": draw.normal(sizes.heads)},
    }


def strided_options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    return {
        "stride 3": {"stride": 3},
        "stride 4, sink and cap": {"stride": 4, "sink": draw.normal(sizes.heads), "softcap": 0.6},
        "stride 1 sees all": {"stride": 1},
        "longer than the line": {"stride": 40},
        "filler": {"stride": 3, "keep": last_is_blind(draw, sizes, strided(3))},
    }


def in_loops(query, key, value, seen, keep=None, sink=None, softcap=None):
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    group = query.shape[1] // key.shape[1]
    for batch, head, i in np.ndindex(query.shape[:3]):
        total = 0 if sink is None else np.exp(sink[head])
        for j in range(key.shape[2]):
            if seen(i, j) and (keep is None or keep[batch, j]):
                logit = query[batch, head, i] @ key[batch, head // group, j] / np.sqrt(query.shape[-1])
                share = np.exp(logit if softcap is None else softcap * np.tanh(logit / softcap))
                total += share
                output[batch, head, i] += share * value[batch, head // group, j]
        output[batch, head, i] /= total or 1
    return output


def by_mask(query, key, value, seen, keep=None, **options):
    length = query.shape[-2]
    mask = torch.tensor([[seen(i, j) for j in range(length)] for i in range(length)])
    mask = mask if keep is None else mask & keep[:, None, None, :]
    return attention(query, key, value, mask=mask, backend="stages", **options)


def of(pattern: Callable, names: tuple[str, ...], run: Callable) -> Callable:
    """`run` with the pattern's own arguments turned into the question whether query i sees key j."""

    def call(query, key, value, **options):
        seen = pattern(**{name: options.pop(name) for name in names})
        return run(query, key, value, seen, **options)

    return call


def slip(form: Callable, **changes: Callable[[int], int]) -> Callable:
    def call(query, key, value, **options):
        return form(
            query, key, value, **{**options, **{name: change(options[name]) for name, change in changes.items()}}
        )

    return call


WINDOW, STRIDE = ("left", "right", "dilation"), ("stride",)
test_dilated_and_strided = every_check(
    Form(
        "dilated",
        dilated_attention,
        of(dilated, WINDOW, in_loops),
        tensors,
        wrong={
            "radius in positions": slip(dilated_attention, left=lambda left: left + 1),
            "dilation off by one": slip(dilated_attention, dilation=lambda dilation: dilation + 1),
        },
        options=dilated_options,
        stages=of(dilated, WINDOW, by_mask),
        blind="filler",
        sizes=Sizes(queries=11, keys=11),
    ),
    Form(
        "strided",
        strided_attention,
        of(strided, STRIDE, in_loops),
        tensors,
        wrong={
            "stride off by one": slip(strided_attention, stride=lambda stride: stride + 1),
            "near keys alone": lambda query, key, value, stride, **options: dilated_attention(
                query, key, value, left=stride - 1, right=0, dilation=1, **options
            ),
        },
        options=strided_options,
        stages=of(strided, STRIDE, by_mask),
        blind="filler",
        sizes=Sizes(queries=11, keys=11),
    ),
)


@given(st.integers(1, 40), st.integers(0, 9), st.integers(0, 9), st.integers(1, 9))
def test_equal_their_dense_masks(length, left, right, step):
    generator = torch.Generator().manual_seed(length)
    states = [torch.randn(1, 1, length, 2, generator=generator, dtype=torch.float64) for _ in range(3)]
    ours = dilated_attention(*states, left=left, right=right, dilation=step)
    torch.testing.assert_close(ours, by_mask(*states, dilated(left, right, step)))
    torch.testing.assert_close(strided_attention(*states, stride=step), by_mask(*states, strided(step)))


def test_memory_grows_slower_than_the_square():
    draw = Draw.seeded()
    short, long = ({name: draw.normal(1, 2, n, 4) for name in ("query", "key", "value")} for n in (1024, 4096))

    def window(**tensors):
        return dilated_attention(**tensors, left=3, right=3, dilation=5)

    def columns(**tensors):
        return strided_attention(**tensors, stride=int(tensors["query"].shape[-2] ** 0.5))

    assert largest(window, **long) <= 4.1 * largest(window, **short)
    assert largest(columns, **long) <= 8.2 * largest(columns, **short)  # length · √length
    assert max(largest(window, **long), largest(columns, **long)) < 4096**2 / 10


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k: dilated_attention(q, k, k, left=1, right=1, dilation=0),
        lambda q, k: dilated_attention(q, k, k, left=-1, right=1, dilation=1),
        lambda q, k: strided_attention(q, k, k, stride=0),
    ],
)
def test_numbers_out_of_range_are_refused(call):
    states = torch.zeros(1, 3, 2)
    with pytest.raises(ValueError, match=r"(from 1 on are needed|1 or more is needed)"):
        call(states, states)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k: dilated_attention(q, k, k, left=1, right=1, dilation=2),
        lambda q, k: strided_attention(q, k, k, stride=2),
    ],
)
def test_a_cache_is_refused(call):
    with pytest.raises(ValueError, match=r"1 queries but 3 keys: query float32\[1, 1, 2\], key float32\[1, 3, 2\]"):
        call(torch.zeros(1, 1, 2), torch.zeros(1, 3, 2))
