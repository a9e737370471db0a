"""Streams make content, change one position of one sample alone, and write masks in the form that is asked for."""

from __future__ import annotations

import pytest
import torch

from intently.targets import Padding, Stream

KINDS = [
    Stream("ids", "tokens", vocab=11), Stream("ids", "tokens", vocab=11, sequence_first=True, avoid=frozenset({0, 3})),
    Stream("x", "features", width=5), Stream("x", "features", width=5, sequence_first=True),
    Stream("q", "features", width=5, heads=3), Stream("q", "features", width=5, heads=0),
    Stream("p", "pixels", width=3, patch=2, side=(4, 6)), Stream("a", "frames", width=3, stride=2),
]  # fmt: skip


def named(stream: Stream) -> str:
    return f"{stream.kind} {stream.heads} {stream.sequence_first}"


def content(stream: Stream) -> torch.Tensor:
    return stream.make(2, 6, 1, torch.float32)


@pytest.mark.parametrize("stream", KINDS, ids=named)
def test_change_moves_one_position_of_one_sample(stream):
    before = content(stream)
    for sample in (0, 1):
        for position in range(stream.positions(6)):
            after = stream.change(before, sample, position, seed=4)
            moved = after != before
            where = torch.zeros_like(moved)
            where[stream.place(sample, position)] = True
            assert moved.any() and torch.equal(moved, moved & where) and torch.equal(moved, where)
    assert torch.equal(content(stream), before), "content is a function of the seed"


@pytest.mark.parametrize("stream", KINDS, ids=named)
def test_positions_do_not_overlap_and_cover_everything(stream):
    count = torch.zeros(content(stream).shape, dtype=torch.long)
    for sample in (0, 1):
        for position in range(stream.positions(6)):
            count[stream.place(sample, position)] += 1
    assert (count == 1).all()


def test_shapes():
    assert [tuple(content(s).shape) for s in KINDS] == [
        (2, 6), (6, 2), (2, 6, 5), (6, 2, 5), (2, 3, 6, 5), (2, 6, 5), (2, 3, 4, 6), (2, 3, 12),
    ]  # fmt: skip


@pytest.mark.parametrize("stream", KINDS, ids=named)
def test_a_sample_is_the_same_in_any_batch(stream):
    axis = 1 if stream.sequence_first else 0
    two, three = stream.make(2, 6, 1, torch.float64), stream.make(3, 6, 1, torch.float64)
    assert torch.equal(three.narrow(axis, 0, 2), two)
    assert not torch.equal(three.select(axis, 0), three.select(axis, 1)), "samples differ"
    assert not torch.equal(stream.make(2, 6, 2, torch.float64), two), "seeds differ"


def test_special_ids_are_avoided():
    assert not {0, 3} & set(content(KINDS[1]).unique().tolist())
    assert KINDS[1].ids.tolist() == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert Stream("ids", "tokens", vocab=2, avoid=frozenset({0, 1})).ids.tolist() == [0, 1]


KEPT = torch.tensor([[True, True, False], [True, True, True]])


@pytest.mark.parametrize(
    ("form", "size"),
    [
        ("batch key", (2, 3)),
        ("batch 1 key", (2, 1, 3)),
        ("batch 1 1 key", (2, 1, 1, 3)),
        ("batch query key", (2, 3, 3)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_masks(form, size, keep, dtype):
    value = Padding("mask", keep, dtype, form).value(KEPT)
    assert (value.shape, value.dtype) == (size, dtype)
    assert torch.equal(value[0].reshape(-1, 3)[-1].bool(), torch.tensor([keep, keep, not keep]))
    assert (value[1].bool() == keep).all()


def test_lengths():
    assert Padding("lengths", True, form="lengths").value(KEPT).tolist() == [2, 3]
