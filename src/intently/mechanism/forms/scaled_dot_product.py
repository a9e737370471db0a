"""Scaled dot-product attention: the form that all others vary, as its stages one after the other."""

from __future__ import annotations

from torch import Tensor

from intently._typing import Bool, Float
from intently.masks import Mask
from intently.mechanism.aggregate import aggregate
from intently.mechanism.door import admit, own_precision
from intently.mechanism.mask_scale import mask_scale
from intently.mechanism.normalize import normalize
from intently.mechanism.score import score


def scaled_dot_product(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
) -> Float[Tensor, "*lead query value_width"]:
    """For each query, the mean of the values, weighted by how well their keys match.

        scores  = query · keyᵀ
        logits  = scores / √width, -∞ where the mask is False
        weights = exp(logits) / Σ over keys of exp(logits)
        output  = weights · value

    This is the text to read first; `intently.mechanism.attention` computes the same, faster and with more to ask for.

    Args:
        query: `[*batch, heads, query, width]`; with fewer than 4 axes `[*batch, query, width]`, a single head.
        key: `[*batch, kv_heads, key, width]`.
        value: `[*batch, kv_heads, key, value_width]`.
        mask: a `Mask`, or bool broadcastable to `[*batch, heads, query, key]`; True = may see.

    Returns:
        `[*batch, heads, query, value_width]`; a query that may see nothing receives 0.

    Raises:
        TypeError, ValueError: arguments that do not fit together, as in `attention`.

    Symbols: `query`, `key`, `value` are Q, K, V; `width` is d_k, `value_width` d_v; `weights` is softmax(QKᵀ/√d_k).

    Equals / differs:
        torch `scaled_dot_product_attention`: equal with `attn_mask` bool (True = may see there too) and grouped heads
            under `enable_gqa=True`; rows that see nothing are 0 here, and vary there with version and kernel.
        `nn.MultiheadAttention`: this is its core, between its projections; its bool masks mean the opposite (True = hidden).
        ONNX `Attention`: equal from opset 23 on.
        FlexAttention: equal; the mask becomes a `mask_mod`.

    Source: Vaswani et al. 2017, *Attention Is All You Need*, arXiv 1706.03762, section 3.2.1, equation 1.

    Four tokens by hand. Every score is 0, so each query receives the plain mean of the values it sees; from 1, 10, 100
    and 1000 the digits tell which those were:

    >>> import torch
    >>> nothing, value = torch.zeros(4, 1), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> scaled_dot_product(nothing, nothing, value, Mask.causal()).flatten()  # 1/1, 11/2, 111/3, 1111/4
    tensor([  1.0000,   5.5000,  37.0000, 277.7500])

    One-hot keys: a query pointing at key 2 with a score of 2·ln 3, halved by √4, gives it 3 shares against 1 each:

    >>> key, query = torch.eye(4), 2 * torch.tensor(3.0).log() * torch.eye(4)[2:3]
    >>> scaled_dot_product(query, key, value)                                # (1 + 10 + 3 · 100 + 1000) / 6
    tensor([[218.5000]])
    """
    inputs = admit(query, key, value, mask=mask)
    with own_precision(query):  # autocast would round the scores
        scores = score(inputs.query, inputs.key)
        logits = mask_scale(scores, scale=inputs.scale, mask=inputs.seen())
        weights = normalize(logits)
        output = aggregate(weights, inputs.value)
    return inputs.leave(output)
