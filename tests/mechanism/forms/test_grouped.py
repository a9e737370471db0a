"""Grouped heads against loops; pooled heads against transformers' way of sharing and against the paper's mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check

from intently import Mask
from intently.mechanism import attention
from intently.mechanism.forms.grouped import grouped_attention, pool_heads, share_heads


def tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "query": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width),
        "key": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.width),
        "value": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.value_width),
    }


def options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    return {
        "plain": {},
        "causal, scaled": {"mask": Mask.causal(), "scale": 0.3},
        "blind": {"mask": draw.blind(sizes.queries, sizes.keys)},
        "bias per head": {"bias": draw.normal(sizes.heads, 1, sizes.keys)},
    }


def in_loops(query, key, value, mask=None, bias=None, scale=None):
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    output = np.zeros((batch, heads, queries, value.shape[-1]))
    for b, g, member, i in np.ndindex(batch, kv_heads, group, queries):
        head = g * group + member  # the members of a group stand side by side
        shares = np.zeros(keys)
        for j in range(keys):
            logit = query[b, head, i] @ key[b, g, j] * (width**-0.5 if scale is None else scale)
            logit += 0.0 if bias is None else bias[head, 0, j]
            shares[j] = np.exp(logit) if mask is None or mask[i, j] else 0.0
        if shares.sum():
            output[b, head, i] = shares / shares.sum() @ value[b, g]
    return output


def tiled(query, key, value, **options):
    key, value = (each.repeat(1, query.shape[1] // each.shape[1], 1, 1) for each in (key, value))
    return attention(query, key, value, **options)


GROUPED = Form(
    "grouped",
    grouped_attention,
    in_loops,
    tensors,
    wrong={"tiled": tiled, "reversed": lambda query, **rest: grouped_attention(query.flip(1), **rest).flip(1)},
    options=options,
    stages=lambda query, key, value, **rest: attention(
        query, *(share_heads(each, query.shape[1]) for each in (key, value)), **rest, backend="stages"
    ),
    blind="blind",
)
MULTI_QUERY = replace(
    GROUPED,
    name="multi-query",
    sizes=Sizes(kv_heads=1),
    wrong={"no scale": lambda **given: grouped_attention(**{"scale": 1.0, **given})},
)

test_grouped = every_check(GROUPED, MULTI_QUERY)


def test_tiling_is_harmless_only_where_nothing_is_shared_by_choice():
    """With one kv head, or as many as query heads, both orders agree: why such a slip survives small tests."""
    for kv_heads, differs in ((1, False), (6, False), (3, True)):
        given = tensors(Draw.seeded(), Sizes(kv_heads=kv_heads))
        assert differs is not torch.allclose(tiled(**given), grouped_attention(**given))


def test_shares_as_transformers_does():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    key = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(share_heads(key, 6), llama.repeat_kv(key, 2))


@pytest.mark.parametrize("shape", [(12, 5), (12,)], ids=["weight", "bias"])
def test_pooled_heads_are_the_means_of_groups(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pooled = pool_heads(weight, heads=6, kv_heads=3).numpy()
    for head in range(3):
        for row in range(2):  # two rows a head, two heads a group
            mean = (weight[head * 4 + row] + weight[head * 4 + 2 + row]) / 2
            np.testing.assert_allclose(pooled[head * 2 + row], mean)
    assert torch.equal(pool_heads(weight, heads=6, kv_heads=6), weight)


def test_pooling_equal_heads_changes_nothing():
    """If the heads of a group were equal already, the smaller model is the same function."""
    draw = Draw.seeded()
    states, query = draw.normal(2, 5, 10), draw.normal(2, 6, 4, 8)
    small = draw.normal(3 * 8, 10)
    large = share_heads(small.unflatten(0, (3, 8)), 6).flatten(0, 1)
    assert torch.equal(pool_heads(large, heads=6, kv_heads=3), small)

    def heads(weight, count):
        return (states @ weight.T).unflatten(-1, (count, 8)).transpose(1, 2)

    torch.testing.assert_close(
        grouped_attention(query, heads(small, 3), heads(small, 3)),
        grouped_attention(query, heads(large, 6), heads(large, 6)),
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pool_heads(torch.ones(12, 2), heads=3, kv_heads=6), "3 query heads .* 6 kv heads.*exchanged"),
        (lambda: pool_heads(torch.ones(10, 12), heads=6, kv_heads=3), r"float32\[10, 12\] has 10 rows.*transposed"),
        (lambda: share_heads(torch.ones(3, 5, 2), heads=4), "4 query heads .* 3 kv heads"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
