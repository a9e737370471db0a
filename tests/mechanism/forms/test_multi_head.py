"""Multi-head and cross-attention against numpy and torch's own module; streams that were mistaken are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check

from intently import Mask
from intently.mechanism.forms.cross import cross_attention
from intently.mechanism.forms.multi_head import Projections, multi_head_attention

NAMES = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias", "output_bias")


def weights(draw: Draw, sizes: Sizes, source_model: int) -> Tensors:
    """Weights small enough for logits of size 1."""
    wide, narrow = sizes.heads * sizes.width, sizes.kv_heads * sizes.width
    handed, merged = sizes.kv_heads * sizes.value_width, sizes.heads * sizes.value_width
    shapes = [(wide, sizes.model), (narrow, source_model), (handed, source_model), (sizes.model, merged)]
    shapes += [(wide,), (narrow,), (handed,), (sizes.model,)]
    return {name: 0.3 * draw.normal(*shape) for name, shape in zip(NAMES, shapes, strict=True)}


def in_numpy(receiving, source, *, heads, kv_heads, mask=None, **weights):
    """One head after the other, by slices of the weights."""
    width, value_width = weights["query"].shape[0] // heads, weights["value"].shape[0] // kv_heads
    merged = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        rows, kv_rows, value_rows = (
            slice(at * size, (at + 1) * size) for at, size in ((head, width), (group, width), (group, value_width))
        )
        query = receiving @ weights["query"][rows].T + weights["query_bias"][rows]
        key = source @ weights["key"][kv_rows].T + weights["key_bias"][kv_rows]
        value = source @ weights["value"][value_rows].T + weights["value_bias"][value_rows]
        shares = np.exp(query @ key.transpose(0, 2, 1) / np.sqrt(width))
        if mask is not None:
            shares = shares * mask
        total = shares.sum(-1, keepdims=True)
        merged.append(shares / np.where(total == 0, 1, total) @ value)
    return np.concatenate(merged, -1) @ weights["output"].T + weights["output_bias"]


def self_tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {"states": draw.normal(sizes.batch, sizes.keys, sizes.model), **weights(draw, sizes, sizes.model)}


def heads_of(sizes: Sizes) -> Options:
    return {"heads": sizes.heads, "kv_heads": sizes.kv_heads}


def self_options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    heads = heads_of(sizes)
    return {
        "plain": heads,
        "causal": {**heads, "mask": Mask.causal()},
        "blind": {**heads, "mask": draw.blind(sizes.keys, sizes.keys)},
    }


def self_call(states, heads, kv_heads, mask=None, **weights):
    return multi_head_attention(states, Projections(**weights), heads=heads, kv_heads=kv_heads, mask=mask)


def heads_mixed_with_tokens(states, heads, kv_heads, mask=None, **weights):
    """The slip: splitting heads by a reshape alone."""
    p = Projections(**weights)
    batch, length = states.shape[:2]
    query, key, value = (
        torch.nn.functional.linear(states, w, b).reshape(batch, n, length, -1)
        for w, b, n in (
            (p.query, p.query_bias, heads),
            (p.key, p.key_bias, kv_heads),
            (p.value, p.value_bias, kv_heads),
        )
    )
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return torch.nn.functional.linear(out.transpose(1, 2).flatten(2), p.output, p.output_bias)


MULTI_HEAD = Form(
    "multi-head",
    self_call,
    lambda states, **rest: in_numpy(states, states, **rest),
    self_tensors,
    wrong={
        "heads mixed with tokens": heads_mixed_with_tokens,
        "no output bias": lambda **given: self_call(**{**given, "output_bias": None}),
    },
    options=self_options,
    sizes=Sizes(queries=5, keys=5),
    projects=True,
)


def cross_tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "receiving": draw.normal(sizes.batch, sizes.queries, sizes.model),
        "source": draw.normal(sizes.batch, sizes.keys, sizes.model + 3),
        **weights(draw, sizes, sizes.model + 3),
    }


def cross_options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    heads = heads_of(sizes)
    return {"plain": heads, "blind": {**heads, "mask": draw.blind(sizes.queries, sizes.keys)}}


def cross_call(receiving, source, heads, kv_heads, mask=None, **weights):
    return cross_attention(
        receiving=receiving,
        source=source,
        projections=Projections(**weights),
        heads=heads,
        kv_heads=kv_heads,
        mask=mask,
    )


def own_states_as_memory(receiving, source, **rest):
    """The slip: the receiving stream, widened to fit, in place of the memory."""
    return cross_call(receiving, torch.nn.functional.pad(receiving, (0, 3, 0, 1)), **rest)


CROSS = Form(
    "cross",
    cross_call,
    in_numpy,
    cross_tensors,
    wrong={"own states as memory": own_states_as_memory},
    options=cross_options,
    projects=True,
)

test_multi_head = every_check(MULTI_HEAD, CROSS)


@pytest.mark.parametrize("masked", [False, True])
def test_equals_torch_module(masked):
    """`nn.MultiheadAttention` has as many key heads as query heads, and True means hidden in its masks."""
    draw, sizes = Draw.seeded(), replace(MULTI_HEAD.sizes, kv_heads=2, heads=2, model=8, width=4, value_width=4)
    tensors = self_tensors(draw, sizes)
    states = tensors.pop("states")
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    stacked = {
        "in_proj_weight": torch.cat([tensors[name] for name in ("query", "key", "value")]),
        "in_proj_bias": torch.cat([tensors[name] for name in ("query_bias", "key_bias", "value_bias")]),
        "out_proj.weight": tensors["output"],
        "out_proj.bias": tensors["output_bias"],
    }
    module.load_state_dict(stacked)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1) if masked else None
    theirs, _ = module(states, states, states, attn_mask=hidden)
    ours = multi_head_attention(states, Projections(**tensors), heads=2, mask=Mask.causal() if masked else None)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_sequence_without_batch_axis_is_refused_with_advice():
    tensors = self_tensors(Draw.seeded(), MULTI_HEAD.sizes)
    states = tensors.pop("states")
    with pytest.raises(ValueError, match=r"float64\[5, 10\].*states\[None\]"):
        multi_head_attention(states[0], Projections(**tensors), heads=6, kv_heads=3)


STREAMS_AND_REST = cross_tensors(Draw.seeded(), Sizes())
STREAMS = {name: STREAMS_AND_REST[name] for name in ("receiving", "source")}
REST = {"projections": Projections(**{name: STREAMS_AND_REST[name] for name in NAMES}), "heads": 6, "kv_heads": 3}


@pytest.mark.parametrize("missing", ["receiving", "source"])
def test_a_missing_stream(missing):
    given = {name: stream for name, stream in STREAMS.items() if name != missing}
    with pytest.raises(TypeError, match=f"`{missing}`, the stream that .* is missing.*multi_head_attention"):
        cross_attention(**given, **REST)


def test_one_tensor_for_both_streams():
    same = STREAMS["receiving"]
    with pytest.raises(ValueError, match=r"same tensor.*multi_head_attention.*clone"):
        cross_attention(receiving=same, source=same, **REST)


def test_streams_that_are_equal_by_chance_are_accepted():
    states, square = torch.ones(1, 2, 1), Projections(*[torch.ones(1, 1)] * 4)
    assert cross_attention(receiving=states, source=states.clone(), projections=square, heads=1).eq(1).all()


def test_exchanged_streams():
    swapped = {"receiving": STREAMS["source"], "source": STREAMS["receiving"]}
    with pytest.raises(ValueError, match=r"receiving stream has width 13, its projection takes 10.*exchanged"):
        cross_attention(**swapped, **REST)


def test_streams_by_position_are_not_accepted():
    with pytest.raises(TypeError, match="positional"):
        cross_attention(*STREAMS.values(), **REST)
