"""Stage 2, score: how well each query matches each key."""

from __future__ import annotations

import torch
from torch import Tensor

from intently._typing import Float


def score(
    query: Float[Tensor, "*batch heads query width"],
    key: Float[Tensor, "*batch kv_heads key width"],
) -> Float[Tensor, "*batch heads query key"]:
    """Dot product of every query with every key, head by head, neither scaled nor masked.

    Query head h reads kv head `h // group`, `group = heads / kv_heads`: consecutive query heads share a kv head.
    Half precision is raised to float32 here: in float16 a raw product of width 64 overflows once entries reach 32.

    Args:
        query: `[*batch, heads, query, width]`.
        key: `[*batch, kv_heads, key, width]`, `heads` a multiple of `kv_heads`.

    Returns:
        `[*batch, heads, query, key]`, float32 for half precision, else the dtype of the query.

    Source: Vaswani et al. 2017, equation 1 (Q Kᵀ); Ainslie et al. 2023, arXiv 2305.13245 (grouped heads).

    >>> import torch
    >>> query = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])                   # two query heads, one token each
    >>> key = torch.tensor([[[3.0, 5.0], [7.0, 9.0]]])                       # one kv head, two tokens
    >>> score(query, key)
    tensor([[[3., 7.]],
    <BLANKLINE>
            [[5., 9.]]])
    """
    if query.dtype in (torch.float16, torch.bfloat16):
        query, key = query.float(), key.float()
    # Naming the group as an axis of its own lets einsum share each key without copying it for every query head.
    grouped = query.unflatten(-3, (key.shape[-3], query.shape[-3] // key.shape[-3]))
    return torch.einsum("...hgqw,...hkw->...hgqk", grouped, key).flatten(-4, -3)
