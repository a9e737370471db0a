"""Stage 5, aggregate: each query receives the mixture of values that its weights name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from intently._typing import Float


def aggregate(
    weights: Float[Tensor, "*batch heads query key"],
    value: Float[Tensor, "*batch kv_heads key value_width"],
    *,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch heads query value_width"]:
    """Weighted sum of the values, head by head; query head h reads kv head `h // group`, as in `score`.

    Args:
        weights: `[*batch, heads, query, key]`.
        value: `[*batch, kv_heads, key, value_width]`; its width need not be that of the keys.
        dropout: probability of dropping a weight. A pure function knows no training mode: pass 0 in evaluation.

    Returns:
        `[*batch, heads, query, value_width]` in the dtype of the values.

    Source: Vaswani et al. 2017, equation 1 (softmax(...) V).

    >>> import torch
    >>> aggregate(torch.tensor([[[0.25, 0.75]]]), torch.tensor([[[10.0], [20.0]]]))
    tensor([[[17.5000]]])
    """
    if dropout:
        weights = F.dropout(weights, dropout)
    grouped = weights.unflatten(-3, (value.shape[-3], weights.shape[-3] // value.shape[-3]))
    mixed = torch.einsum("...hgqk,...hkv->...hgqv", grouped, value.to(weights.dtype))
    return mixed.flatten(-4, -3).to(value.dtype)


def merge_heads(output: Float[Tensor, "*batch heads query width"]) -> Float[Tensor, "*batch query features"]:
    """Concatenate the heads of every position, head 0 first; undoes `split_heads`.

    >>> import torch
    >>> merge_heads(torch.zeros(2, 4, 5, 3)).shape
    torch.Size([2, 5, 12])
    """
    return output.transpose(-3, -2).flatten(-2)
