"""Differential attention: a second map of weights is subtracted from the first, so that what both see cancels."""

from __future__ import annotations

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from intently._typing import Float
from intently.mechanism.attention import attention
from intently.mechanism.door import show
from intently.mechanism.options import Options


def differential_attention(
    query: Float[Tensor, "*lead query both_widths"],
    key: Float[Tensor, "*kv_lead key both_widths"],
    value: Float[Tensor, "*kv_lead key value_width"],
    *,
    share: Float[Tensor, "*share_axes"] | float,
    **options: Unpack[Options],
) -> Float[Tensor, "*lead query value_width"]:
    """The difference of two attentions over the same values.

        output = (softmax(q1 · k1ᵀ / √width) - λ softmax(q2 · k2ᵀ / √width)) · value

    Weights may be below 0, and a row sums to 1 - λ. Both halves go through `attention`, so through a fused kernel where
    that can; half precision is subtracted in float32, from two outputs that were rounded.

    Args:
        query: `[*batch, heads, query, 2 * width]`: q1 is the first half of the features, q2 the second; with fewer
            than 4 axes `[*batch, query, 2 * width]`.
        key: `[*batch, kv_heads, key, 2 * width]` likewise.
        value: `[*batch, kv_heads, key, value_width]`; 2 * width wide in the paper.
        share: λ, a number or one per head, `[heads]`; from `differential_share` where it is learned.
        options: `mask`, `bias`, `scale`, `softcap`, `sink`, `dropout`, `backend`, as in `attention`, for both halves;
            dropout falls on each half by itself, which the paper leaves open.

    Returns:
        `[*batch, heads, query, value_width]`. The paper then normalises each head: `normalize_heads`.

    Raises:
        ValueError: an odd width, a share that is neither one nor per head, or as in `attention`.

    Symbols: `query` is [Q1; Q2], `key` [K1; K2], `width` d, `share` λ.

    Equals / differs:
        torch `scaled_dot_product_attention`: two calls and a subtraction, as here.
        `nn.MultiheadAttention`: cannot; a head there has one map of weights.
        ONNX `Attention`: two nodes and a subtraction.
        FlexAttention: two calls and a subtraction.
        transformers `DiffLlama`: equal; there q1 and q2 are the first and the second half of the *heads*, and each pair's
            values are joined to twice the width.

    Source: Ye et al. 2024, *Differential Transformer*, arXiv 2410.05258, section 2.1, equation 1.

    Four tokens, width 1. The first map scores 0 everywhere (weights 1/4), the second nearly all on token 3; with λ = 1/4
    the last value is cancelled: (1 + 10 + 100) / 4:

    >>> first, second = torch.zeros(4, 1), torch.tensor([[0.0], [0.0], [0.0], [1.0]])
    >>> query, value = torch.tensor([[0.0, 99.0]]), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> differential_attention(query, torch.cat([first, second], dim=-1), value, share=0.25)
    tensor([[27.7500]])
    """
    for name, both in (("query", query), ("key", key)):
        if both.shape[-1] % 2:
            raise ValueError(
                f"differential_attention: {name} {show(both)} has an odd width; it holds two halves side by side, "
                f"{name}1 and {name}2, so [..., 2 * width] is needed. Only one half passed?"
            )
    (query1, query2), (key1, key2) = query.chunk(2, dim=-1), key.chunk(2, dim=-1)
    kept, removed = attention(query1, key1, value, **options), attention(query2, key2, value, **options)
    exact = torch.promote_types(kept.dtype, torch.float32)
    return (kept.to(exact) - _per_head(share, query).to(exact) * removed.to(exact)).to(kept.dtype)


def differential_share(
    query1: Float[Tensor, "*heads width"],
    key1: Float[Tensor, "*heads width"],
    query2: Float[Tensor, "*heads width"],
    key2: Float[Tensor, "*heads width"],
    *,
    initial: float,
) -> Float[Tensor, "*heads"]:
    """The share λ as the paper learns it: `exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ_init`.

    Args:
        query1, key1, query2, key2: learned vectors `[width]`, or `[heads, width]`; drawn with standard deviation 0.1
            at the start, so that λ starts near `initial`.
        initial: λ_init, from `initial_share`.

    Returns:
        λ: one number, or `[heads]`; float32 for half precision.

    Symbols: λ_q1, λ_k1, λ_q2, λ_k2, λ_init.

    Source: Ye et al. 2024, arXiv 2410.05258, section 2.1, equation 2.

    >>> ones, nothing = torch.ones(2), torch.zeros(2)
    >>> differential_share(ones, nothing, nothing, ones, initial=0.2)        # 1 - 1 + 0.2
    tensor(0.2000)
    """
    exact = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in (query1, key1, query2, key2)]
    return (exact[0] * exact[1]).sum(-1).exp() - (exact[2] * exact[3]).sum(-1).exp() + initial


def initial_share(layer: int) -> float:
    """λ_init of a layer, counted from 1: `0.8 - 0.6 exp(-0.3 (layer - 1))`, from 0.2 in the first towards 0.8.

    Code that counts layers from 0 passes `index + 1`.

    Raises:
        ValueError: a layer below 1.

    Source: Ye et al. 2024, arXiv 2410.05258, section 2.1.

    >>> initial_share(1), round(initial_share(2), 4)
    (0.2, 0.3555)
    """
    if layer < 1:
        raise ValueError(f"initial_share: layer is {layer}; layers are counted from 1. Pass index + 1")
    return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1)) if layer > 1 else 0.2


def normalize_heads(
    output: Float[Tensor, "*batch heads query value_width"],
    *,
    initial: float,
    gain: Float[Tensor, " value_width"] | None = None,
    epsilon: float = 1e-5,
) -> Float[Tensor, "*batch heads query value_width"]:
    """RMS-normalise each head by itself and multiply by `1 - λ_init`, as the paper does before the output projection.

    Heads of a difference vary in size; this evens them, and the factor keeps gradients those of a plain transformer.
    A row of zeros (a query that saw nothing) stays 0.

    Args:
        output: of `differential_attention`.
        initial: λ_init, from `initial_share`.
        gain: learned, `[value_width]`, shared by heads.
        epsilon: added to the mean square.

    Source: Ye et al. 2024, arXiv 2410.05258, section 2.1, equation 3 ("GroupNorm" there, independent for each head).

    >>> normalize_heads(torch.tensor([[[3.0, 3.0]]]), initial=0.2)           # a constant becomes 1, times 0.8
    tensor([[[0.8000, 0.8000]]])
    """
    return (1 - initial) * F.rms_norm(output, output.shape[-1:], gain, epsilon)


def _per_head(share: Tensor | float, query: Tensor) -> Tensor:
    """The share with the axes of the output."""
    if not isinstance(share, Tensor):
        return torch.tensor(share, device=query.device, dtype=torch.promote_types(query.dtype, torch.float32))
    heads = query.shape[-3] if query.dim() >= 4 else 1
    if share.numel() == 1:
        return share.reshape(())
    if tuple(share.shape) != (heads,):
        raise ValueError(
            f"differential_attention: share {show(share)} is neither one number nor one per head; "
            f"the query {show(query)} has {heads} heads, so [] or [{heads}] is needed"
        )
    return share[:, None, None]
