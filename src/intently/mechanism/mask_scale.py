"""Stage 3, mask and scale: bring scores to a workable magnitude and hide what a query may not see."""

from __future__ import annotations

import torch
from torch import Tensor

from intently._typing import Bool, Float


def mask_scale(
    scores: Float[Tensor, "*batch heads query key"],
    *,
    scale: float,
    softcap: float | None = None,
    bias: Float[Tensor, "*bias_axes"] | None = None,
    mask: Bool[Tensor, "*mask_axes"] | None = None,
) -> Float[Tensor, "*batch heads query key"]:
    """Turn scores into logits: times `scale`, softcap, plus `bias`, minus infinity where `mask` is False.

    The order is part of the contract: the cap bounds what the content says, never what the mask forbids.

    Args:
        scores: `[*batch, heads, query, key]`.
        scale: factor on the scores; `1 / sqrt(width)` keeps their standard deviation near 1.
        softcap: c > 0 squeezes a logit x to `c * tanh(x / c)`, inside (-c, c).
        bias: added to the logits (ALiBi, relative positions), broadcastable to the scores; not capped.
        mask: True where the query may see the key, broadcastable to the scores.

    Returns:
        logits `[*batch, heads, query, key]`, in the dtype of the scores; hidden pairs hold `-inf`.

    Source: Vaswani et al. 2017, section 3.2.1 and footnote 4 (scale); ONNX `Attention`, opset 23 (order of terms);
    Gemma 2, arXiv 2408.00118 (softcap).

    >>> import torch
    >>> mask_scale(torch.tensor([[4.0, 8.0]]), scale=0.5, mask=torch.tensor([[True, False]]))
    tensor([[2., -inf]])
    """
    logits = scores * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return logits
