"""Shifted windows against loops over the windows of the uncut grid, and against the published masks and tables."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check
from tests.mechanism.largest import largest

from intently.mechanism import attention
from intently.mechanism.forms.shifted import (
    merge,
    partition,
    relative_position_bias,
    relative_position_index,
    shifted_window_attention,
    shifted_windows,
    window_mask,
)


def tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "query": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width),
        "key": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.width),
        "value": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.value_width),
    }


def options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    if sizes.queries == 1:
        return {
            "one": {"grid": (1, 1), "window": (1, 1), "shift": (0, 0)},
            "padded": {"grid": (1,), "window": (3,), "shift": (1,)},
        }
    keep = torch.ones(sizes.batch, 24, dtype=torch.bool)
    keep[:, [18, 19, 22, 23]] = False
    return {
        "shifted": {"grid": (4, 6), "window": (2, 3), "shift": (1, 1)},
        "not shifted": {"grid": (4, 6), "window": (2, 3), "shift": (0, 0)},
        "padded and shifted": {"grid": (4, 6), "window": (3, 4), "shift": (1, 2)},
        "bias": {"grid": (4, 6), "window": (2, 2), "shift": (1, 0), "bias": draw.normal(sizes.heads, 4, 4)},
        "filler": {"grid": (6, 4), "window": (2, 2), "shift": (0, 0), "keep": keep},
        "3-D": {"grid": (2, 3, 4), "window": (2, 2, 2), "shift": (1, 1, 1)},
    }


def cell(place, window, shift):
    """The window of a position where the cuts lie at shift, shift + window, … on the grid as it is, without any roll."""
    return tuple((p - s) // w for p, w, s in zip(place, window, shift, strict=True))


def within(place, window, shift):
    """Where in its window a position lies, as a number."""
    return int(np.ravel_multi_index([(p - s) % w for p, w, s in zip(place, window, shift, strict=True)], window))


def in_loops(query, key, value, *, grid, window, shift, bias=None, keep=None):
    places = list(product(*map(range, grid)))
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    group = query.shape[1] // key.shape[1]
    for batch, head, i in np.ndindex(query.shape[:3]):
        total = 0.0
        for j, there in enumerate(places):
            if cell(there, window, shift) != cell(places[i], window, shift) or not (keep is None or keep[batch, j]):
                continue
            logit = query[batch, head, i] @ key[batch, head // group, j] / np.sqrt(query.shape[-1])
            if bias is not None:
                logit += bias[head, within(places[i], window, shift), within(there, window, shift)]
            total += np.exp(logit)
            output[batch, head, i] += np.exp(logit) * value[batch, head // group, j]
        output[batch, head, i] /= total or 1
    return output


def unmasked(query, key, value, *, grid, window, shift, **options):
    """Without the mask: the wrapped ends see each other."""
    cut = [partition(each, grid, window, shift).transpose(-4, -3) for each in (query, key, value)]
    return merge(attention(*cut).transpose(-4, -3), grid, window, shift)


def shifted_back(query, key, value, *, window, shift, **options):
    other = tuple((size - each) % size for each, size in zip(shift, window, strict=True))
    return shifted_window_attention(query, key, value, window=window, shift=other, **options)


def bias_transposed(query, key, value, *, bias=None, **options):
    return shifted_window_attention(query, key, value, bias=None if bias is None else bias.mT, **options)


def by_mask(query, key, value, *, grid, window, shift, bias=None, keep=None):
    mask = shifted_windows(grid, window, shift).matrix(query.shape[-2])
    mask = mask if keep is None else mask & keep[:, None, None, :]
    if bias is not None:
        token = torch.tensor([within(place, window, shift) for place in product(*map(range, grid))])
        bias = bias[:, token[:, None], token]
    return attention(query, key, value, mask=mask, bias=bias, backend="stages")


test_shifted = every_check(
    Form(
        "shifted windows",
        shifted_window_attention,
        in_loops,
        tensors,
        wrong={"no region mask": unmasked, "rolled the other way": shifted_back, "bias transposed": bias_transposed},
        options=options,
        stages=by_mask,
        blind="filler",
        sizes=Sizes(queries=24, keys=24),
    )
)


@st.composite
def cuts(draw):
    axes = draw(st.integers(1, 3))
    grid = [draw(st.integers(1, 5)) for _ in range(axes)]
    window = [draw(st.integers(1, 4)) for _ in range(axes)]
    return grid, window, [draw(st.integers(0, size - 1)) for size in window]


@given(cuts())
def test_merge_undoes_partition(cut):
    states = torch.arange(float(np.prod(cut[0])))[None, :, None].expand(2, -1, 3)
    assert torch.equal(merge(partition(states, *cut), *cut), states)


@given(cuts())
def test_the_dense_mask_keeps_to_the_cells(cut):
    grid, window, shift = cut
    cells = [cell(place, window, shift) for place in product(*map(range, grid))]
    expected = torch.tensor([[one == other for other in cells] for one in cells])
    assert torch.equal(shifted_windows(grid, window, shift).matrix(len(cells)), expected)


@pytest.mark.parametrize(("side", "window", "shift"), [(8, 4, 2), (6, 3, 1), (12, 4, 3)])
def test_equals_the_mask_of_transformers(side, window, shift):
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    layer = swin.SwinLayer(swin.SwinConfig(window_size=window), 8, (side, side), 1, shift_size=shift)
    theirs = layer.get_attn_mask(side, side, torch.float32, torch.device("cpu"))
    assert torch.equal(window_mask((side, side), (window, window), (shift, shift)), theirs == 0)


def test_equals_the_bias_of_transformers():
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    theirs = swin.SwinRelativePositionBias(num_heads=3, window_size=(2, 3))
    table = torch.randn(15, 3, generator=torch.Generator().manual_seed(1))
    theirs.relative_position_bias_table.data.copy_(table)
    assert torch.equal(relative_position_bias(table, (2, 3)), theirs()[0])


def test_the_index_counts_offsets_from_query_to_key():
    places = list(product(range(2), range(3)))
    expected = [[(i - k + 1) * 5 + (j - m + 2) for k, m in places] for i, j in places]
    assert relative_position_index((2, 3)).tolist() == expected


def test_memory_grows_with_the_length():
    def call(query, key, value):
        side = int(query.shape[-2] ** 0.5)
        return shifted_window_attention(query, key, value, grid=(side, side), window=(4, 4), shift=(2, 2))

    draw = Draw.seeded()
    small, large = ({name: draw.normal(1, 2, n, 4) for name in ("query", "key", "value")} for n in (24**2, 48**2))
    assert largest(call, **large) <= 4.1 * largest(call, **small)
    assert largest(call, **large) < (48**2) ** 2 / 10


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (
            {"grid": (4, 5), "window": (2, 2), "shift": (0, 0)},
            r"\(4, 5\) has 20 positions, but query is float32\[1, 1, 24, 2\]",
        ),
        ({"grid": (4, 6), "window": (2, 2), "shift": (2, 0)}, r"shifts from 0 to window - 1"),
        ({"grid": (4, 6), "window": (2,), "shift": (0, 0)}, r"one entry per axis"),
        ({"grid": (4, 6), "window": (2, 0), "shift": (0, 0)}, r"sizes from 1 on"),
    ],
)
def test_refusals(cut, message):
    states = torch.zeros(1, 24, 2)
    with pytest.raises(ValueError, match=message):
        shifted_window_attention(states, states, states, **cut)


def test_a_table_for_another_window_is_refused():
    with pytest.raises(ValueError, match=r"float32\[9, 2\]; a window \(2, 3\) has 15 offsets, so \[15, heads\]"):
        relative_position_bias(torch.zeros(9, 2), (2, 3))
