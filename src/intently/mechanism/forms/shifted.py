"""Shifted windows: a grid cut into windows that keep to themselves, and cut elsewhere in every other layer."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from intently._typing import Bool, Float, Int
from intently.masks import Mask
from intently.mechanism.attention import attention
from intently.mechanism.door import admit, show
from intently.mechanism.options import TileOptions


def shifted_window_attention(
    query: Float[Tensor, "*lead length width"],
    key: Float[Tensor, "*kv_lead length width"],
    value: Float[Tensor, "*kv_lead length value_width"],
    *,
    grid: Sequence[int],
    window: Sequence[int],
    shift: Sequence[int],
    bias: Float[Tensor, "heads token token"] | None = None,
    keep: Bool[Tensor, "*batch key"] | None = None,
    **options: Unpack[TileOptions],
) -> Float[Tensor, "*lead length value_width"]:
    """Each position of the grid attends within its window; `shift` moves the cuts between the windows.

        output_i = Σ_{j ∈ window(i)} softmax_{j ∈ window(i)}( q_i · k_j / √width + bias[i, j] ) v_j

    The grid is rolled by -shift, cut into windows, and rolled back afterwards. The roll brings positions from both ends
    of an axis into one window; a mask keeps those apart. A grid that the window does not divide is padded first; pads
    are seen by nobody.

    Args:
        query, key, value: `[*batch, heads, length, width]`, the grid flattened row-major; grouped heads as in `attention`.
        grid, window, shift: one entry per axis, any number of axes; `shift` from 0 to window - 1.
        bias: `[heads, token, token]` for the pairs of one window, the same in all (`relative_position_bias` makes one).
        keep: `[*batch, key]`, False for keys that nobody may see (filler).
        options: `scale`, `softcap`, `sink`, `dropout`, `backend`, as in `attention`.

    Returns:
        `[*batch, heads, length, value_width]`. Time and memory grow with length · tokens of a window.

    Raises:
        ValueError: entries per axis that do not fit, or a grid of another length than the sequence.

    Symbols: `window` is M, `shift` ⌊M/2⌋ in every other layer and 0 between, `bias` B = B̂[relative position].

    Equals / differs:
        torch `scaled_dot_product_attention`: equal with the dense mask `shifted_windows(...)`, at length² cost.
        `nn.MultiheadAttention`: its core with the inverse of that mask (True = hidden there).
        ONNX `Attention`: equal with that mask as `attn_mask`.
        FlexAttention: equal with the `mask_mod` of `shifted_windows(...)`.
        Swin's own code: adds -100 in place of hiding, lets pads be seen, as tokens whose key is the projection's bias,
            and takes shift 0 and a smaller window where one window covers the grid; here what is passed is done.

    Source: Liu et al. 2021, *Swin Transformer*, arXiv 2103.14030, section 3.2, equation 4.

    Four tokens in a row, windows of two, every score 0: without a shift pairs are averaged; with a shift of one the
    pair is 1 and 2, and the ends, wrapped into one window, keep to themselves.

    >>> import torch
    >>> nothing, value = torch.zeros(4, 1), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> shifted_window_attention(nothing, nothing, value, grid=[4], window=[2], shift=[0]).flatten()
    tensor([  5.5000,   5.5000, 550.0000, 550.0000])
    >>> shifted_window_attention(nothing, nothing, value, grid=[4], window=[2], shift=[1]).flatten()
    tensor([   1.,   55.,   55., 1000.])
    """
    inputs = admit(query, key, value)
    for name, states in (("query", inputs.query), ("key", inputs.key)):
        if states.shape[-2] != prod(grid):
            raise ValueError(
                f"shifted_window_attention: the grid {tuple(grid)} has {prod(grid)} positions, but {name} is "
                f"{show(states)}. Flatten the grid row-major into the second-to-last axis"
            )
    seen = window_mask(grid, window, shift, device=query.device)[:, None]
    if keep is not None:
        seen = seen & partition(keep[..., None], grid, window, shift)[..., None, None, :, 0]
    # A window is a sample: [*batch, heads, window, token, width] becomes [*batch, window, heads, token, width].
    cut = [partition(each, grid, window, shift).transpose(-4, -3) for each in (inputs.query, inputs.key, inputs.value)]
    output = attention(*cut, mask=seen, bias=bias, **options)
    return inputs.leave(merge(output.transpose(-4, -3), grid, window, shift))


def partition(
    states: Float[Tensor, "*any length width"], grid: Sequence[int], window: Sequence[int], shift: Sequence[int]
) -> Float[Tensor, "*any window token width"]:
    """Pad the grid to whole windows (with 0), roll it by -shift, cut it into windows; undone by `merge`.

    >>> import torch
    >>> partition(torch.arange(4)[:, None], [4], [2], [1])[..., 0].tolist()
    [[1, 2], [3, 0]]
    """
    _check(grid, window, shift)
    counts = _counts(grid, window)
    axes = len(counts)
    states = states.unflatten(-2, tuple(grid))
    gaps = [count * size - length for count, size, length in zip(counts, window, grid, strict=True)]
    states = F.pad(states, [0, 0] + [each for gap in reversed(gaps) for each in (0, gap)]) if any(gaps) else states
    if any(shift):
        states = states.roll([-each for each in shift], _grid_axes(axes))
    pairs = [size for pair in zip(counts, window, strict=True) for size in pair]
    states = states.reshape(*states.shape[: -axes - 1], *pairs, states.shape[-1])
    first = states.dim() - 1 - 2 * axes
    order = [*range(first), *range(first, first + 2 * axes, 2), *range(first + 1, first + 2 * axes, 2), -1]
    return states.permute(order).reshape(*states.shape[:first], prod(counts), prod(window), states.shape[-1])


def merge(
    states: Float[Tensor, "*any window token width"], grid: Sequence[int], window: Sequence[int], shift: Sequence[int]
) -> Float[Tensor, "*any length width"]:
    """Put the windows back together, roll by shift, cut off the pads; undoes `partition`."""
    _check(grid, window, shift)
    counts = _counts(grid, window)
    axes = len(counts)
    lead, width = states.shape[:-3], states.shape[-1]
    states = states.reshape(*lead, *counts, *window, width)
    first = len(lead)
    pairs = [place for axis in range(axes) for place in (first + axis, first + axes + axis)]
    padded = [count * size for count, size in zip(counts, window, strict=True)]
    states = states.permute(*range(first), *pairs, -1).reshape(*lead, *padded, width)
    if any(shift):
        states = states.roll(list(shift), _grid_axes(axes))
    for axis, length in zip(_grid_axes(axes), grid, strict=True):
        states = states.narrow(axis, 0, length)
    return states.flatten(-1 - axes, -2)


def regions(
    grid: Sequence[int], window: Sequence[int], shift: Sequence[int], *, device: torch.device | str | None = None
) -> Int[Tensor, " length"]:
    """A number per position: positions with the same number see each other, no others do.

    >>> regions([4], [2], [1]).tolist()                                  # cut between 0 and 1, and between 2 and 3
    [0, 1, 1, 2]
    """
    _check(grid, window, shift)
    number = torch.zeros(1, dtype=torch.long, device=device)
    for length, size, offset in zip(grid, window, shift, strict=True):
        # Unrolled, the cuts lie at offset, offset + size, …; what lies before the first one was wrapped to the end.
        along = (torch.arange(length, device=device) - offset + size) // size
        number = (number[:, None] * (-(-length // size) + 1) + along).flatten()
    return number


def shifted_windows(grid: Sequence[int], window: Sequence[int], shift: Sequence[int]) -> Mask:
    """What `shifted_window_attention` lets each position see, as a `Mask` over the whole grid.

    >>> shifted_windows([4], [2], [1]).matrix(4).int().tolist()
    [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    """
    return Mask.documents(ids=regions(grid, window, shift))


def window_mask(
    grid: Sequence[int], window: Sequence[int], shift: Sequence[int], *, device: torch.device | str | None = None
) -> Bool[Tensor, "window token token"]:
    """Within each window of the rolled grid, which token may see which: those of one region, and never a pad.

    >>> window_mask([4], [2], [1]).int().tolist()
    [[[1, 1], [1, 1]], [[1, 0], [0, 1]]]
    """
    number = partition(regions(grid, window, shift, device=device)[:, None] + 1, grid, window, shift)[..., 0]
    return (number[:, :, None] == number[:, None, :]) & (number > 0)[:, None, :]


def relative_position_index(
    window: Sequence[int], *, device: torch.device | str | None = None
) -> Int[Tensor, "token token"]:
    """Row of the bias table for each pair of a window: the offset query - key, counted row-major from the lowest.

    >>> relative_position_index([3]).tolist()
    [[2, 1, 0], [3, 2, 1], [4, 3, 2]]
    """
    index, stride = torch.zeros(prod(window), prod(window), dtype=torch.long, device=device), prod(window)
    token = torch.arange(prod(window), device=device)
    for size in window:
        stride //= size
        place = token // stride % size
        index = index * (2 * size - 1) + place[:, None] - place + size - 1
    return index


def relative_position_bias(
    table: Float[Tensor, "offset heads"], window: Sequence[int]
) -> Float[Tensor, "heads token token"]:
    """The bias of every pair of a window, from a table with one row per offset, as Swin stores it.

    Raises:
        ValueError: a table with another number of rows than the window has offsets, the product of 2 * size - 1.

    >>> import torch
    >>> relative_position_bias(torch.tensor([[0.5], [0.0], [-0.5]]), [2])    # one head, a window of two
    tensor([[[ 0.0000,  0.5000],
             [-0.5000,  0.0000]]])
    """
    offsets = prod(2 * size - 1 for size in window)
    if table.dim() != 2 or table.shape[0] != offsets:
        raise ValueError(
            f"relative_position_bias: the table is {show(table)}; a window {tuple(window)} has {offsets} offsets, so "
            f"[{offsets}, heads] is needed"
        )
    return table[relative_position_index(window, device=table.device)].movedim(-1, 0)


def _check(grid: Sequence[int], window: Sequence[int], shift: Sequence[int]) -> None:
    fits = len(grid) == len(window) == len(shift) > 0 and min(*grid, *window) > 0
    if not fits or any(not 0 <= each < size for each, size in zip(shift, window, strict=True)):
        raise ValueError(
            f"shifted windows: grid {tuple(grid)}, window {tuple(window)}, shift {tuple(shift)}; one entry per axis is "
            "needed, sizes from 1 on and shifts from 0 to window - 1"
        )


def _counts(grid: Sequence[int], window: Sequence[int]) -> list[int]:
    return [-(-length // size) for length, size in zip(grid, window, strict=True)]


def _grid_axes(axes: int) -> tuple[int, ...]:
    """The axes of `[..., *grid, width]` that are the grid."""
    return tuple(range(-1 - axes, -1))
