"""Latent attention, unpacked and absorbed, against numpy and transformers' DeepSeek-V3."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check

from intently import Mask
from intently.mechanism.forms.compress import LatentProjections, compress
from intently.mechanism.forms.latent import latent_attention

RANK, ROTARY = 3, 2


def tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "query": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width + ROTARY),
        "latent": draw.normal(sizes.batch, sizes.keys, RANK),
        "rotary_key": draw.normal(sizes.batch, sizes.keys, ROTARY),
        "key_weight": 0.5 * draw.normal(sizes.heads * sizes.width, RANK),
        "value_weight": 0.5 * draw.normal(sizes.heads * sizes.value_width, RANK),
    }


def options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    return {
        "plain": {},
        "causal, scaled": {"mask": Mask.causal(), "scale": 0.3},
        "blind": {"mask": draw.blind(sizes.queries, sizes.keys)},
    }


def in_numpy(query, latent, rotary_key, key_weight, value_weight, mask=None, scale=None):
    heads, both = query.shape[1], query.shape[-1]
    content = both - rotary_key.shape[-1]
    scale = 1 / np.sqrt(both) if scale is None else scale
    outputs = []
    for head, (unpack_key, unpack_value) in enumerate(
        zip(np.split(key_weight, heads), np.split(value_weight, heads), strict=True)
    ):
        scores = query[:, head, :, :content] @ (latent @ unpack_key.T).transpose(0, 2, 1)
        scores = scores + query[:, head, :, content:] @ rotary_key.transpose(0, 2, 1)
        shares = np.exp(scores * scale) * (True if mask is None else mask)
        total = shares.sum(-1, keepdims=True)
        outputs.append(shares / np.where(total == 0, 1, total) @ (latent @ unpack_value.T))
    return np.stack(outputs, 1)


WRONG = {
    "no rotary key": lambda rotary_key, **rest: latent_attention(rotary_key=0 * rotary_key, **rest),
    "scale of the content alone": lambda query, **rest: latent_attention(
        query, **{"scale": (query.shape[-1] - ROTARY) ** -0.5, **rest}
    ),
    "rotary part first": lambda query, **rest: latent_attention(query.roll(ROTARY, dims=-1), **rest),
}
UNPACKED = Form(
    "unpacked", latent_attention, in_numpy, tensors, wrong=WRONG, options=options, blind="blind", projects=True
)
ABSORBED = Form(
    "absorbed",
    partial(latent_attention, absorbed=True),
    in_numpy,
    tensors,
    wrong={
        "scale of the absorbed query": lambda query, **rest: latent_attention(
            query, absorbed=True, **{"scale": (RANK + ROTARY) ** -0.5, **rest}
        )
    },
    options=options,
    blind="blind",
    projects=True,
)


def states_and_weights(draw: Draw, sizes: Sizes) -> Tensors:
    both = sizes.heads * (sizes.width + ROTARY)
    return {
        "states": draw.normal(sizes.batch, sizes.keys, sizes.model),
        "query": 0.3 * draw.normal(both, 4),
        "query_down": 0.3 * draw.normal(4, sizes.model),
        "query_gain": draw.normal(4),
        "latent": 0.3 * draw.normal(RANK, sizes.model),
        "latent_gain": draw.normal(RANK),
        "rotary_key": 0.3 * draw.normal(ROTARY, sizes.model),
        "key_weight": 0.5 * draw.normal(sizes.heads * sizes.width, RANK),
        "value_weight": 0.5 * draw.normal(sizes.heads * sizes.value_width, RANK),
    }


def quarter_turns(pairs):
    """Position m turns the one pair by m right angles, on tensors and arrays alike: (a, b) -> (-b, a) and so on."""
    turned = pairs + 0
    for position in range(pairs.shape[-2]):
        a, b = pairs[..., position, 0] + 0, pairs[..., position, 1] + 0
        for _ in range(position % 4):
            a, b = -b, a
        turned[..., position, 0], turned[..., position, 1] = a, b
    return turned


def from_states(states, key_weight, value_weight, heads, rotate=quarter_turns, **weights):
    compressed = compress(states, LatentProjections(**weights), heads=heads, rotate=rotate)
    return latent_attention(*compressed, key_weight=key_weight, value_weight=value_weight)


def from_states_in_numpy(states, heads, key_weight, value_weight, **weights):
    def norm(array, gain):
        return gain * array / np.sqrt((array**2).mean(-1, keepdims=True) + 1e-6)

    packed = norm(states @ weights["query_down"].T, weights["query_gain"])
    query = np.stack([packed @ each.T for each in np.split(weights["query"], heads)], 1)
    query[..., -ROTARY:] = quarter_turns(query[..., -ROTARY:])
    latent = norm(states @ weights["latent"].T, weights["latent_gain"])
    rotary_key = quarter_turns(states @ weights["rotary_key"].T)
    return in_numpy(query, latent, rotary_key, key_weight, value_weight)


FROM_STATES = Form(
    "from states",
    from_states,
    from_states_in_numpy,
    states_and_weights,
    wrong={
        "not rotated": lambda **given: from_states(**given, rotate=lambda pairs: pairs),
        "no norm": lambda **given: from_states(**{**given, "latent_gain": None}),
    },
    options=lambda draw, sizes: {"plain": {"heads": sizes.heads}},
    sizes=Sizes(queries=5, keys=5),
    projects=True,
)

test_latent = every_check(UNPACKED, ABSORBED, FROM_STATES)


@pytest.mark.parametrize("knob", [{"softcap": 0.8}, {"sink": 0.5}, {"bias": torch.linspace(-1, 1, 5)}])
def test_both_ways_agree_on_every_option(knob):
    given = tensors(Draw.seeded(), Sizes())
    torch.testing.assert_close(
        latent_attention(**given, **knob), latent_attention(**given, **knob, absorbed=True), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("query_rank", [None, 6], ids=["full queries", "compressed queries"])
def test_equals_deepseek_v3(query_rank, absorbed):
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=20, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=query_rank, kv_lora_rank=7,
        qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    module = modeling.DeepseekV3Attention(config, layer_idx=0).double()
    states = torch.randn(2, 8, 20, dtype=torch.float64)
    turns = torch.arange(8.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    hidden = torch.ones(8, 8, dtype=torch.bool).triu(1)
    added = torch.zeros(1, 1, 8, 8, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    double = torch.cat([turns, turns], dim=-1)[None].expand(2, -1, -1)
    theirs, _ = module(states, (double.cos(), double.sin()), added)

    def turned(pairs):
        """Features 2p and 2p + 1 as one complex number, times exp(i · turn)."""
        spun = torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous()) * torch.exp(1j * turns)
        return torch.view_as_real(spun).flatten(-2)

    latent, rotary_key = module.kv_a_proj_with_mqa.weight.split([7, 4])
    if query_rank is None:
        queries = {"query": module.q_proj.weight}
    else:
        queries = {
            "query": module.q_b_proj.weight,
            "query_down": module.q_a_proj.weight,
            "query_gain": module.q_a_layernorm.weight,
        }
    projections = LatentProjections(
        **queries, latent=latent, rotary_key=rotary_key, latent_gain=module.kv_a_layernorm.weight
    )
    fused = module.kv_b_proj.weight.unflatten(0, (3, 11))
    output = latent_attention(
        *compress(states, projections, heads=3, rotate=turned),
        key_weight=fused[:, :5].flatten(0, 1),
        value_weight=fused[:, 5:].flatten(0, 1),
        absorbed=absorbed,
        mask=Mask.causal(),
    )
    # Their norms and softmax are float32 whatever the model's dtype.
    torch.testing.assert_close(module.o_proj(output.transpose(1, 2).flatten(2)), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.ones(6, 4, 10)}, r"query is float32\[6, 4, 10\].*batch axis"),
        ({"rotary_key": torch.ones(2, 4, 2)}, "do not belong to query.*cache that grew only one"),
        ({"key_weight": torch.ones(6 * 15, 3)}, r"10 - 2 = 8 wide, so \[6 \* 8, 3\] is needed.*kv_b_proj"),
        ({"value_weight": torch.ones(43, 3)}, r"value_weight float32\[43, 3\].*\[6 \* value_width, 3\]"),
    ],
)
def test_refusals(change, message):
    given = {name: tensor.float() for name, tensor in tensors(Draw.seeded(), Sizes()).items()}
    with pytest.raises(ValueError, match=message):
        latent_attention(**{**given, **change})


def test_heads_need_content_beside_their_rotary_part():
    projections = LatentProjections(torch.ones(4, 5), latent=torch.ones(3, 5), rotary_key=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"width 2, of which 2 are rotated"):
        compress(torch.ones(1, 4, 5), projections, heads=2, rotate=torch.neg)
