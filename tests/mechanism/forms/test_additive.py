"""Additive attention and Luong's three scores against loops over pairs; concat and additive are one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check

from intently import Mask
from intently.mechanism.forms.additive import additive_attention
from intently.mechanism.forms.by_scores import attention_by_scores
from intently.mechanism.forms.luong import luong_concat, luong_dot, luong_general

HIDDEN = 3


def streams(draw: Draw, sizes: Sizes, key_width: int | None = None) -> Tensors:
    lead = (sizes.batch, sizes.heads)
    return {
        "query": draw.normal(*lead, sizes.queries, sizes.width),
        "key": draw.normal(*lead, sizes.keys, key_width or sizes.width),
        "value": draw.normal(*lead, sizes.keys, sizes.value_width),
    }


def options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    return {
        "plain": {},
        "causal": {"mask": Mask.causal()},
        "blind": {"mask": draw.blind(sizes.queries, sizes.keys)},
        "bias": {"bias": draw.normal(sizes.heads, 1, sizes.keys)},
        "bias by position": {"bias": lambda query, key: -0.5 * (query - key).abs().double()},
        "sink": {"sink": draw.normal(sizes.heads)},
    }


def by_pairs(judge):
    """An oracle from a function of one query vector and one key vector."""

    def oracle(query, key, value, mask=None, bias=None, sink=None, **weights):
        output = np.zeros((*query.shape[:-1], value.shape[-1]))
        plane = (*query.shape[:-1], key.shape[-2])
        mask = np.broadcast_to(True if mask is None else mask, plane)
        bias = np.broadcast_to(0.0 if bias is None else bias, plane)
        for b, h, i in np.ndindex(*query.shape[:-1]):
            shares = np.array(
                [
                    np.exp(judge(query[b, h, i], key[b, h, j], **weights) + bias[b, h, i, j]) * mask[b, h, i, j]
                    for j in range(key.shape[-2])
                ]
            )
            total = shares.sum() + (0.0 if sink is None else np.exp(sink[h]))
            output[b, h, i] = shares @ value[b, h] / (total or 1.0)
        return output

    return oracle


def additive_tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        **streams(draw, sizes, sizes.width + 1),
        "query_weight": draw.normal(HIDDEN, sizes.width),
        "key_weight": draw.normal(HIDDEN, sizes.width + 1),
        "score_weight": draw.normal(HIDDEN),
    }


ADDITIVE = Form(
    "additive",
    additive_attention,
    by_pairs(
        lambda q, k, query_weight, key_weight, score_weight: score_weight @ np.tanh(query_weight @ q + key_weight @ k)
    ),
    additive_tensors,
    wrong={
        "difference": lambda key, **rest: additive_attention(key=-key, **rest),
        "scaled": lambda score_weight, **rest: additive_attention(score_weight=score_weight / HIDDEN**0.5, **rest),
    },
    options=options,
    blind="blind",
    projects=True,
)
DOT = Form(
    "luong dot",
    luong_dot,
    by_pairs(lambda q, k: q @ k),
    streams,
    wrong={"scaled": lambda query, **rest: luong_dot(query / query.shape[-1] ** 0.5, **rest)},
    options=options,
    blind="blind",
)
GENERAL = Form(
    "luong general",
    luong_general,
    by_pairs(lambda q, k, weight: q @ weight @ k),
    lambda draw, sizes: {
        **streams(draw, sizes, sizes.width + 1),
        "weight": 0.1 * draw.normal(sizes.width, sizes.width + 1),
    },
    wrong={"no matrix": lambda weight, **rest: luong_general(weight=torch.eye(*weight.shape).to(weight), **rest)},
    options=options,
    blind="blind",
    projects=True,
)
CONCAT = Form(
    "luong concat",
    luong_concat,
    by_pairs(lambda q, k, weight, score_weight: score_weight @ np.tanh(weight @ np.concatenate([q, k]))),
    lambda draw, sizes: {
        **streams(draw, sizes, sizes.width + 1),
        "weight": draw.normal(HIDDEN, 2 * sizes.width + 1),
        "score_weight": draw.normal(HIDDEN),
    },
    wrong={"columns exchanged": lambda weight, **rest: luong_concat(weight=weight.roll(1, dims=1), **rest)},
    options=options,
    blind="blind",
    projects=True,
)

test_scores = every_check(ADDITIVE, DOT, GENERAL, CONCAT)


def test_large_negative_bias_survives_half_precision():
    """-1e9 is a number in float32 and -inf in float16; a row of it is a plain mean, not a row that sees nothing."""
    value = torch.tensor([[1.0], [10.0], [100.0], [1000.0]], dtype=torch.float16)
    output = attention_by_scores(torch.full((2, 4), -1e9), value)
    torch.testing.assert_close(output, torch.full((2, 1), 277.75, dtype=torch.float16), rtol=1e-3, atol=0)


def test_scores_do_not_overflow_in_float16():
    """32 · 32 · 65 is beyond float16, so the dot product has to be made in float32."""
    query = key = torch.full((1, 65), 32.0, dtype=torch.float16)
    assert luong_dot(query, torch.cat([key, -key]), torch.tensor([[1.0], [9.0]], dtype=torch.float16)).item() == 1.0


T = torch.ones


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: additive_attention(
                T(2, 3), T(4, 5), T(4, 1), query_weight=T(7, 5), key_weight=T(7, 3), score_weight=T(7)
            ),
            r"query_weight float32\[7, 5\] does not read the query float32\[2, 3\]; \[hidden, 3\].*exchanged",
        ),
        (
            lambda: additive_attention(
                T(2, 3), T(4, 5), T(4, 1), query_weight=T(7, 3), key_weight=T(6, 5), score_weight=T(7)
            ),
            "one hidden width",
        ),
        (
            lambda: additive_attention(
                T(1, 6, 2, 3), T(1, 3, 4, 5), T(1, 3, 4, 1), query_weight=T(7, 3), key_weight=T(7, 5), score_weight=T(7)
            ),
            "same leading axes.*share_heads",
        ),
        (lambda: luong_general(T(2, 3), T(4, 5), T(4, 1), weight=T(5, 3)), r"\[3, 5\] is needed.*Transposed"),
        (
            lambda: luong_concat(T(2, 3), T(4, 5), T(4, 1), weight=T(7, 6), score_weight=T(7)),
            r"\[hidden, 3 \+ 5\] is needed",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
