"""Logits and q·k laid out like the weights that met the values, and the arguments that enter on the way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from intently.sites.ops import CONTRACTIONS, PER_POSITION
from intently.sites.provenance import Follow, Node
from intently.sites.trace_types import Pending


class Lookup:
    """Logits and q·k laid out like the weights that met the values: moves between them are replayed on indices."""

    def __init__(self, pending: Pending, node: Node, shape: torch.Size):
        self._pending = pending
        self._shape = shape
        start = pending.node
        self._index: Tensor | None = None
        if pending.how != "joined":
            steps = torch.arange(math.prod(start.shape)).reshape(start.shape)
            index = Follow({start: steps}).to(node)
            if index is not None and index.numel() == math.prod(shape):
                self._index = index.reshape(shape)
        self.side = _side(node, start) | self._score_side()

    def _score_side(self) -> frozenset[str]:
        stops = [s.node for s in self._pending.scores]
        side = _side_between(self._pending.logits_node, stops or [_projected(self._pending.logits_node)])
        for score in self._pending.scores:  # baddbmm adds its first argument
            side = side.union(*(n.origins for n in score.node.inputs if n not in score.operands))
        return side

    def from_logits(self, values: Tensor) -> Tensor | None:
        """Something shaped like the softmax's input, laid out like the weights."""
        if self._index is None or values.numel() != math.prod(self._pending.node.shape):
            return None
        return values.reshape(-1)[self._index]

    def logits(self) -> Tensor | None:
        logits = self._pending.logits.detach()
        if logits.shape != self._pending.node.shape:
            return None
        return self.from_logits(logits)

    def from_scores(self, values: Sequence[Tensor]) -> Tensor | None:
        """Something shaped like each product of queries and keys, laid out like the weights."""
        seeds, offset = {}, 0
        for score, value in zip(self._pending.scores, values, strict=True):
            seeds[score.node] = torch.arange(offset, offset + value.numel()).reshape(score.node.shape)
            offset += value.numel()
        if not seeds:
            return None
        index = Follow(seeds).to(self._pending.logits_node)
        # Columns that the softmax saw and no value met (a sink) come from no product: they are sliced off here.
        index = self.from_logits(index.expand(self._pending.node.shape)) if index is not None else None
        if index is None or (index < 0).any():
            return None
        return torch.cat([v.reshape(-1) for v in values])[index]

    def scores(self) -> Tensor | None:
        values = []
        for score in self._pending.scores:
            if any(t.numel() == 0 for t in score.contraction.operands):
                return None
            values.append(
                score.contraction.compute(*[t.detach() for t in score.contraction.operands]).reshape(score.node.shape)
            )
        return self.from_scores(values) if values else None


def _projected(node: Node) -> Node:
    """The projection that logits without a product of queries and keys come from."""
    while node.inputs and node.name not in PER_POSITION and node.name not in CONTRACTIONS and node.leaf is None:
        node = node.inputs[0]
    return node


def _side(node: Node, stop: Node) -> frozenset[str]:
    return _side_between(node, [stop])


def _side_between(node: Node, stops: Iterable[Node]) -> frozenset[str]:
    """Arguments that enter on the way from `stops` to `node` from beside it."""
    stopped = set(stops)
    first = min((stop.number for stop in stopped), default=0)
    reaches: dict[Node, bool] = {}

    def passes(n: Node) -> bool:
        stack = [n]
        while stack:
            current = stack[-1]
            if current in reaches:
                stack.pop()
                continue
            if current in stopped or current.number < first:
                reaches[current] = current in stopped
                stack.pop()
                continue
            waiting = [i for i in current.inputs if i not in reaches]
            if waiting:
                stack.extend(waiting)
                continue
            reaches[current] = any(reaches[i] for i in current.inputs)
            stack.pop()
        return reaches[n]

    side: set[str] = set()
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        if current in seen or current in stopped:
            continue
        seen.add(current)
        for source in current.inputs:
            if passes(source):
                todo.append(source)
            else:
                side |= source.origins
    return frozenset(side)
