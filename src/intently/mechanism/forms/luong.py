"""Luong's three scores: a plain dot product, one with a learned matrix between, and a network over both side by side."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from intently._typing import Float
from intently.mechanism.attention import attention
from intently.mechanism.door import show
from intently.mechanism.forms.additive import additive_attention
from intently.mechanism.options import ScoreOptions


def luong_dot(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*lead key width"],
    value: Float[Tensor, "*lead key value_width"],
    **options: Unpack[ScoreOptions],
) -> Float[Tensor, "*lead query value_width"]:
    """Attention by the dot product as it is, not scaled by the width.

        score(q, k) = q · k

    Args:
        query: `[*batch, heads, query, width]`, or `[*batch, query, width]` with fewer than 4 axes.
        key: `[*batch, heads, key, width]` likewise.
        value: `[*batch, heads, key, value_width]` likewise; in the paper the same as the key.
        options: `mask`, `bias`, `sink`, `dropout`, `backend`, as in `attention`.

    Returns:
        `[*batch, heads, query, value_width]`, the context.

    Raises:
        TypeError, ValueError: as in `attention`.

    Symbols: `query` is the target state h_t, `key` and `value` the source states h̄_s, the weights a_t, the output c_t.

    Equals / differs:
        torch `scaled_dot_product_attention`: equal with `scale=1.0`; its default divides by √width.
        `nn.MultiheadAttention`: cannot leave out its scale; multiply the query by √width.
        ONNX `Attention`: equal with `scale=1`.
        FlexAttention: equal with `scale=1.0`.

    Source: Luong, Pham, Manning 2015, arXiv 1508.04025, section 3.1 ("dot").

    Four tokens, one-hot keys of width 4. The query scores ln 3 with token 2, so that has 3 shares against 1 each; a
    scaled score would be half of that:

    >>> import torch
    >>> key, value = torch.eye(4), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> luong_dot(torch.tensor(3.0).log() * key[2:3], key, value)            # (1 + 10 + 3 · 100 + 1000) / 6
    tensor([[218.5000]])
    """
    return attention(query, key, value, scale=1.0, **options)


def luong_general(
    query: Float[Tensor, "*lead query query_width"],
    key: Float[Tensor, "*lead key key_width"],
    value: Float[Tensor, "*lead key value_width"],
    *,
    weight: Float[Tensor, "query_width key_width"],
    **options: Unpack[ScoreOptions],
) -> Float[Tensor, "*lead query value_width"]:
    """Attention by a dot product through a learned matrix, so that queries and keys need not share a space.

        score(q, k) = qᵀ W k

    This is `luong_dot` of a query projected into the space of the keys, and as fast.

    Args:
        query: `[*batch, heads, query, query_width]`, or `[*batch, query, query_width]` with fewer than 4 axes.
        key: `[*batch, heads, key, key_width]` likewise.
        value: `[*batch, heads, key, value_width]` likewise.
        weight: `[query_width, key_width]`.
        options: as in `luong_dot`.

    Returns:
        `[*batch, heads, query, value_width]`.

    Raises:
        TypeError, ValueError: a weight that does not fit, or as in `attention`.

    Symbols: `weight` is W_a. In modern terms W_a = W^Qᵀ W^K of a single head.

    Equals / differs: as `luong_dot`, on the query `query @ weight`.

    Source: Luong, Pham, Manning 2015, arXiv 1508.04025, section 3.1 ("general").

    The matrix sends a query of width 1 to key 2 of four:

    >>> import torch
    >>> value, weight = torch.tensor([[1.0], [10.0], [100.0], [1000.0]]), torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    >>> luong_general(torch.tensor([[3.0]]).log(), torch.eye(4), value, weight=weight)
    tensor([[218.5000]])
    """
    if tuple(weight.shape) != (query.shape[-1], key.shape[-1]):
        raise ValueError(
            f"luong_general: weight {show(weight)} does not lie between query {show(query)} and key {show(key)}; "
            f"[{query.shape[-1]}, {key.shape[-1]}] is needed, the query's width first. Transposed?"
        )
    moved = (query @ weight).to(key.dtype)  # autocast would leave it in another precision than the key
    return luong_dot(moved, key, value, **options)


def luong_concat(
    query: Float[Tensor, "*lead query query_width"],
    key: Float[Tensor, "*lead key key_width"],
    value: Float[Tensor, "*lead key value_width"],
    *,
    weight: Float[Tensor, "hidden both_widths"],
    score_weight: Float[Tensor, " hidden"],
    **options: Unpack[ScoreOptions],
) -> Float[Tensor, "*lead query value_width"]:
    """Attention by a small network that reads query and key side by side.

        score(q, k) = v · tanh(W [q; k])

    A matrix over a concatenation is a sum of two, so this is `additive_attention` with W = [query_weight, key_weight].

    Args:
        query: `[*batch, heads, query, query_width]`, or `[*batch, query, query_width]` with fewer than 4 axes.
        key: `[*batch, heads, key, key_width]` likewise.
        value: `[*batch, heads, key, value_width]` likewise.
        weight: `[hidden, query_width + key_width]`, the query's columns first.
        score_weight: `[hidden]`.
        options: as in `luong_dot`.

    Returns:
        `[*batch, heads, query, value_width]`.

    Raises:
        TypeError, ValueError: weights that do not fit, or as in `attention`.

    Symbols: `weight` is W_a, `score_weight` v_a.

    Equals / differs: as `additive_attention`.

    Source: Luong, Pham, Manning 2015, arXiv 1508.04025, section 3.1 ("concat").

    >>> import torch
    >>> value = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> blind_to_both = torch.zeros(1, 2)                                    # every score 0: the mean, 1111 / 4
    >>> luong_concat(torch.ones(1, 1), torch.ones(4, 1), value, weight=blind_to_both, score_weight=torch.ones(1))
    tensor([[277.7500]])
    """
    both = query.shape[-1] + key.shape[-1]
    if weight.dim() != 2 or weight.shape[-1] != both:
        raise ValueError(
            f"luong_concat: weight {show(weight)} does not read query {show(query)} beside key {show(key)}; "
            f"[hidden, {query.shape[-1]} + {key.shape[-1]}] is needed, the query's columns first"
        )
    query_weight, key_weight = weight.split([query.shape[-1], key.shape[-1]], dim=-1)
    return additive_attention(
        query, key, value, query_weight=query_weight, key_weight=key_weight, score_weight=score_weight, **options
    )
