"""The queries and keys of a product that was written out: which operand is which, their rows, heads and samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from intently.report import Source
from intently.sites.contraction import Contraction
from intently.sites.factors import path_factor, softcap_after
from intently.sites.layout import Layout, is_folded
from intently.sites.lookup import Lookup
from intently.sites.origin import entries_of, features_of, samples_of, varies
from intently.sites.provenance import Node
from intently.sites.rotation import Rotation, measured
from intently.sites.site import Rows
from intently.sites.trace_types import Pending, Sizes


class Sources:
    """Where queries and keys came from: the projection and the hidden states behind them."""

    def __init__(self, pending: Pending, sizes: Sizes, lookup: Lookup):
        self._pending = pending
        self._sizes = sizes
        self._lookup = lookup
        self._oriented: bool | None = None

    @property
    def _score(self) -> Any:
        return self._pending.scores[0] if self._pending.scores else None

    def score_source(self) -> Source | None:
        return self._score.source if self._score else None

    def query_side(self) -> int:
        """Which operand of the product holds the queries: the one whose free axis is not the keys'."""
        return 0 if self._oriented is not False else 1

    def orient(self, layout: Layout) -> None:
        """Find which operand is the query: its free axis runs along the weights' query axis."""
        score = self._score
        if score is None or self._oriented is not None:
            return
        made: Contraction = score.contraction
        for operand in (0, 1):
            for axis in made.only_in(operand):
                if made.size(axis) < 2:
                    continue
                index = torch.arange(made.size(axis)).reshape([made.size(a) if a == axis else 1 for a in made.output])
                spread = index.expand([made.size(a) for a in made.output]).reshape(score.node.shape)
                placed = self._from_first_score(spread)
                if placed is None:
                    continue
                placed = layout.canonical(placed)
                along_keys = placed.shape[-1] > 1 and bool((placed != placed[..., :1]).any())
                along_queries = placed.shape[-2] > 1 and bool((placed != placed[..., :1, :]).any())
                if along_keys and not along_queries:
                    self._oriented = operand == 1
                    return
                if along_queries and not along_keys:
                    self._oriented = operand == 0
                    return

    def _from_first_score(self, values: Tensor) -> Tensor | None:
        filled = [values if s is self._score else torch.full(s.node.shape, -1) for s in self._pending.scores]
        return self._lookup.from_scores(filled)

    def origins(self, side: int) -> frozenset[str]:
        """Arguments that reach the queries (0) or the keys (1)."""
        if self._score is None:
            return self._pending.logits_node.origins
        operand = side if self.query_side() == 0 else 1 - side
        return self._score.operands[operand].origins

    def operand(self, side: int) -> Node | None:
        """The node of the queries (0) or the keys (1)."""
        if self._score is None:
            return None
        return self._score.operands[side if self.query_side() == 0 else 1 - side]

    def width(self) -> int:
        if self._score is None:
            return 0
        made: Contraction = self._score.contraction
        return math.prod(made.size(a) for a in made.summed(0) if a in made.labels[1])

    def batch_index(self) -> Tensor | None:
        """The sample of every entry, laid out like the weights; None where it cannot be told."""
        score, batch = self._score, self._sizes.batch
        if score is None or batch is None or batch < 2:
            return None
        for operand in (0, 1):
            found = samples_of(score.operands[operand], batch)
            placed = self._placed(found, operand, shared=True) if found is not None else None
            if placed is not None:
                return placed
        return None

    def head_index(self) -> Tensor | None:
        """The first projection column of every entry's query, laid out like the weights: it names the head.

        The operand with more columns is taken: keys may be shared by heads. Rows of unknown origin (cached ones) name none.
        """
        score = self._score
        if score is None:
            return None
        best: Tensor | None = None
        told = (False, 0)
        for operand in (0, 1):
            found = features_of(score.operands[operand])
            placed = self._placed(found, operand, shared=False) if found is not None else None
            if placed is not None and (tells := (bool((placed >= 0).all()), placed.unique().numel())) > told:
                best, told = placed, tells
        return best

    def _placed(self, index: Tensor, operand: int, *, shared: bool) -> Tensor | None:
        """An index of one operand's rows, laid out like the weights; `shared` demands it of all columns of a row alike."""
        score = self._score
        made: Contraction = score.contraction
        tensor, axes = made.operands[operand], list(made.labels[operand])
        if index.numel() != tensor.numel():
            return None
        index = index.reshape(tensor.shape)
        summed = [axes.index(a) for a in made.summed(operand)]
        if shared and any(varies(index, axis) for axis in summed):
            return None
        for axis in sorted(summed, reverse=True):
            index = index.select(axis, 0)
        left = [a for a in axes if a in made.output]
        index = index.permute([left.index(a) for a in made.output if a in left])
        held = iter(index.shape)
        index = index.reshape([next(held) if a in left else 1 for a in made.output])
        return self._from_first_score(index.expand([made.size(a) for a in made.output]).reshape(score.node.shape))

    def rows(self, *, over_queries: bool, value: Node, layout: Layout, key_axis: int) -> Rows:
        if over_queries:
            return Rows(("query",), ())
        queries = layout.shape[-2] if not layout.squeezed_query else 1
        if is_folded(queries, self._sizes):
            return Rows()  # heads lie along the query axis by design: rows are tokens of several heads
        scrambled = []
        score = self._score
        if score is not None:
            self.orient(layout)
            for side, name in ((0, "query"), (1, "key")):
                operand = side if self.query_side() == 0 else 1 - side
                features = features_of(score.operands[operand])
                placed = self._placed(features, operand, shared=False) if features is not None else None
                if placed is not None and varies(layout.canonical(placed), -2 if side == 0 else -1):
                    scrambled.append(name)
        features = features_of(value)
        if features is not None and key_axis < features.dim() and varies(features, key_axis):
            scrambled.append("value")
        return Rows((), tuple(scrambled))

    def kv_heads(self, order: Tensor) -> int | None:
        score = self._score
        if score is None:
            return None
        operand = 1 if self.query_side() == 0 else 0
        made: Contraction = score.contraction
        features = features_of(score.operands[operand])
        tensor = made.operands[operand]
        if features is None or features.numel() != tensor.numel():
            return None
        summed = [made.labels[operand].index(a) for a in made.summed(operand)]
        flat = features.reshape(tensor.shape).movedim(summed, list(range(-len(summed), 0)))
        distinct = torch.unique(flat.reshape(-1, math.prod(flat.shape[-len(summed) :]))[:, 0])
        return distinct.numel() if order.shape[1] % distinct.numel() == 0 else None

    def operand_rows(self, layout: Layout) -> tuple[Tensor | None, Tensor | None]:
        """Queries and keys as `[batch, heads, position, width]`."""
        return self._side_rows(layout, 0), self._side_rows(layout, 1)

    def entry_rows(self, layout: Layout) -> tuple[Tensor | None, Tensor | None]:
        """Laid out like `operand_rows`: which entry of its projection each entry of the queries and keys was."""
        found = []
        for side in (0, 1):
            entries = [
                entries_of(s.operands[o], s.contraction.operands[o].shape)
                for s in self._pending.scores
                for o in (self._operand(side),)
            ]
            known = [e for e in entries if e is not None]
            found.append(self._side_rows(layout, side, known) if known and len(known) == len(entries) else None)
        return found[0], found[1]

    def summed_heads(self) -> int:
        """How many heads of the queries, or of the keys, each score adds up: axes that only one of the two operands has."""
        if self._score is None:
            return 1
        made: Contraction = self._score.contraction
        alone = [[a for a in made.summed(i) if a not in made.labels[1 - i]] for i in (0, 1)]
        return max(math.prod(made.size(a) for a in axes) for axes in alone)

    def _operand(self, side: int) -> int:
        """The operand of the product that holds the queries (0) or the keys (1)."""
        return side if self.query_side() == 0 else 1 - side

    def _side_rows(self, layout: Layout, side: int, held: Sequence[Tensor] | None = None) -> Tensor | None:
        """One operand as `[batch, heads, position, width]`, or what is `held` in the place of its entries."""
        self.orient(layout)
        operand = self._operand(side)
        rows, offset, index = [], 0, []
        for number, score in enumerate(self._pending.scores):
            made: Contraction = score.contraction
            tensor, axes = made.operands[operand].detach(), list(made.labels[operand])
            tensor = tensor if held is None else held[number]
            kept = [a for a in axes if a in made.output]
            summed = [a for a in axes if a not in made.output]
            rows.append(
                tensor.permute([axes.index(a) for a in [*kept, *summed]]).reshape(
                    -1, math.prod(made.size(a) for a in summed)
                )
            )
            place = torch.arange(offset, offset + rows[-1].shape[0]).reshape(
                [tensor.shape[axes.index(a)] for a in kept]
            )
            offset += rows[-1].shape[0]
            place = place.permute([kept.index(a) for a in made.output if a in kept])
            sizes = iter(place.shape)
            place = place.reshape([next(sizes) if a in kept else 1 for a in made.output])
            index.append(place.expand([made.size(a) for a in made.output]).reshape(score.node.shape))
        placed = self._lookup.from_scores(index) if index else None
        if placed is None or len({r.shape[-1] for r in rows}) != 1:
            return None
        placed = layout.canonical(placed)
        return torch.cat(rows)[placed[..., 0] if side == 0 else placed[..., 0, :]]

    def turned(self, layout: Layout) -> dict[str, Callable[[], Rotation | None]]:
        """The rotations of queries and keys; of products that were joined nothing is told."""
        if len(self._pending.scores) != 1:
            return {}
        found = {}
        for side, name in ((0, "query"), (1, "key")):
            operand = side if self.query_side() == 0 else 1 - side
            laid = self._laid(layout, side)
            if laid is not None:
                found[name] = measured(self._score.operands[operand], laid, self.width())
        return found

    def _laid(self, layout: Layout, side: int) -> Callable[[Tensor], Tensor] | None:
        """Lays something shaped like one operand of the only product out as `[batch, heads, position, width]`."""
        made: Contraction = self._score.contraction
        operand = side if self.query_side() == 0 else 1 - side
        shape, axes = made.operands[operand].shape, list(made.labels[operand])
        kept = [a for a in axes if a in made.output]
        summed = [a for a in axes if a not in made.output]
        number = torch.arange(math.prod(shape[axes.index(a)] for a in kept))
        number = number.reshape([shape[axes.index(a)] for a in kept]).permute(
            [kept.index(a) for a in made.output if a in kept]
        )
        held = iter(number.shape)
        number = number.reshape([next(held) if a in kept else 1 for a in made.output])
        spread = number.expand([made.size(a) for a in made.output]).reshape(self._score.node.shape)
        placed = self._lookup.from_scores([spread])
        if placed is None:
            return None
        placed = layout.canonical(placed)
        chosen = placed[..., 0] if side == 0 else placed[..., 0, :]
        order = [axes.index(a) for a in [*kept, *summed]]
        width = math.prod(shape[i] for i in order[len(kept) :])
        return lambda t: t.reshape(shape).permute(order).reshape(-1, width)[chosen]

    def path_scale(self) -> tuple[float, bool, bool, float | None]:
        """The factor put on q and k before their product; whether a norm or a parameter takes part; a softcap after it."""
        score = self._score
        if score is None:
            return 1.0, False, False, None
        factor, normed, learned = 1.0, False, False
        for node in score.operands:
            f, n, p = path_factor(node)
            factor, normed, learned = factor * f, normed or n, learned or p
        cap, after_learned = softcap_after(self._pending.logits_node, score.node)
        return factor, normed, learned or after_learned, cap
