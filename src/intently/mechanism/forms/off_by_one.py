"""Attention that may abstain: a sink joins the softmax and carries nothing, so weights need not sum to one."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from intently._typing import Float
from intently.mechanism.attention import attention
from intently.mechanism.options import SinklessOptions


def sink_attention(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    *,
    sink: Float[Tensor, "*sink_axes"] | float,
    **options: Unpack[SinklessOptions],
) -> Float[Tensor, "*lead query value_width"]:
    """Attention with a learned logit per head that takes part in the softmax and hands over nothing.

        weights_j = exp(x_j) / (exp(sink) + Σ over keys of exp(x))        output = weights · value

    The same as one more key whose logit is `sink` and whose value is 0. A plain softmax must put its weight somewhere
    and models learn to dump it on the first token or on a delimiter; here it has a place to go.

    Args:
        query: `[*batch, heads, query, width]`, or `[*batch, query, width]` with fewer than 4 axes.
        key: `[*batch, kv_heads, key, width]`.
        value: `[*batch, kv_heads, key, value_width]`.
        sink: a logit per head, `[heads]`, or one for all; neither scaled nor capped nor masked.
        options: `mask`, `bias`, `scale`, `softcap`, `dropout`, `backend`, as in `attention`.

    Returns:
        `[*batch, heads, query, value_width]`; a query that may see nothing receives 0, all its weight is in the sink.

    Raises:
        TypeError, ValueError: as in `attention`.

    Symbols: `exp(sink)` is the "learned bias in the denominator of the softmax" of gpt-oss, whose code calls it `sinks`.

    Equals / differs:
        torch `scaled_dot_product_attention`: no sink; append a key and a value of zeros, with `sink` as their float mask.
        `nn.MultiheadAttention`: `add_zero_attn=True` appends zeros too, whose logit is then 0: `off_by_one_attention`.
        ONNX `Attention`: no sink; append as with torch.
        FlexAttention: no sink; ask for the log-sum-exp L of each row and multiply its output by sigmoid(L - sink).

    Source: Xiao et al. 2023, arXiv 2309.17453, section 3.3 (a sink learned, zero or a token); OpenAI 2025, gpt-oss (a
    learned logit per head).

    Four tokens with scores of 0, sink ln 4: the sink has as many shares as all four together, so half of the mean:

    >>> import torch
    >>> nothing, value = torch.zeros(4, 1), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> sink_attention(nothing[:1], nothing, value, sink=torch.tensor(4.0).log())       # 1111 / (4 + 4)
    tensor([[138.8750]])
    """
    return attention(query, key, value, sink=sink, **options)


def off_by_one_attention(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    **options: Unpack[SinklessOptions],
) -> Float[Tensor, "*lead query value_width"]:
    """Attention whose softmax has a 1 added to its denominator, so that a head to which nothing matters says nothing.

        weights_j = exp(x_j) / (1 + Σ over keys of exp(x))

    `sink_attention` with a sink of 0, which is not learned. Arguments, results and comparisons are those of it.

    Symbols: this softmax is called softmax₁.

    Equals / differs: `nn.MultiheadAttention(add_zero_attn=True)` computes this; otherwise as `sink_attention`.

    Source: Miller 2023, *Attention Is Off By One* (an essay); the "zero sink" of Xiao et al. 2023, arXiv 2309.17453.

    Four tokens with scores of 0 are five equal shares, one of them lost:

    >>> import torch
    >>> nothing, value = torch.zeros(4, 1), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> off_by_one_attention(nothing[:1], nothing, value)                    # 1111 / 5
    tensor([[222.2000]])
    """
    return sink_attention(query, key, value, sink=0.0, **options)
