"""Stage 4, normalize: each query's logits become weights over the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from intently._typing import Float


def normalize(
    logits: Float[Tensor, "*batch heads query key"],
    sink: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "*batch heads query key"]:
    """Softmax over the keys; a row in which every logit is `-inf` gets weight 0 throughout, and gradient 0.

    Args:
        logits: `[*batch, heads, query, key]`, `-inf` where hidden.
        sink: a learned logit per head, `[heads]`, that joins the denominator and carries no value, so a row may
            sum to less than 1. A sink of 0 is the "off by one" softmax, `exp(x) / (1 + sum(exp(x)))`.

    Returns:
        weights `[*batch, heads, query, key]`; a row sums to 1, to less with a sink, to 0 if it sees nothing.

    Source: Vaswani et al. 2017, equation 1; Xiao et al. 2023, arXiv 2309.17453 (sinks); ONNX `Attention`, opset 23
    (a row with nothing to see gives 0).

    >>> import torch
    >>> inf = float("inf")
    >>> normalize(torch.tensor([[[0.0, 0.0], [0.0, -inf], [-inf, -inf]]]))
    tensor([[[0.5000, 0.5000],
             [1.0000, 0.0000],
             [0.0000, 0.0000]]])
    >>> normalize(torch.zeros(1, 1, 3), sink=torch.zeros(1))                 # three keys and the sink share alike
    tensor([[[0.2500, 0.2500, 0.2500]]])
    """
    keys = logits.shape[-1]
    if sink is not None:
        column = sink.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], dim=-1)
    # Softmax of nothing but -inf is 0/0, and its gradient stays NaN under a later mask: such rows must not enter it.
    blind = (logits == float("-inf")).all(dim=-1, keepdim=True)
    weights = logits.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)
    return weights[..., :keys]
