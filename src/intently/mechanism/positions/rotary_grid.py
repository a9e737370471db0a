"""Rotary positions on a grid: some pairs turn with the row, others with the column (and the frame, for video)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from intently._typing import Int, Shaped
from intently.mechanism.door import show
from intently.mechanism.positions.rotary import Angles, check_positions, rotary_frequencies, widest

Frequencies = Literal["shared", "alternating"]


def grid_angles(
    places: Shaped[Tensor, "*batch length axes"],
    width: int,
    *,
    base: float = 10000.0,
    frequencies: Frequencies = "shared",
    dtype: torch.dtype = torch.float32,
) -> Angles:
    """Axial rotary angles: the first pairs turn with the first coordinate, the next with the second, and so on.

    With A axes and n = width / 2A pairs for each, pair `a n + p` turns by `places[a] * θ`:

    - `"shared"`: θ = base ** (-2p / (width/A)), the same for every axis (Qwen2-VL's vision tower; EVA-02, whose
      positions are rescaled and whose layout is interleaved).
    - `"alternating"`: θ = base ** (-2(A p + a) / width), the frequencies of the whole head dealt out in turn (Pixtral).

    Scores then depend on the differences of rows and of columns alone. Apply them with `rotate` in the layout of the
    model; Qwen2-VL and Pixtral: half, over the whole width of the head.

    Args:
        places: `[*batch, length, axes]`, coordinates of each token, such as row and column from `grid_places`.
        width: rotated features of a head, a multiple of 2 · axes.
        base, dtype: as in `rotary_angles`.
        frequencies: how they are shared out, see above.

    Returns:
        `Angles(cos, sin)`, each `[*batch, length, width/2]`.

    Raises:
        TypeError, ValueError: places in half precision, or a width that the axes cannot share.

    Symbols: places = (x, y) of each patch, θ as in `rotary_frequencies`.

    Equals / differs: as `rotate`: torch, ONNX `Attention` and FlexAttention expect it done; ONNX `RotaryEmbedding` can
    apply these angles, but has no axes of its own.

    Source: Fang et al. 2023, EVA-02, arXiv 2303.11331; Wang et al. 2024, Qwen2-VL, arXiv 2409.12191; Agrawal et al.
    2024, Pixtral 12B, arXiv 2410.07073 (and the published code of the last two).

    Four tokens on a grid of 2 × 2, width 4, so one pair each: pair 0 turns with the row, pair 1 with the column.

    >>> import torch
    >>> grid_angles(grid_places(2, 2), 4).sin
    tensor([[0.0000, 0.0000],
            [0.0000, 0.8415],
            [0.8415, 0.0000],
            [0.8415, 0.8415]])
    """
    check_positions("grid_angles", places)
    if places.dim() < 2:
        raise ValueError(f"grid_angles: places are {show(places)}; [*batch, length, axes] is needed, as of grid_places")
    axes = places.shape[-1]
    if width < 2 * axes or width % (2 * axes):
        raise ValueError(
            f"grid_angles: width {width} cannot be shared by {axes} axes in pairs; a multiple of {2 * axes} is needed "
            f"(places {show(places)}: the last axis holds the coordinates)"
        )
    if frequencies == "shared":
        turns_by = rotary_frequencies(width // axes, base, device=places.device).expand(axes, -1)
    elif frequencies == "alternating":
        turns_by = rotary_frequencies(width, base, device=places.device).view(-1, axes).mT
    else:
        raise ValueError(f'grid_angles: frequencies is {frequencies!r}; "shared" or "alternating" is needed')
    turns = (places.to(turns_by.dtype).unsqueeze(-1) * turns_by).flatten(-2)
    dtype = torch.promote_types(dtype, torch.float32)
    return Angles(turns.cos().to(dtype), turns.sin().to(dtype))


def sectioned_angles(
    places: Shaped[Tensor, "*batch length axes"],
    sections: Sequence[int],
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
) -> Angles:
    """Multimodal rotary angles: one run of frequencies for the whole head, cut into a section of pairs per coordinate.

    Pair p turns by `places[a] * base ** (-2p / width)`, a = the section that p falls into, width = 2 · sum(sections).
    A token of text has all coordinates alike, and gets the angles of `rotary_angles`. The first section holds the fast
    frequencies, so coordinates are not treated alike. (Later models deal the pairs out in turn instead.)

    Args:
        places: `[*batch, length, axes]`, for Qwen2-VL frame, row and column.
        sections: number of pairs for each coordinate, `mrope_section`; Qwen2-VL: (16, 24, 24).
        base, dtype: as in `rotary_angles`.

    Returns:
        `Angles(cos, sin)`, each `[*batch, length, sum(sections)]`.

    Raises:
        TypeError, ValueError: places in half precision; not one section per coordinate.

    Source: Wang et al. 2024, Qwen2-VL, arXiv 2409.12191, section 2.1 (M-RoPE); its published code (the sections).

    >>> import torch
    >>> sectioned_angles(torch.tensor([[1, 0, 0], [0, 1, 1]]), (1, 1, 1), base=1e3).sin
    tensor([[0.8415, 0.0000, 0.0000],
            [0.0000, 0.0998, 0.0100]])
    """
    check_positions("sectioned_angles", places)
    if places.dim() < 2 or places.shape[-1] != len(sections):
        raise ValueError(
            f"sectioned_angles: {len(sections)} sections {tuple(sections)} for places {show(places)}; "
            "[*batch, length, axes] with one section per axis is needed"
        )
    axis = torch.arange(len(sections), device=places.device)
    axis = axis.repeat_interleave(torch.tensor(sections, device=places.device), output_size=sum(sections))
    exact = widest(places.device)
    turns = places.to(exact)[..., axis] * rotary_frequencies(2 * sum(sections), base, device=places.device)
    dtype = torch.promote_types(dtype, torch.float32)
    return Angles(turns.cos().to(dtype), turns.sin().to(dtype))


def grid_places(rows: int, columns: int, *, device: torch.device | str | None = None) -> Int[Tensor, "length axes"]:
    """Row and column of every patch of a picture read line by line, int64 `[rows * columns, 2]`.

    >>> grid_places(2, 2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    row, column = torch.arange(rows, device=device), torch.arange(columns, device=device)
    return torch.cartesian_prod(row, column)
