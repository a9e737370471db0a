"""A block of a mask and the reach of its queries: held against slices of the whole matrix, for any mask there is."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intently.masks import Mask
from intently.masks.expression import And, Causal, Window

SMALL = settings(max_examples=80, deadline=None, derandomize=True)


def _table(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.5


def terms(size: int) -> st.SearchStrategy[Mask]:
    """One term of each kind, wide enough for `size` positions."""
    number, seed = st.integers(0, size), st.integers(0, 99)
    flags = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    return st.one_of(
        st.just(Mask.full()),
        st.just(Mask.none()),
        st.integers(-size, size).map(Mask.causal),
        st.integers(1, size).map(Mask.window),
        st.builds(Mask.window, number, number),
        number.map(Mask.prefix),
        number.map(lambda n: Mask.chunks(n + 1)),
        st.lists(st.integers(0, size), min_size=1, max_size=3).map(lambda chosen: Mask.keys(*chosen)),
        flags.map(lambda ids: Mask.documents(ids=ids)),
        st.lists(flags, min_size=2, max_size=2).map(lambda ids: Mask.documents(ids=torch.tensor(ids))),
        st.lists(number, min_size=2, max_size=2).map(Mask.padding),
        st.lists(number, min_size=2, max_size=2).map(lambda kept: Mask.padding(kept, side="left")),
        seed.map(lambda seed: Mask.padding(keep=_table(seed, 2, size))),
        st.integers(0, 3).map(lambda radius: Mask.neighborhood(size, radius)),
        st.tuples(st.integers(0, 2), st.integers(0, 2)).map(lambda radius: Mask.neighborhood((4, size // 4), radius)),
        st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)).map(
            lambda radius: Mask.neighborhood((2, 2, size // 4), radius)
        ),
        seed.map(lambda seed: Mask.explicit(_table(seed, size, size))),
        seed.map(lambda seed: Mask.explicit(_table(seed, 2, 3, size, size))),
    )


def masks(size: int) -> st.SearchStrategy[Mask]:
    def grown(smaller: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
        several = st.lists(smaller, min_size=2, max_size=3)
        pair = st.lists(smaller, min_size=2, max_size=2)
        return st.one_of(
            several.map(lambda parts: reduce(Mask.__and__, parts)),
            several.map(lambda parts: reduce(Mask.__or__, parts)),
            smaller.map(Mask.__invert__),
            smaller.map(Mask.bottom_right),
            pair.map(lambda parts: Mask.per_sample(*parts)),
            st.lists(smaller, min_size=3, max_size=3).map(lambda parts: Mask.per_head(*parts)),
        )

    return st.recursive(terms(size), grown, max_leaves=4)


@SMALL
@given(data=st.data())
def test_a_tile_is_a_slice_and_its_reach_hides_nothing(data):
    size = 12
    mask = data.draw(masks(size))
    keys = data.draw(st.integers(1, size))
    queries = data.draw(st.integers(1, size))
    start, left = data.draw(st.integers(0, queries - 1)), data.draw(st.integers(0, keys - 1))
    rows = range(start, data.draw(st.integers(start, queries)))
    columns = range(left, data.draw(st.integers(left, keys)))
    try:
        whole = mask.matrix(queries, keys)
    except ValueError:  # padding longer than the keys, documents short of a bottom-right place
        with pytest.raises(ValueError):
            mask.tile(rows, columns, queries, keys)
        with pytest.raises(ValueError):
            mask.reach(rows, queries, keys)
        return
    block = whole[..., rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(mask.tile(rows, columns, queries, keys), block)
    reach = mask.reach(rows, queries, keys)
    assert reach.step == 1 and set(reach) <= set(range(keys))
    seen = whole[..., rows.start : rows.stop, :].flatten(0, -2).any(dim=0).nonzero().flatten().tolist()
    assert set(seen) <= set(reach)


TIGHT = [
    (Mask.causal(), lambda first, last: (0, last)),
    (Mask.causal(-3), lambda first, last: (0, last - 3)),
    (Mask.causal() & Mask.window(4), lambda first, last: (first - 3, last)),
    (Mask.window(2, 1), lambda first, last: (first - 2, last + 1)),
    (Mask.neighborhood(16, 3), lambda first, last: (first - 3, last + 3)),
    (Mask.prefix(5), lambda first, last: (0, max(4, last))),
    (
        Mask.documents(3, 8, 5),
        lambda first, last: (max(s for s in (0, 3, 11) if s <= first), min(s for s in (2, 10, 15) if s >= last)),
    ),
    (Mask.keys(2, 5), lambda first, last: (2, 5)),
    (Mask.padding([3, 6]), lambda first, last: (0, 5)),
    (Mask.padding([3, 6], side="left"), lambda first, last: (10, 15)),
]


@pytest.mark.parametrize(("mask", "rule"), TIGHT, ids=lambda value: str(value) if isinstance(value, Mask) else "")
@pytest.mark.parametrize("rows", [range(0, 2), range(4, 7), range(9, 16)], ids=str)
def test_reach_is_as_short_as_can_be(mask, rule, rows):
    """From the first to the last key seen, counted on the matrix; the rule beside it is by hand."""
    seen = mask.matrix(16)[..., rows.start : rows.stop, :].flatten(0, -2).any(dim=0).nonzero().flatten().tolist()
    reach = mask.reach(rows, 16, 16)
    assert reach == (range(seen[0], seen[-1] + 1) if seen else range(0))
    first, last = rule(rows.start, rows.stop - 1)
    assert not seen or reach == range(max(first, 0), min(last, 15) + 1)


def test_grids_reach_no_further_than_their_rows():
    assert Mask.neighborhood((8, 8), 1).reach(range(16, 24), 64, 64) == range(8, 32)
    assert Mask.neighborhood((4, 4, 4), (0, 3, 3)).reach(range(17, 20), 64, 64) == range(16, 32)


def test_bottom_right_reaches_from_where_it_stands():
    mask = (Mask.causal() & Mask.window(4)).bottom_right()
    assert mask.reach(range(0, 1), 2, 10) == range(5, 9)  # the first of two queries stands at key 8
    assert mask.bottom_right().tile(range(1, 2), range(6, 10), 2, 10).tolist() == [[True] * 4]


def test_ranges_that_leave_the_matrix_are_refused():
    for rows in (range(3, 5), range(-1, 2), range(0, 4, 2)):
        with pytest.raises(ValueError, match="inside range"):
            Mask.causal().tile(rows, range(4), 4, 4)
        with pytest.raises(ValueError, match="inside range"):
            Mask.causal().reach(rows, 4, 4)
    assert Mask.causal().tile(range(0), range(4), 4, 4).shape == (0, 4)
    assert Mask.causal().reach(range(0), 4, 4) == range(0)


def test_negative_control_a_reach_that_is_short_is_seen():
    mask = Mask(And((Causal(), Window(3, 3))))
    seen = mask.matrix(8)[5:7].any(dim=0).nonzero().flatten().tolist()
    assert not set(seen) <= set(mask.reach(range(5, 7), 8, 8)[1:])
