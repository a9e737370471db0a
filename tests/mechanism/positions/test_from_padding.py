"""Positions from pads and from packed documents, against counting by hand and against Hugging Face."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intently.mechanism.positions import positions_from_documents, positions_from_padding

SMALL = settings(max_examples=50, deadline=None, derandomize=True)


def test_left_right_both_and_none():
    keep = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    expected = [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0], [0, 0, 1, 2, 0], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    for each in (keep, keep.bool(), keep.int()):
        positions = positions_from_padding(each)
        assert positions.dtype == torch.int64
        assert positions.tolist() == expected
    # Counting columns, the silent fault: right for pads on the right, shifted for pads on the left.
    columns = torch.arange(5).expand(5, 5)
    assert columns[1][keep[1].bool()].equal(positions_from_padding(keep)[1][keep[1].bool()])
    assert not columns[0][keep[0].bool()].equal(positions_from_padding(keep)[0][keep[0].bool()])


@SMALL
@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), min_size=1, max_size=4), cached=st.integers(0, 6)
)
def test_equals_hugging_face(rows, cached):
    mask = torch.tensor(rows)
    theirs = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    assert positions_from_padding(mask, pad=1).equal(theirs)
    assert positions_from_padding(mask, pad=1, cached=cached).equal(theirs[:, cached:])


def test_with_a_cache_each_row_continues_where_it_stood():
    # Three cached columns, one new token; the first row holds two pads: its new token is the second, the other's fourth.
    keep = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    assert positions_from_padding(keep, cached=3).tolist() == [[1], [3]]


def test_documents_by_hand():
    ids = torch.tensor([[0, 0, 0, 1, 1, 2], [5, 3, 5, 3, 5, 5]])
    assert positions_from_documents(ids).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 1, 2, 3]]
    assert positions_from_documents(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)


@SMALL
@given(ids=st.lists(st.integers(-3, 3), min_size=1, max_size=12))
def test_documents_count_the_earlier_tokens_of_their_own(ids):
    expected = [sum(other == own for other in ids[:place]) for place, own in enumerate(ids)]
    assert positions_from_documents(torch.tensor(ids)).tolist() == expected


def test_both_compile():
    keep = torch.tensor([[0, 1, 1]])
    compiled = torch.compile(
        lambda x: (positions_from_padding(x), positions_from_documents(x)), fullgraph=True, backend="eager"
    )
    assert [each.tolist() for each in compiled(keep)] == [[[0, 0, 1]], [[0, 0, 1]]]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: positions_from_padding(torch.zeros(2, 3)), TypeError, r"float32\[2, 3\]"),
        (lambda: positions_from_padding(torch.tensor(True)), ValueError, r"bool\[\]"),
        (lambda: positions_from_padding(torch.ones(2, 3).bool(), cached=4), ValueError, "cached is 4"),
        (lambda: positions_from_documents(torch.zeros(2, 3)), TypeError, "names its document"),
    ],
)
def test_refusals_say_what_is_wrong(call, error, says):
    with pytest.raises(error, match=says):
        call()
