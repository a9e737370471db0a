"""Additive attention: a small network, not a dot product, judges how well a query matches a key."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from intently._typing import Float
from intently.mechanism.door import show
from intently.mechanism.forms.by_scores import at_least_float32, attention_by_scores
from intently.mechanism.options import ScoreOptions


def additive_attention(
    query: Float[Tensor, "*lead query query_width"],
    key: Float[Tensor, "*lead key key_width"],
    value: Float[Tensor, "*lead key value_width"],
    *,
    query_weight: Float[Tensor, "hidden query_width"],
    key_weight: Float[Tensor, "hidden key_width"],
    score_weight: Float[Tensor, " hidden"],
    **options: Unpack[ScoreOptions],
) -> Float[Tensor, "*lead query value_width"]:
    """For each query, the mean of the values, weighted by the verdict of a network with one hidden layer.

        score(q, k) = v · tanh(W q + U k)
        output      = softmax over keys (score) · value

    There is no scale: the weight v learns one. Queries and keys may have different widths. Memory: the hidden layer
    holds `query × key × hidden` numbers, `hidden` times as many as the scores, and no kernel avoids it.

    Args:
        query: `[*batch, heads, query, query_width]`, or `[*batch, query, query_width]` with fewer than 4 axes.
        key: `[*batch, heads, key, key_width]` likewise, as many heads as queries.
        value: `[*batch, heads, key, value_width]` likewise.
        query_weight: `[hidden, query_width]`, shared by the heads.
        key_weight: `[hidden, key_width]`.
        score_weight: `[hidden]`.
        options: `mask`, `bias`, `sink`, `dropout`, `backend`, as in `attention`.

    Returns:
        `[*batch, heads, query, value_width]` in the dtype of the values.

    Raises:
        TypeError, ValueError: weights that do not fit, or as in `attention`.

    Symbols: `query` is the decoder state s_{i-1}, `key` and `value` are both the annotations h_j, `query_weight` W_a,
    `key_weight` U_a, `score_weight` v_a, the output the context c_i. (The paper's a may carry biases; put them into the
    keys.)

    Equals / differs:
        torch `scaled_dot_product_attention`: only with the scores as float `attn_mask` and a query of zeros, as done here.
        `nn.MultiheadAttention`: cannot; its scores are dot products.
        ONNX `Attention`: as torch's, through `attn_mask`.
        FlexAttention: cannot compute them; a `score_mod` may look scores up that were computed before, as here.

    Source: Bahdanau, Cho, Bengio 2014, arXiv 1409.0473, section 3.1 and appendix A.1.2.

    Four tokens by hand. The network says tanh(q + k): with q = 0 and k = 0 for three keys that is 0, and for the key
    that holds a very large number 1. So token 2 has e = 2.7183 shares, the others 1 each,
    and the result is (1 + 10 + 100 e + 1000) / (3 + e):

    >>> key, value = torch.tensor([[0.0], [0.0], [99.0], [0.0]]), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> one = torch.ones(1, 1)
    >>> additive_attention(torch.zeros(1, 1), key, value, query_weight=one, key_weight=one, score_weight=one[0])
    tensor([[224.3381]])
    """
    _check_streams(query, key, value)
    _check_weights(query, key, query_weight, key_weight, score_weight)
    # Half precision is raised, as in `score`, so that only the result is rounded.
    query, key, query_weight, key_weight, score_weight = at_least_float32(
        query, key, query_weight, key_weight, score_weight
    )
    hidden = F.linear(query, query_weight).unsqueeze(-2) + F.linear(key, key_weight).unsqueeze(-3)
    return attention_by_scores(torch.tanh(hidden) @ score_weight, value, **options)


def _check_streams(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"additive_attention: query {show(query)}, key {show(key)} and value {show(value)} need the same leading "
            "axes, and one value for each key. The weights are shared by all heads, so heads are not grouped here; "
            "share_heads gives every query head its key and value"
        )


def _check_weights(query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, score_weight: Tensor) -> None:
    for name, states, weight in (("query", query, query_weight), ("key", key, key_weight)):
        if weight.shape[-1] != states.shape[-1]:
            raise ValueError(
                f"additive_attention: {name}_weight {show(weight)} does not read the {name} {show(states)}; "
                f"[hidden, {states.shape[-1]}] is needed. Weights of query and key exchanged, or one transposed?"
            )
    hidden = {query_weight.shape[0], key_weight.shape[0], *score_weight.shape}
    if len(hidden) > 1 or score_weight.dim() != 1:
        raise ValueError(
            f"additive_attention: query_weight {show(query_weight)}, key_weight {show(key_weight)} and score_weight "
            f"{show(score_weight)} need one hidden width: [hidden, ...], [hidden, ...] and [hidden]"
        )
