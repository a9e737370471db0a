"""Dilated and strided attention: on a line, each query sees every d-th key nearby, or the nearest ones and every d-th."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from intently._typing import Bool, Float
from intently.mechanism.door import show
from intently.mechanism.forms.tiles import Tiles, attend_in_parts, attend_in_tiles
from intently.mechanism.options import TileOptions, TileStageOptions


def dilated_attention(
    query: Float[Tensor, "*lead length width"],
    key: Float[Tensor, "*kv_lead length width"],
    value: Float[Tensor, "*kv_lead length value_width"],
    *,
    left: int,
    right: int,
    dilation: int,
    keep: Bool[Tensor, "*batch key"] | None = None,
    **options: Unpack[TileOptions],
) -> Float[Tensor, "*lead length value_width"]:
    """A sliding window with gaps: `left` keys before each query and `right` after it, `dilation` apart.

        output_i = Σ_m softmax_m( q_i · k_{i + m·dilation} / √width ) v_{i + m·dilation},   -left ≤ m ≤ right

    Keys beyond either end are left out. `right=0` is causal; `dilation=1` is a plain window.

    Args:
        query, key, value: `[*batch, heads, length, width]`; grouped heads as in `attention`.
        left, right: how many keys on each side, besides the own.
        dilation: distance between them. For one dilation per head call once per group of heads.
        keep: `[*batch, key]`, False for keys that nobody may see (filler).
        options: `scale`, `softcap`, `sink`, `dropout`, `backend`, as in `attention`.

    Returns:
        `[*batch, heads, length, value_width]`. Time and memory grow with length · (left + 1 + right).

    Raises:
        ValueError: query and key of different lengths; a negative radius; a dilation below 1.

    Symbols: `2 · left = 2 · right` is Longformer's w, `dilation` its d.

    Equals / differs:
        torch `scaled_dot_product_attention`: equal with the mask |i - j| % dilation = 0 within the window, at length² cost.
        `nn.MultiheadAttention`: its core with the inverse of that mask (True = hidden there).
        ONNX `Attention`: equal with that mask as `attn_mask`.
        FlexAttention: equal with a `mask_mod`; a block has gaps then, so blocks are skipped only outside of the window.

    Source: Beltagy et al. 2020, *Longformer*, arXiv 2004.05150, section 3.1 (dilated sliding window).

    Four tokens, every second key, one to each side, every score 0: the means of what is seen.

    >>> import torch
    >>> nothing, value = torch.zeros(4, 1), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> dilated_attention(nothing, nothing, value, left=1, right=1, dilation=2).flatten()
    tensor([ 50.5000, 505.0000,  50.5000, 505.0000])
    """
    if min(left, right) < 0 or dilation < 1:
        raise ValueError(
            f"dilated_attention: left {left}, right {right}, dilation {dilation}; radii from 0 on and a dilation from "
            "1 on are needed"
        )
    length = _length("dilated_attention", query, key)
    first = torch.arange(length, device=query.device) // dilation - left
    return attend_in_tiles(query, key, value, Tiles.along(first, left + 1 + right, dilation), keep=keep, **options)


def strided_attention(
    query: Float[Tensor, "*lead length width"],
    key: Float[Tensor, "*kv_lead length width"],
    value: Float[Tensor, "*kv_lead length value_width"],
    *,
    stride: int,
    keep: Bool[Tensor, "*batch key"] | None = None,
    **options: Unpack[TileStageOptions],
) -> Float[Tensor, "*lead length value_width"]:
    """Causal; each query sees the `stride` latest keys, its own among them, and before those every `stride`-th.

        output_i = Σ_j softmax_j( q_i · k_j / √width ) v_j,   j ≤ i and ( i - j < stride or (i - j) % stride = 0 )

    For text laid out in rows of `stride` positions: the row above up to here, and the column above. Both share one
    softmax (the paper also gives the two parts to different heads or layers).

    Args:
        query, key, value: `[*batch, heads, length, width]`; grouped heads as in `attention`.
        stride: length of the local part and step of the far one; about √length costs least.
        keep: `[*batch, key]`, False for keys that nobody may see (filler).
        options: `scale`, `softcap`, `sink`, `dropout`, as in `attention`.

    Returns:
        `[*batch, heads, length, value_width]`. Time and memory grow with length · (stride + length / stride).

    Raises:
        ValueError: query and key of different lengths; a stride below 1.

    Symbols: `stride` is l; the two parts are A_i^(1) and A_i^(2). The paper's A_i^(1) begins at i - l, which is also in
        A_i^(2); here every key belongs to one part.

    Equals / differs:
        torch `scaled_dot_product_attention`: equal with that dense mask, at length² cost.
        `nn.MultiheadAttention`: its core with the inverse of that mask (True = hidden there).
        ONNX `Attention`: equal with that mask as `attn_mask`.
        FlexAttention: equal with a `mask_mod`, but nearly every causal block holds a key of the far part, so none is skipped.

    Source: Child et al. 2019, *Generating Long Sequences with Sparse Transformers*, arXiv 1904.10509, section 4.3.

    Four tokens, stride 2, every score 0: token 3 sees itself, 2 and 1, and not 0.

    >>> import torch
    >>> nothing, value = torch.zeros(4, 1), torch.tensor([[6.0], [60.0], [600.0], [6000.0]])
    >>> strided_attention(nothing, nothing, value, stride=2).flatten()       # 6/1, 66/2, 666/3, 6660/3
    tensor([   6.,   33.,  222., 2220.])
    """
    if stride < 1:
        raise ValueError(f"strided_attention: stride is {stride}; 1 or more is needed")
    length = _length("strided_attention", query, key)
    position = torch.arange(length, device=query.device)
    near = Tiles.along(position - (stride - 1), stride)
    return attend_in_parts(query, key, value, [near, _column(length, stride, query.device)], keep, **options)


def _column(length: int, stride: int, device: torch.device) -> Tiles:
    """One tile per residue of `stride`, in which each query sees the earlier ones and not itself: that key is near."""
    rows = -(-length // stride)
    position = torch.arange(rows, device=device) * stride + torch.arange(stride, device=device)[:, None]
    position = torch.where(position < length, position, -1)
    earlier = torch.ones(rows, rows, dtype=torch.bool, device=device).tril(-1)
    return Tiles(position, position, earlier & (position >= 0)[:, :, None])


def _length(form: str, query: Tensor, key: Tensor) -> int:
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{form}: {query.shape[-2]} queries but {key.shape[-2]} keys: query {show(query)}, key {show(key)}. Distances "
            "are counted within one sequence; for a cache use attention(..., mask=...) with a mask that is aligned"
        )
    return query.shape[-2]
