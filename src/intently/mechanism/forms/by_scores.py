"""Attention by scores of any kind: where the match is no dot product, the scores themselves are handed over."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from intently._typing import Float
from intently.mechanism.attention import attention
from intently.mechanism.door import Bias
from intently.mechanism.options import BiaslessOptions


def attention_by_scores(
    scores: Float[Tensor, "*lead query key"],
    value: Float[Tensor, "*lead key value_width"],
    *,
    bias: Float[Tensor, "*bias_axes"] | Bias | None = None,
    **options: Unpack[BiaslessOptions],
) -> Float[Tensor, "*lead query value_width"]:
    """For each query, the mean of the values, weighted by the softmax of its scores over the keys it may see.

        output = softmax over keys (scores + bias, -∞ where the mask is False) · value

    A dot product of zeros with a bias is that bias, so this is `attention` with the scores as bias, in any backend that
    takes one.

    Args:
        scores: `[*batch, heads, query, key]`, or with fewer than 4 axes `[*batch, query, key]`; not scaled here.
        value: `[*batch, heads, key, value_width]` or `[*batch, key, value_width]`.
        bias: added to the scores, as in `attention`.
        options: `mask`, `sink`, `dropout`, `backend`, as in `attention`.

    Returns:
        `[*batch, heads, query, value_width]` or `[*batch, query, value_width]`, in the dtype of the values.

    Raises:
        TypeError, ValueError: as in `attention`.

    >>> import torch
    >>> value = torch.tensor([[[1.0], [10.0], [100.0], [1000.0]]])
    >>> scores = torch.tensor([[[0.0, 0.0, 3.0, 0.0]]]).log()                # only key 2 has a share
    >>> attention_by_scores(scores, value)
    tensor([[[100.]]])
    """
    nothing = value.new_zeros(*scores.shape[:-1], 1), value.new_zeros(*value.shape[:-1], 1)
    if bias is not None:
        if not isinstance(bias, Tensor):
            queries, keys = (torch.arange(length, device=scores.device) for length in scores.shape[-2:])
            bias = bias(queries[:, None], keys)
        scores = scores + bias
    return attention(*nothing, value, bias=scores, scale=1.0, **options)


def at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Half precision as float32, for scores whose terms would overflow or lose digits in it; others as they are."""
    return tuple(each.to(torch.promote_types(each.dtype, torch.float32)) for each in tensors)
