"""Shifted windows as a layer: routing on a grid, window by window, with a learned bias for every offset."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from intently._typing import Float
from intently.mechanism.attention import stages
from intently.mechanism.backends.stages import Stages
from intently.mechanism.forms.shifted import relative_position_bias, shifted_window_attention, shifted_windows
from intently.mechanism.options import Backend


class AttendShiftedWindows(nn.Module):
    """Takes the place of `Attend` in a `MultiHeadAttention` whose states are a grid, flattened row-major.

    Args:
        heads: number of query heads, each with a bias of its own.
        grid, window, shift: one entry per axis; a shift of half a window in every other layer, 0 between.
        dropout: probability of dropping a weight, in training mode only.
        backend: as in `attention`.

    Attributes:
        table: `[offset, heads]`, a logit for every offset query - key within a window; Swin's
            `relative_position_bias_table`.

    Source: Liu et al. 2021, *Swin Transformer*, arXiv 2103.14030, section 3.2.

    >>> import torch
    >>> from intently.mechanism.layers import MultiHeadAttention
    >>> layer = MultiHeadAttention(8, heads=2, attend=AttendShiftedWindows(2, grid=[4, 6], window=[2, 3], shift=[1, 1]))
    >>> layer(torch.randn(1, 24, 8)).shape
    torch.Size([1, 24, 8])
    """

    def __init__(
        self,
        heads: int,
        *,
        grid: Sequence[int],
        window: Sequence[int],
        shift: Sequence[int],
        dropout: float = 0.0,
        backend: Backend = "auto",
    ):
        super().__init__()
        self.grid, self.window, self.shift = tuple(grid), tuple(window), tuple(shift)
        self.dropout = dropout
        self.backend: Backend = backend
        self.table = nn.Parameter(torch.zeros(prod(2 * size - 1 for size in window), heads))

    def forward(
        self,
        query: Float[Tensor, "*batch heads length width"],
        key: Float[Tensor, "*batch kv_heads length width"],
        value: Float[Tensor, "*batch kv_heads length value_width"],
        *,
        mask: None = None,
        bias: None = None,
        query_start: int = 0,
        key_start: int = 0,
    ) -> Float[Tensor, "*batch heads length value_width"]:
        """Route within the windows.

        Raises:
            ValueError: a mask, a bias or a cache, for which windows have no place; or a grid of another length.
        """
        _refuse(mask, bias, query_start, key_start)
        return shifted_window_attention(
            query,
            key,
            value,
            grid=self.grid,
            window=self.window,
            shift=self.shift,
            bias=relative_position_bias(self.table, self.window),
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )

    def stages(
        self,
        query: Float[Tensor, "*batch heads length width"],
        key: Float[Tensor, "*batch kv_heads length width"],
        value: Float[Tensor, "*batch kv_heads length value_width"],
        *,
        mask: None = None,
        bias: None = None,
        query_start: int = 0,
        key_start: int = 0,
    ) -> Stages:
        """The stages over the whole grid, `[*batch, heads, length, length]`, hidden outside the windows."""
        _refuse(mask, bias, query_start, key_start)
        return stages(
            query, key, value, mask=shifted_windows(self.grid, self.window, self.shift), bias=self._everywhere()
        )

    def _everywhere(self) -> Float[Tensor, "heads length length"]:
        """The bias of every pair of the grid; offsets that no window holds are hidden anyway and get any."""
        place, row = torch.arange(prod(self.grid), device=self.table.device), torch.zeros((), dtype=torch.long)
        row, stride = row.to(place.device), prod(self.grid)
        for length, size in zip(self.grid, self.window, strict=True):
            stride //= length
            along = place // stride % length
            offset = (along[:, None] - along).clamp(1 - size, size - 1)
            row = row * (2 * size - 1) + offset + size - 1
        return self.table[row].movedim(-1, 0)

    def extra_repr(self) -> str:
        return f"grid={self.grid}, window={self.window}, shift={self.shift}"


def _refuse(mask: object, bias: object, query_start: int, key_start: int) -> None:
    given = {"mask": mask, "bias": bias, "a cache": query_start or key_start or None}
    for name, what in given.items():
        if what is not None:
            raise ValueError(
                f"AttendShiftedWindows: {name} is given; the windows, their shift and the table say it all"
            )
