"""Neighborhood attention against loops that search each neighbourhood, and against a dense mask."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check
from tests.mechanism.largest import largest

from intently import Mask
from intently.mechanism import attention
from intently.mechanism.forms.neighborhood import (
    neighborhood_attention,
    neighborhood_mask,
    neighborhood_stages,
    neighbors,
)


def along(length, size, dilation, causal, border, i):
    """Positions one query sees on one axis, found by search: of all runs of its class, the best centred one."""
    members = list(range(i % dilation, length, dilation))
    own = members.index(i)
    if causal:
        return members[max(0, own - size + 1) : own + 1]
    if border == "clip":
        return [each for step, each in enumerate(members) if -(size // 2) <= step - own < size - size // 2]
    runs = [members[start : start + size] for start in range(len(members) - size + 1)]
    return min(runs, key=lambda run: abs(members.index(run[0]) + size // 2 - own))


def spread(value, axes):
    return (value,) * axes if isinstance(value, int) else tuple(value)


def searched(grid, size, dilation=1, causal=False, border="inward"):
    """For every query of the grid the list of the keys it sees, with their offsets in steps."""
    grid = (grid,) if isinstance(grid, int) else tuple(grid)
    size, dilation, causal = (spread(each, len(grid)) for each in (size, dilation, causal))
    found = []
    for place in product(*map(range, grid)):
        axes = [along(*each, border, i) for *each, i in zip(grid, size, dilation, causal, place, strict=True)]
        near = list(product(*axes))
        steps = [
            tuple((k - q) // d + s - 1 for k, q, d, s in zip(each, place, dilation, size, strict=True)) for each in near
        ]
        found.append(([int(np.ravel_multi_index(each, grid)) for each in near], steps))
    return found


def in_loops(query, key, value, *, relative=None, keep=None, **pattern):
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    group = query.shape[1] // max(1, key.shape[1])
    for i, (seen, steps) in enumerate(searched(**pattern)):
        for batch, head in np.ndindex(query.shape[:2]):
            kept = [n for n, j in enumerate(seen) if keep is None or keep[batch, j]]
            if not kept:
                continue
            at = [seen[n] for n in kept]
            logits = key[batch, head // group][at] @ query[batch, head, i] / np.sqrt(query.shape[-1])
            if relative is not None:
                logits = logits + np.array([relative[(head, *steps[n])] for n in kept])
            shares = np.exp(logits)
            output[batch, head, i] = shares @ value[batch, head // group][at] / shares.sum()
    return output


def tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "query": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width),
        "key": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.width),
        "value": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.value_width),
    }


def options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    if sizes.queries == 1:
        return {
            "1-D": {"grid": 1, "size": 1},
            "2-D": {"grid": (1, 1), "size": 1},
            "clipped": {"grid": 1, "size": 3, "border": "clip"},
        }
    keep = torch.ones(sizes.batch, 20, dtype=torch.bool)
    keep[:, [13, 14, 18, 19]] = False  # the whole neighbourhood of the last query of a 4 x 5 grid, clipped at 3
    return {
        "2-D": {"grid": (4, 5), "size": 3},
        "2-D, uneven, even": {"grid": (4, 5), "size": (2, 4)},
        "2-D, dilated": {"grid": (4, 5), "size": 2, "dilation": (1, 2)},
        "2-D, causal axis, bias": {
            "grid": (4, 5),
            "size": (2, 3),
            "causal": (False, True),
            "relative": draw.normal(sizes.heads, 3, 5),
        },
        "clipped, filler": {"grid": (4, 5), "size": 3, "border": "clip", "keep": keep},
        "1-D, dilated, bias": {"grid": 20, "size": 5, "dilation": 3, "relative": draw.normal(sizes.heads, 9)},
        "3-D": {"grid": (2, 2, 5), "size": (1, 2, 3)},
    }


def slip(**changed):
    def call(query, key, value, **given):
        return neighborhood_attention(query, key, value, **{**given, **changed})

    return call


def bias_mirrored(query, key, value, *, relative=None, **given):
    mirrored = None if relative is None else relative.flip(-1)
    return neighborhood_attention(query, key, value, relative=mirrored, **given)


def by_mask(query, key, value, *, relative=None, keep=None, grid, size, dilation=1, causal=False, border="inward"):
    """The five stages on the dense mask, the bias filled in pair by pair."""
    mask = torch.zeros(query.shape[-2], query.shape[-2], dtype=torch.bool)
    bias = torch.zeros(query.shape[-3], *mask.shape, dtype=query.dtype)
    for i, (seen, steps) in enumerate(searched(grid, size, dilation, causal, border)):
        for j, step in zip(seen, steps, strict=True):
            mask[i, j] = True
            if relative is not None:
                bias[:, i, j] = relative[(slice(None), *step)]
    if keep is not None:
        mask = mask & keep[:, None, None, :]
    return attention(query, key, value, mask=mask, bias=bias, backend="stages")


FORM = Form(
    "neighborhood",
    neighborhood_attention,
    in_loops,
    tensors,
    wrong={"no scale": slip(scale=1.0), "clipped at the border": slip(border="clip"), "bias mirrored": bias_mirrored},
    options=options,
    stages=by_mask,
    blind="clipped, filler",
    sizes=Sizes(queries=20, keys=20),
)
test_neighborhood = every_check(FORM)


@st.composite
def patterns(draw):
    axes = draw(st.integers(1, 2))
    grid = tuple(draw(st.lists(st.integers(1, 7), min_size=axes, max_size=axes)))
    border = draw(st.sampled_from(["inward", "clip"]))
    causal = tuple(draw(st.booleans()) for _ in grid)
    size, dilation = [], []
    for length, cut in zip(grid, causal, strict=True):
        size.append(draw(st.integers(1, length if border == "inward" and not cut else 5)))
        free = border == "clip" or cut
        dilation.append(draw(st.integers(1, 4 if free else length // size[-1])))
    return {"grid": grid, "size": tuple(size), "dilation": tuple(dilation), "causal": causal, "border": border}


@given(patterns())
def test_neighbors_tiles_and_search_agree(pattern):
    found, searching = neighbors(**pattern), searched(**pattern)
    assert [sorted(row[row >= 0].tolist()) for row in found] == [sorted(seen) for seen, _ in searching]
    length = len(found)
    mask = neighborhood_mask(**pattern).matrix(length)
    states = torch.eye(length, dtype=torch.float64)
    seen = neighborhood_attention(0 * states, states, states, **pattern) > 0  # one-hot values: the weights themselves
    assert torch.equal(seen, mask)


def test_every_neighborhood_inside_has_the_same_size():
    assert (neighbors((4, 5), (3, 2), (1, 2)) >= 0).all()


@pytest.mark.parametrize("grid", [6, (3, 4), (2, 3, 2)])
def test_clipped_is_the_mask_of_that_name(grid):
    length = neighbors(grid, 1).shape[0]
    ours = neighborhood_mask(grid, 3, border="clip").matrix(length)
    assert torch.equal(ours, Mask.neighborhood(grid, 1).matrix(length))
    assert not torch.equal(ours, neighborhood_mask(grid, 3 if grid == 6 else 2).matrix(length))


def test_stages_hold_the_weights_of_each_neighbor():
    case = FORM.first()
    seen = case(neighborhood_stages)
    torch.testing.assert_close(seen.output, case(neighborhood_attention))
    dense = torch.zeros(2, 6, 20, 20, dtype=torch.float64)
    dense.scatter_(-1, neighbors(**case.options).expand(2, 6, -1, -1), seen.weights)
    torch.testing.assert_close(dense @ case.tensors["value"].repeat_interleave(2, 1), seen.output)


def test_sink_softcap_and_a_single_head_pass_through():
    draw = Draw.seeded()
    query, key, value = (draw.normal(2, 6, 4) for _ in range(3))
    options = {"sink": draw.normal(1), "softcap": 0.7, "scale": 0.9}
    expected = attention(query, key, value, mask=neighborhood_mask(6, 3), **options)
    torch.testing.assert_close(neighborhood_attention(query, key, value, grid=6, size=3, **options), expected)


def test_memory_grows_with_the_length():
    def call(query, key, value):
        side = int(query.shape[-2] ** 0.5)
        return neighborhood_attention(query, key, value, grid=(side, side), size=3, dilation=2)

    draw = Draw.seeded()
    small, large = ({name: draw.normal(1, 2, n, 4) for name in ("query", "key", "value")} for n in (24**2, 48**2))
    assert largest(call, **large) <= 4.2 * largest(call, **small)
    assert largest(call, **large) < (48**2) ** 2 / 10
    mask = neighborhood_mask((24, 24), 3, 2)
    assert largest(lambda query, key, value: attention(query, key, value, mask=mask), **small) >= (24**2) ** 2


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ({"grid": (4, 5), "size": 5}, r"size 5 · dilation 1 = 5 exceeds the 4 positions of axis 0"),
        ({"grid": (4, 5), "size": 2, "dilation": 3}, r"size 2 · dilation 3 = 6 exceeds the 4 positions of axis 0"),
        ({"grid": (4, 4), "size": 3}, r"\(4, 4\) has 16 positions, but query is float64\[1, 20, 2\]"),
        ({"grid": (4, 5), "size": (3, 3, 3)}, r"size \(3, 3, 3\) has 3 entries for 2 axes"),
        ({"grid": (4, 5), "size": 0}, r"1 to 3 axes and whole numbers from 1 on"),
        ({"grid": (4, 5), "size": 3, "border": "wrap"}, r"border is 'wrap'"),
        ({"grid": (4, 5), "size": 3, "relative": torch.zeros(1, 3, 3)}, r"\[heads, 5, 5\] is needed"),
    ],
)
def test_refusals(pattern, message):
    states = torch.zeros(1, 20, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        neighborhood_attention(states, states, states, **pattern)
