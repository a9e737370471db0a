"""Queries in tiles, each tile with the few keys that its queries may see: how the sparse forms stay linear in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from intently._typing import Bool, Float, Int
from intently.mechanism.aggregate import aggregate
from intently.mechanism.attention import Stages, attention, stages
from intently.mechanism.door import Inputs, admit, own_precision
from intently.mechanism.mask_scale import mask_scale
from intently.mechanism.normalize import normalize
from intently.mechanism.options import TileOptions, TileStageOptions
from intently.mechanism.score import score


@dataclass(frozen=True, eq=False)
class Tiles:
    """Every query in exactly one tile; -1 fills places that nobody takes.

    >>> import torch
    >>> tiles = Tiles.along(torch.arange(4) - 1, size=2)         # each sees itself and the one before, in tiles of two
    >>> tiles.query.tolist(), tiles.key.tolist()
    ([[0, 1], [2, 3]], [[-1, 0, 1], [1, 2, 3]])
    >>> tiles.matrix().int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """

    query: Int[Tensor, "tile query"]
    key: Int[Tensor, "tile key"]
    seen: Bool[Tensor, "tile query key"]

    @staticmethod
    def along(first: Int[Tensor, " length"], size: int, dilation: int = 1) -> Tiles:
        """Tiles of an axis on which query i sees `size` keys from step `first[i]` on, `dilation` apart.

        Position p is step p // dilation of class p % dilation, and sees only its own class; steps that lie outside of
        the axis are seen by nobody. `first` must rise by 0 or 1 from one step of a class to the next.
        """
        length, device = len(first), first.device
        steps = -(-length // dilation)
        height = max(1, min(size, steps))  # as many queries as each sees keys: the key box is then at most twice that
        kind = torch.arange(dilation, device=device)[:, None, None]
        step = torch.arange(-(-steps // height) * height, device=device).view(1, -1, height)
        query = _inside(step * dilation + kind, length).flatten(0, 1)
        kind = kind.expand(-1, step.shape[1], -1).flatten(0, 1)
        start = first[query.clamp(min=0)]
        box = start[:, :1] + torch.arange(height + size - 1, device=device)
        key = _inside(box * dilation + kind, length)
        ahead = box[:, None, :] - start[:, :, None]
        seen = (ahead >= 0) & (ahead < size) & (query >= 0)[:, :, None] & (key >= 0)[:, None, :]
        return Tiles(query, key, seen)

    @staticmethod
    def alone(keys: Int[Tensor, "query key"]) -> Tiles:
        """Every query in a tile of its own, with its keys: what is wanted when each weight is to be looked at."""
        return Tiles(torch.arange(len(keys), device=keys.device)[:, None], keys, (keys >= 0)[:, None, :])

    def cross(self, columns: Tiles, length: int) -> Tiles:
        """Tiles of a row-major grid from the tiles of its rows (self) and of its columns, `length` of them."""

        def join(outer: Tensor, inner: Tensor) -> Tensor:
            outer, inner = outer[:, None, :, None], inner[None, :, None, :]
            nobody = (outer < 0) | (inner < 0)
            return torch.where(nobody, -1, outer * length + inner).flatten(2).flatten(0, 1)

        seen = self.seen[:, None, :, None, :, None] & columns.seen[None, :, None, :, None, :]
        return Tiles(
            join(self.query, columns.query),
            join(self.key, columns.key),
            seen.flatten(4).flatten(2, 3).flatten(0, 1),
        )

    def take(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value with a tile axis before the heads."""
        return self.take_queries(inputs.query), self.take_keys(inputs.key), self.take_keys(inputs.value)

    def take_queries(self, states: Float[Tensor, "*batch heads length width"]) -> Tensor:
        """`[*batch, tile, heads, query, width]`."""
        return _take(states, self.query)

    def take_keys(self, states: Float[Tensor, "*batch heads length width"]) -> Tensor:
        """`[*batch, tile, heads, key, width]`."""
        return _take(states, self.key)

    def per_query(self, results: Float[Tensor, "*batch tile heads query any"], length: int) -> Tensor:
        """The results of all tiles in the order of the queries, `[*batch, heads, length, any]`; undoes `take_queries`."""
        order = self.query.flatten().argsort()
        return results.movedim(-4, -3).flatten(-3, -2).index_select(-2, order[order.numel() - length :])

    def mask(self, keep: Bool[Tensor, "*batch key"] | None = None) -> Bool[Tensor, "*batch tile 1 query key"]:
        """What each tile sees, less the keys that are not to be kept."""
        seen = self.seen[:, None]
        return seen if keep is None else seen & keep[..., self.key.clamp(min=0)][..., None, None, :]

    def matrix(self) -> Bool[Tensor, "query key"]:
        """The whole matrix, to look at and to compare with."""
        tile, row, column = self.seen.nonzero(as_tuple=True)
        length = int((self.query >= 0).sum())
        matrix = torch.zeros(length, length, dtype=torch.bool, device=self.seen.device)
        matrix[self.query[tile, row], self.key[tile, column]] = True
        return matrix


def attend_in_tiles(
    query: Float[Tensor, "*lead length width"],
    key: Float[Tensor, "*kv_lead length width"],
    value: Float[Tensor, "*kv_lead length value_width"],
    tiles: Tiles,
    bias: Float[Tensor, "tile heads query key"] | None = None,
    keep: Bool[Tensor, "*batch key"] | None = None,
    **options: Unpack[TileOptions],
) -> Float[Tensor, "*lead length value_width"]:
    """`attention` with the mask `tiles.matrix()`, one tile as one sample, so that nothing of length x length is made."""
    inputs = admit(query, key, value)
    output = attention(*tiles.take(inputs), mask=tiles.mask(keep), bias=bias, **options)
    return inputs.leave(tiles.per_query(output, inputs.query.shape[-2]))


def stages_in_tiles(
    query: Float[Tensor, "*lead length width"],
    key: Float[Tensor, "*kv_lead length width"],
    value: Float[Tensor, "*kv_lead length value_width"],
    tiles: Tiles,
    bias: Float[Tensor, "tile heads query key"] | None = None,
    keep: Bool[Tensor, "*batch key"] | None = None,
    **options: Unpack[TileStageOptions],
) -> Stages:
    """What `attend_in_tiles` computes on its way; column c of a row is entry c of `tiles.key`, not key c."""
    inputs = admit(query, key, value)
    seen = stages(*tiles.take(inputs), mask=tiles.mask(keep), bias=bias, **options)
    return Stages(*(inputs.leave(tiles.per_query(each, inputs.query.shape[-2])) for each in seen))


def attend_in_parts(
    query: Float[Tensor, "*lead length width"],
    key: Float[Tensor, "*kv_lead length width"],
    value: Float[Tensor, "*kv_lead length value_width"],
    parts: Sequence[Tiles],
    keep: Bool[Tensor, "*batch key"] | None = None,
    **options: Unpack[TileStageOptions],
) -> Float[Tensor, "*lead length value_width"]:
    """One softmax over keys that no one tiling holds: each part brings its own; a key is to be seen in one part only."""
    with own_precision(query):
        inputs = admit(query, key, value, **options)
        length = inputs.query.shape[-2]
        taken = [part.take(inputs) for part in parts]
        logits = [
            part.per_query(
                mask_scale(score(ours, theirs), scale=inputs.scale, softcap=inputs.softcap, mask=part.mask(keep)),
                length,
            )
            for part, (ours, theirs, _) in zip(parts, taken, strict=True)
        ]
        weights = normalize(torch.cat(logits, dim=-1), inputs.sink)
        shares = weights.split([each.shape[-1] for each in logits], dim=-1)
        # The parts are added before they are rounded: in half precision the sum would otherwise be rounded twice.
        outputs = [
            part.per_query(
                aggregate(part.take_queries(share), values.to(weights.dtype), dropout=inputs.dropout), length
            )
            for part, share, (_, _, values) in zip(parts, shares, taken, strict=True)
        ]
        return inputs.leave(torch.stack(outputs).sum(dim=0).to(value.dtype))


def _inside(position: Tensor, length: int) -> Tensor:
    return torch.where((position >= 0) & (position < length), position, -1)


def _take(states: Tensor, positions: Tensor) -> Tensor:
    taken = states.index_select(-2, positions.clamp(min=0).flatten())
    return taken.unflatten(-2, tuple(positions.shape)).movedim(-3, -4)
