"""Neighborhood attention: on a grid, each query sees the keys around it, as many at the border as in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, Unpack

import torch
from torch import Tensor

from intently._typing import Bool, Float, Int
from intently.masks import Mask
from intently.mechanism.attention import Stages
from intently.mechanism.door import show
from intently.mechanism.forms.tiles import Tiles, attend_in_tiles, stages_in_tiles
from intently.mechanism.options import TileOptions, TileStageOptions

Border = Literal["inward", "clip"]


def neighborhood_attention(
    query: Float[Tensor, "*lead length width"],
    key: Float[Tensor, "*kv_lead length width"],
    value: Float[Tensor, "*kv_lead length value_width"],
    *,
    grid: int | Sequence[int],
    size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    border: Border = "inward",
    relative: Float[Tensor, "*heads_offsets"] | None = None,
    keep: Bool[Tensor, "*batch key"] | None = None,
    **options: Unpack[TileOptions],
) -> Float[Tensor, "*lead length value_width"]:
    """Each position of a 1-D to 3-D grid attends to `size` positions per axis around itself.

        output_i = Σ_{j ∈ ρ(i)} softmax_{j ∈ ρ(i)}( q_i · k_j / √width + relative[j - i] ) v_j

    ρ(i) is the product over the axes of: `size` steps of `dilation` centred on i (an even size looks one further back
    than ahead). At the border "inward" moves it until it lies inside, so that it keeps its size; "clip" cuts it off.
    A causal axis takes i and the `size - 1` steps before it, and is always cut off at the start.

    Args:
        query, key, value: `[*batch, heads, length, width]`, the grid flattened row-major; grouped heads as in `attention`.
        grid: sizes of the axes; their product is `length`.
        size, dilation, causal: one for all axes, or one per axis.
        border: what happens there; `"clip"` with an odd size is `Mask.neighborhood(grid, size // 2)`.
        relative: `[heads, 2 * size - 1 per axis]`, added to the logit at index (key - query) / dilation + size - 1.
        keep: `[*batch, key]`, False for keys that nobody may see (filler).
        options: `scale`, `softcap`, `sink`, `dropout`, `backend`, as in `attention`.

    Returns:
        `[*batch, heads, length, value_width]`. Time and memory grow with length · size (each query is compared with
        less than 2 · size keys per axis), never with length².

    Raises:
        ValueError: sizes that do not fit the grid or each other; with "inward", `size * dilation` beyond an axis.

    Symbols: `size` is k (L in the first version), `dilation` δ, `relative` B(i, j).

    Equals / differs:
        torch `scaled_dot_product_attention`: equal with the dense mask `neighborhood_mask(...)`, at length² cost.
        `nn.MultiheadAttention`: its core with the inverse of that mask (True = hidden there).
        ONNX `Attention`: equal with that mask as `attn_mask`.
        FlexAttention: equal with a `mask_mod` that computes the borders; blocks follow the flattened order.
        NATTEN `na1d`, `na2d`, `na3d`: the same neighbours; there `[batch, *grid, heads, width]` and no filler.

    Source: Hassani et al. 2022, *Neighborhood Attention Transformer*, arXiv 2204.07143, section 3.1; Hassani and Shi
    2022, *Dilated Neighborhood Attention Transformer*, arXiv 2209.15001, section 3.

    Four tokens in a row, neighbourhoods of three, every score 0: the mean of three values, also at both ends.

    >>> import torch
    >>> nothing, value = torch.zeros(4, 1), torch.tensor([[3.0], [30.0], [300.0], [3000.0]])
    >>> neighborhood_attention(nothing, nothing, value, grid=4, size=3).flatten()
    tensor([ 111.,  111., 1110., 1110.])
    >>> neighborhood_attention(nothing, nothing, value, grid=4, size=3, border="clip").flatten()
    tensor([  16.5000,  111.0000, 1110.0000, 1650.0000])
    """
    around = Neighborhood(grid, size, dilation, causal, border)
    around.admit(query, key, relative)
    tiles = around.tiles(query.device)
    bias = None if relative is None else around.bias(relative, tiles)
    return attend_in_tiles(query, key, value, tiles, bias, keep, **options)


def neighborhood_stages(
    query: Float[Tensor, "*lead length width"],
    key: Float[Tensor, "*kv_lead length width"],
    value: Float[Tensor, "*kv_lead length value_width"],
    *,
    grid: int | Sequence[int],
    size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    border: Border = "inward",
    relative: Float[Tensor, "*heads_offsets"] | None = None,
    keep: Bool[Tensor, "*batch key"] | None = None,
    **options: Unpack[TileStageOptions],
) -> Stages:
    """The stages of `neighborhood_attention`, `[*batch, heads, query, neighbor]`: column n is key `neighbors(...)[i, n]`.

    Arguments and errors are those of `neighborhood_attention`. Each query gathers keys of its own, so memory grows
    with length · size · width here.

    >>> import torch
    >>> nothing = torch.zeros(4, 1)
    >>> neighborhood_stages(nothing, nothing, nothing, grid=4, size=2, causal=True).weights[:2]
    tensor([[0.0000, 1.0000],
            [0.5000, 0.5000]])
    """
    around = Neighborhood(grid, size, dilation, causal, border)
    around.admit(query, key, relative)
    tiles = Tiles.alone(around.neighbors(query.device))
    bias = None if relative is None else around.bias(relative, tiles)
    return stages_in_tiles(query, key, value, tiles, bias, keep, **options)


def neighbors(
    grid: int | Sequence[int],
    size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    border: Border = "inward",
) -> Int[Tensor, "query neighbor"]:
    """Which keys each query sees, as positions in the flattened grid; -1 where a neighbourhood is cut off.

    >>> neighbors(4, 3).tolist()
    [[0, 1, 2], [0, 1, 2], [1, 2, 3], [1, 2, 3]]
    >>> neighbors(4, 2, dilation=2).tolist()
    [[0, 2], [1, 3], [0, 2], [1, 3]]
    >>> neighbors(4, 3, causal=True).tolist()
    [[-1, -1, 0], [-1, 0, 1], [0, 1, 2], [1, 2, 3]]
    """
    return Neighborhood(grid, size, dilation, causal, border).neighbors()


def neighborhood_mask(
    grid: int | Sequence[int],
    size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    border: Border = "inward",
) -> Mask:
    """The same as a `Mask`, length x length: to look at, and for attention that knows masks only.

    >>> neighborhood_mask(4, 3).matrix(4).int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 1]]
    """
    return Mask.explicit(Tiles.alone(neighbors(grid, size, dilation, causal, border)).matrix())


class Neighborhood:
    """Grid, size, dilation, causality and border, one entry per axis, checked against each other."""

    def __init__(
        self,
        grid: int | Sequence[int],
        size: int | Sequence[int],
        dilation: int | Sequence[int] = 1,
        causal: bool | Sequence[bool] = False,
        border: Border = "inward",
    ) -> None:
        self.grid = (grid,) if isinstance(grid, int) else tuple(grid)
        axes = len(self.grid)
        self.size = _per_axis("size", size, axes)
        self.dilation = _per_axis("dilation", dilation, axes)
        self.causal = _per_axis("causal", causal, axes)
        self.border = border
        if not 1 <= axes <= 3 or min(self.grid + self.size + self.dilation) < 1:
            raise ValueError(
                f"neighborhood: grid {self.grid}, size {self.size}, dilation {self.dilation}; "
                "1 to 3 axes and whole numbers from 1 on are needed"
            )
        if border not in ("inward", "clip"):
            raise ValueError(f'neighborhood: border is {border!r}; "inward" or "clip" is needed')
        for axis, (length, width, step, cut) in enumerate(self._axes()):
            if border == "inward" and not cut and width * step > length:
                raise ValueError(
                    f"neighborhood: size {width} · dilation {step} = {width * step} exceeds the {length} positions of "
                    f"axis {axis}, so no neighbourhood can lie inside. A smaller size or dilation, or border='clip'"
                )

    def admit(self, query: Tensor, key: Tensor, relative: Tensor | None) -> None:
        length = prod(self.grid)
        if not query.shape[-2] == key.shape[-2] == length:
            raise ValueError(
                f"neighborhood: the grid {self.grid} has {length} positions, but query is {show(query)} and key "
                f"{show(key)}. Flatten the grid row-major into the second-to-last axis"
            )
        wanted = tuple(2 * each - 1 for each in self.size)
        if relative is not None and tuple(relative.shape[1:]) != wanted:
            raise ValueError(
                f"neighborhood: relative is {show(relative)}; [heads, {', '.join(map(str, wanted))}] is needed: "
                f"2 * size - 1 offsets per axis for size {self.size}"
            )

    def tiles(self, device: torch.device | str | None = None) -> Tiles:
        """The grid in tiles, each with the box of keys around it."""
        tiles: Tiles | None = None
        for axis, (length, size, dilation, _) in enumerate(self._axes()):
            along = Tiles.along(self._first(axis, device), size, dilation)
            tiles = along if tiles is None else tiles.cross(along, length)
        assert tiles is not None
        return tiles

    def neighbors(self, device: torch.device | str | None = None) -> Int[Tensor, "query neighbor"]:
        found = torch.zeros(1, 1, dtype=torch.long, device=device)
        for axis, (length, size, dilation, _) in enumerate(self._axes()):
            step = self._first(axis, device)[:, None] + torch.arange(size, device=device)
            position = step * dilation + torch.arange(length, device=device)[:, None] % dilation
            inside = (position >= 0) & (position < length)
            position = torch.where(inside, position, -1)[None, :, None, :]
            outer = found[:, None, :, None]
            found = torch.where((outer < 0) | (position < 0), -1, outer * length + position).flatten(2).flatten(0, 1)
        return found

    def bias(self, relative: Tensor, tiles: Tiles) -> Float[Tensor, "tile heads query key"]:
        """The entry of the table for each pair of a tile; pairs that do not see each other get any."""
        query, key = tiles.query.clamp(min=0)[:, :, None], tiles.key.clamp(min=0)[:, None, :]
        index, stride = torch.zeros_like(tiles.seen, dtype=torch.long), prod(self.grid)
        for length, size, dilation, _ in self._axes():
            stride //= length
            offset = (key // stride % length - query // stride % length) // dilation
            index = index * (2 * size - 1) + (offset + size - 1).clamp(0, 2 * size - 2)
        return relative.flatten(1)[:, index].movedim(0, 1)

    def _axes(self) -> list[tuple[int, int, int, bool]]:
        return list(zip(self.grid, self.size, self.dilation, self.causal, strict=True))

    def _first(self, axis: int, device: torch.device | str | None) -> Int[Tensor, " length"]:
        """The step (position // dilation) at which the neighbourhood of each position begins."""
        length, size, dilation, causal = self._axes()[axis]
        position = torch.arange(length, device=device)
        first = position // dilation - (size - 1 if causal else size // 2)
        if causal or self.border == "clip":
            return first
        steps = (length - position % dilation + dilation - 1) // dilation  # that its class has on this axis
        return first.clamp(min=0).minimum(steps - size)


def _per_axis(name: str, value, axes: int) -> tuple:
    values = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(values) != axes:
        raise ValueError(f"neighborhood: {name} {values} has {len(values)} entries for {axes} axes of the grid")
    return values
