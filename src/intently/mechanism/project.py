"""Stage 1, project: one set of representations becomes the queries, the keys or the values of every head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from intently._typing import Float


def project(
    states: Float[Tensor, "*batch length model"],
    weight: Float[Tensor, "features model"],
    bias: Float[Tensor, " features"] | None = None,
    *,
    heads: int,
) -> Float[Tensor, "*batch heads length width"]:
    """Map representations into the space of each head: `states @ weight.T + bias`, split into heads.

    Called three times, for queries, keys and values. Where `states` come from decides the role: all three from one
    stream is self-attention, keys and values from another stream is cross-attention.

    Args:
        states: what is looked at, `[*batch, length, model]`.
        weight: `[heads * width, model]`, laid out as in `torch.nn.Linear`; head 0 owns the first `width` rows.
        bias: `[heads * width]`.
        heads: number of heads; for keys and values the number of kv heads.

    Returns:
        `[*batch, heads, length, width]`.

    Raises:
        ValueError: the projected width is no multiple of `heads`.

    Source: Vaswani et al. 2017, section 3.2.2 (W^Q, W^K, W^V).

    >>> import torch
    >>> states = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])                      # one sequence of one token
    >>> project(states, torch.eye(4), heads=2)
    tensor([[[[1., 2.]],
    <BLANKLINE>
             [[3., 4.]]]])
    """
    return split_heads(F.linear(states, weight, bias), heads)


def split_heads(
    merged: Float[Tensor, "*batch length features"], heads: int
) -> Float[Tensor, "*batch heads length width"]:
    """Split the last axis into heads and put the heads before the sequence; undone by `merge_heads`.

    Raises:
        ValueError: the last axis is no multiple of `heads`.

    >>> import torch
    >>> split_heads(torch.zeros(2, 5, 12), heads=4).shape
    torch.Size([2, 4, 5, 3])
    """
    features = merged.shape[-1]
    if heads < 1 or features % heads:
        raise ValueError(
            f"split_heads: {features} features do not split into {heads} heads of equal width; "
            f"the width of a head is features / heads, so choose a number of heads that divides {features}"
        )
    # Splitting first and transposing then: a plain reshape to [heads, length, width] would mix tokens.
    return merged.unflatten(-1, (heads, features // heads)).transpose(-3, -2)
