"""Multi-head self-attention: several attentions side by side, each in a space of its own, merged by one projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch.nn.functional as F
from torch import Tensor

from intently._typing import Float
from intently.mechanism.aggregate import merge_heads
from intently.mechanism.attention import attention
from intently.mechanism.door import show
from intently.mechanism.options import Options
from intently.mechanism.project import project


@dataclass(frozen=True, eq=False)
class Projections:
    """The four maps of multi-head attention, laid out as in `torch.nn.Linear`; head 0 owns the first rows.

    Attributes:
        query: `[heads * width, model]`, applied to the stream that receives.
        key: `[kv_heads * width, source_model]`, applied to the stream that is read.
        value: `[kv_heads * value_width, source_model]`, applied to the same stream as the key.
        output: `[model, heads * value_width]`, applied to the merged heads.
        query_bias, key_bias, value_bias, output_bias: one number per row.
    """

    query: Float[Tensor, "query_features model"]
    key: Float[Tensor, "key_features source_model"]
    value: Float[Tensor, "value_features source_model"]
    output: Float[Tensor, "model merged_features"]
    query_bias: Float[Tensor, " query_features"] | None = None
    key_bias: Float[Tensor, " key_features"] | None = None
    value_bias: Float[Tensor, " value_features"] | None = None
    output_bias: Float[Tensor, " model"] | None = None


def multi_head_attention(
    states: Float[Tensor, "*batch length model"],
    projections: Projections,
    *,
    heads: int,
    kv_heads: int | None = None,
    **options: Unpack[Options],
) -> Float[Tensor, "*batch length model"]:
    """Every position of one stream asks all positions of the same stream, in `heads` ways at once.

        q_h, k_h, v_h = states · W^Q_hᵀ, states · W^K_hᵀ, states · W^V_hᵀ
        head_h        = attention(q_h, k_h, v_h)
        output        = [head_1, ..., head_heads] · W^Oᵀ

    Args:
        states: `[*batch, length, model]`, at least one batch axis.
        projections: the four maps.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `heads`; as many as `heads` when left out.
        options: `mask`, `bias`, `scale`, `softcap`, `sink`, `dropout`, `backend`, as in `attention`.

    Returns:
        `[*batch, length, model]`.

    Raises:
        TypeError, ValueError: no batch axis, features that do not split into heads, or as in `attention`.

    Symbols: `states` is X (Q = K = V there), `projections` are W^Q, W^K, W^V, W^O, `heads` is h, `model` d_model.

    Equals / differs:
        torch `scaled_dot_product_attention`: only the middle line, without the projections.
        `nn.MultiheadAttention`: equal with `kv_heads = heads`; its `in_proj_weight` is query, key and value stacked; its
            bool masks mean the opposite (True = hidden).
        ONNX `Attention`: the middle line; it also splits and merges heads if given `[batch, length, features]`.
        FlexAttention: the middle line.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2.

    Four tokens, two heads of width 1. Head 0 carries the first feature, head 1 the second; scores are 0, so both take
    the mean of what is seen: 1, 11/2, 111/3, 1111/4 in head 0, and the same negative in head 1:

    >>> import torch
    >>> from intently import Mask
    >>> tokens = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    >>> states, nothing, same = torch.stack([tokens, -tokens], dim=-1)[None], torch.zeros(2, 2), torch.eye(2)
    >>> multi_head_attention(states, Projections(nothing, nothing, same, same), heads=2, mask=Mask.causal())
    tensor([[[   1.0000,   -1.0000],
             [   5.5000,   -5.5000],
             [  37.0000,  -37.0000],
             [ 277.7500, -277.7500]]])
    """
    return attend_between(states, states, projections, heads=heads, kv_heads=kv_heads, **options)


def attend_between(
    receiving: Float[Tensor, "*batch query model"],
    source: Float[Tensor, "*batch key source_model"],
    projections: Projections,
    *,
    heads: int,
    kv_heads: int | None = None,
    **options: Unpack[Options],
) -> Float[Tensor, "*batch query model"]:
    """Project, attend, merge, project: queries from one stream, keys and values from another or the same."""
    for name, stream in (("receiving", receiving), ("source", source)):
        if stream.dim() < 3:
            raise ValueError(
                f"attention over heads: the {name} stream is {show(stream)}; [*batch, length, model] with at least one "
                "batch axis is needed, for an axis of heads comes before the length. One sequence alone? Add the axis "
                "with states[None]"
            )
    kv_heads = heads if kv_heads is None else kv_heads
    query = project(receiving, projections.query, projections.query_bias, heads=heads)
    key = project(source, projections.key, projections.key_bias, heads=kv_heads)
    value = project(source, projections.value, projections.value_bias, heads=kv_heads)
    merged = merge_heads(attention(query, key, value, **options))
    return F.linear(merged, projections.output, projections.output_bias)
