"""The graph of a run: indices are followed from where they are sown, and nothing older is looked at."""

from __future__ import annotations

import torch

from intently.sites.lookup import _side_between
from intently.sites.provenance import Follow, Node

SHAPE = torch.Size([2, 3])
X, MASK = frozenset({"x"}), frozenset({"mask"})


def history(length: int) -> Node:
    node = Node("x", (), SHAPE, X, leaf="argument:x")
    for _ in range(length):
        node = Node("add", (node,), SHAPE, X)
    return node


def test_indices_are_followed_and_the_history_before_them_is_left_alone() -> None:
    seed = history(500)
    beside = history(500)
    last = Node("mul", (Node("add", (seed, beside), SHAPE, X),), SHAPE, X)
    follow = Follow({seed: torch.arange(6).reshape(SHAPE)})
    # The history beside it was made later than the seed and could come from it, so only its own part is walked.
    found = follow.to(last)
    assert found is not None and found.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(follow._known) < 510
    assert follow.to(Node("add", (beside,), SHAPE, X)) is None


def test_what_enters_beside_the_way_is_told_whether_it_is_older_or_younger() -> None:
    older = Node("mask", (), SHAPE, MASK, leaf="argument:mask")
    stop = history(3)
    younger = Node("bias", (), SHAPE, frozenset({"bias"}), leaf="argument:bias")
    node = Node("add", (Node("add", (stop, older), SHAPE, X | MASK), younger), SHAPE, X | MASK)
    assert _side_between(node, [stop]) == {"mask", "bias"}
