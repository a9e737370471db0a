"""Sinks against an appended key, torch's `add_zero_attn` and the code of gpt-oss."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check

from intently import Mask
from intently.mechanism import attention
from intently.mechanism.forms.off_by_one import off_by_one_attention, sink_attention


def tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "query": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width),
        "key": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.width),
        "value": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.value_width),
    }


def with_sink(draw: Draw, sizes: Sizes) -> Tensors:
    return {**tensors(draw, sizes), "sink": draw.normal(sizes.heads)}


def options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    return {
        "plain": {},
        "causal, scaled": {"mask": Mask.causal(), "scale": 0.3},
        "blind": {"mask": draw.blind(sizes.queries, sizes.keys)},
        "capped, biased": {"softcap": 1.5, "bias": draw.normal(sizes.queries, sizes.keys)},
    }


def in_numpy(query, key, value, sink=None, mask=None, bias=None, scale=None, softcap=None):
    """One more key: its logit is the sink, its value 0."""
    group = query.shape[1] // key.shape[1]
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    for head in range(query.shape[1]):
        logits = query[:, head] @ key[:, head // group].transpose(0, 2, 1)
        logits = logits * (query.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        shares = np.exp(logits + (0.0 if bias is None else bias)) * (True if mask is None else mask)
        lost = np.full((*shares.shape[:-1], 1), 1.0 if sink is None else np.exp(sink[head]))
        longer = np.concatenate([shares, lost], -1)
        values = np.concatenate([value[:, head // group], np.zeros_like(value[:, head // group, :1])], 1)
        output[:, head] = longer / longer.sum(-1, keepdims=True) @ values
    return output


def sink_as_an_axis_of_keys(query, key, value, sink, **options):
    """The slip: the sink's logit gets a value as well, that of the last key."""
    lost = 1 - attention(query, key, torch.ones_like(value), sink=sink, **options)
    return attention(query, key, value, sink=sink, **options) + lost * value[:, :1, -1:, :]


SINK = Form(
    "sink",
    sink_attention,
    in_numpy,
    with_sink,
    wrong={
        "no sink": lambda sink, **rest: attention(**rest),
        "a sink that carries": sink_as_an_axis_of_keys,
        "sink scaled": lambda query, sink, **rest: sink_attention(query, sink=sink * query.shape[-1] ** -0.5, **rest),
    },
    options=options,
    stages=lambda **given: attention(**given, backend="stages"),
    blind="blind",
)
OFF_BY_ONE = Form(
    "off by one",
    off_by_one_attention,
    in_numpy,
    tensors,
    wrong={"plain softmax": attention, "sink of 1": lambda **given: sink_attention(sink=1.0, **given)},
    options=options,
    stages=lambda **given: attention(**given, sink=0.0, backend="stages"),
    blind="blind",
)

test_sinks = every_check(SINK, OFF_BY_ONE)


def test_a_sink_of_minus_infinity_is_no_sink_and_a_large_one_silences():
    given = tensors(Draw.seeded(), Sizes())
    none = torch.full((6,), -torch.inf, dtype=torch.float64)
    torch.testing.assert_close(sink_attention(**given, sink=none), attention(**given))
    assert sink_attention(**given, sink=1e4).abs().max() == 0


def test_equals_torch_with_an_appended_key_of_zeros():
    given = with_sink(Draw.seeded(), Sizes(kv_heads=6))
    sink = given.pop("sink")
    key, value = (F.pad(given[name], (0, 0, 0, 1)) for name in ("key", "value"))
    added = torch.cat([torch.zeros(6, 4, 5, dtype=sink.dtype), sink[:, None, None].expand(6, 4, 1)], dim=-1)
    theirs = F.scaled_dot_product_attention(given["query"], key, value, attn_mask=added[None])
    torch.testing.assert_close(sink_attention(**given, sink=sink), theirs)


def test_off_by_one_equals_torch_modules_add_zero_attn():
    """torch's module appends a zero to the projected keys and values; with maps that change nothing that is all."""
    module = torch.nn.MultiheadAttention(8, 1, bias=False, add_zero_attn=True, batch_first=True, dtype=torch.float64)
    same = torch.eye(8, dtype=torch.float64)
    module.load_state_dict({"in_proj_weight": same.repeat(3, 1), "out_proj.weight": same})
    draw = Draw.seeded()
    query, states = draw.normal(2, 4, 8), draw.normal(2, 5, 8)
    theirs, _ = module(query, states, states)
    torch.testing.assert_close(off_by_one_attention(query, states, states), theirs)


def test_equals_the_code_of_gpt_oss():
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    given = with_sink(Draw.seeded(), Sizes())
    module = SimpleNamespace(sinks=given["sink"], num_key_value_groups=2, training=False)
    seen = torch.ones(4, 5, dtype=torch.bool).tril()
    added = torch.zeros(4, 5, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    theirs, _ = modeling.eager_attention_forward(
        module, given["query"], given["key"], given["value"], added, scaling=0.3
    )
    ours = sink_attention(**given, mask=Mask.causal(), scale=0.3)
    torch.testing.assert_close(ours, theirs.transpose(1, 2))
