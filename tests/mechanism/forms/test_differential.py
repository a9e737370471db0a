"""Differential attention against numpy and transformers' DiffLlama; the learned share and the normalised heads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check

from intently import Mask
from intently.mechanism import attention
from intently.mechanism.forms.differential import (
    differential_attention,
    differential_share,
    initial_share,
    normalize_heads,
)


def tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "query": draw.normal(sizes.batch, sizes.heads, sizes.queries, 2 * sizes.width),
        "key": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, 2 * sizes.width),
        "value": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.value_width),
        "share": draw.normal(sizes.heads),
    }


def options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    return {
        "plain": {},
        "causal, scaled": {"mask": Mask.causal(), "scale": 0.3},
        "blind": {"mask": draw.blind(sizes.queries, sizes.keys)},
        "bias": {"bias": draw.normal(sizes.queries, sizes.keys)},
    }


def softmax(logits, mask):
    shares = np.exp(logits) * (True if mask is None else mask)
    total = shares.sum(-1, keepdims=True)
    return shares / np.where(total == 0, 1, total)


def in_numpy(query, key, value, share, mask=None, bias=None, scale=None):
    """The weights are subtracted, then the values mixed once."""
    width = query.shape[-1] // 2
    scale = 1 / np.sqrt(width) if scale is None else scale
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    for head in range(query.shape[1]):
        group = head // (query.shape[1] // key.shape[1])
        first, second = (
            softmax(
                query[:, head, :, half] @ key[:, group, :, half].transpose(0, 2, 1) * scale
                + (0.0 if bias is None else bias),
                mask,
            )
            for half in (slice(0, width), slice(width, None))
        )
        output[:, head] = (first - share[head] * second) @ value[:, group]
    return output


def scaled_by_both_widths(query, **rest):
    return differential_attention(query, **{"scale": query.shape[-1] ** -0.5, **rest})


DIFFERENTIAL = Form(
    "differential",
    differential_attention,
    in_numpy,
    tensors,
    wrong={
        "scale of both widths": scaled_by_both_widths,
        "added": lambda share, **rest: differential_attention(share=-share, **rest),
        "halves exchanged": lambda query, key, **rest: differential_attention(
            *(each.roll(each.shape[-1] // 2, -1) for each in (query, key)), **rest
        ),
    },
    options=options,
    blind="blind",
)

test_differential = every_check(DIFFERENTIAL)


def test_a_share_of_zero_is_plain_attention_and_equal_halves_cancel():
    given = tensors(Draw.seeded(), Sizes())
    query, key, value = (given[name] for name in ("query", "key", "value"))
    first = attention(query[..., :8], key[..., :8], value)
    torch.testing.assert_close(differential_attention(query, key, value, share=0.0), first)
    twice = [torch.cat([each[..., :8], each[..., :8]], -1) for each in (query, key)]
    torch.testing.assert_close(differential_attention(*twice, value, share=1.0), torch.zeros_like(first))


@pytest.mark.parametrize(("layer", "expected"), [(1, 0.2), (2, 0.8 - 0.6 * 0.7408182207), (100, 0.8)])
def test_initial_share(layer, expected):
    assert initial_share(layer) == pytest.approx(expected, abs=1e-9)


def test_layers_are_counted_from_one():
    with pytest.raises(ValueError, match=r"counted from 1\. Pass index \+ 1"):
        initial_share(0)


def test_learned_share_per_head():
    draw = Draw.seeded()
    vectors = [draw.normal(3, 4) for _ in range(4)]
    expected = [
        math.exp(sum(a * b for a, b in zip(q1, k1, strict=True)))
        - math.exp(sum(a * b for a, b in zip(q2, k2, strict=True)))
        + 0.2
        for q1, k1, q2, k2 in zip(*(each.tolist() for each in vectors), strict=True)
    ]
    np.testing.assert_allclose(differential_share(*vectors, initial=0.2), expected)


def test_normalized_heads():
    output = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    output[0, 0, 0] = 0
    output.requires_grad_()
    gain = torch.arange(1.0, 6.0, dtype=torch.float64)
    normal = normalize_heads(output, initial=0.2, gain=gain)
    array = output.detach().numpy()
    expected = 0.8 * gain.numpy() * array / np.sqrt((array**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(normal.detach(), expected)
    (gradient,) = torch.autograd.grad(normal.sum(), output)
    assert (normal[0, 0, 0] == 0).all() and gradient.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.ones(2, 6, 4, 15)}, r"query float32\[2, 6, 4, 15\] has an odd width"),
        ({"share": torch.ones(3)}, r"share float32\[3\] is neither one number nor one per head.* \[6\] is needed"),
    ],
)
def test_refusals(change, message):
    given = {**tensors(Draw.seeded(), Sizes()), **change}
    with pytest.raises(ValueError, match=message):
        differential_attention(**given)


def test_equals_diffllama():
    """There q1 and q2 are the first and second half of the heads, and the values of such a pair are joined."""
    modeling = pytest.importorskip("transformers.models.diffllama.modeling_diffllama")
    config = modeling.DiffLlamaConfig(
        hidden_size=32, num_attention_heads=8, num_key_value_heads=4, head_dim=4, attn_implementation="eager"
    )
    torch.manual_seed(0)
    module = modeling.DiffLlamaAttention(config, layer_idx=2).double()
    states = torch.randn(2, 5, 32, dtype=torch.float64)
    no_turn = torch.ones(2, 5, 4, dtype=torch.float64), torch.zeros(2, 5, 4, dtype=torch.float64)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    added = torch.zeros(1, 1, 5, 5, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    theirs, _ = module(states, no_turn, added)

    def heads(projection, count):
        return projection(states).unflatten(-1, (count, 4)).transpose(1, 2)

    query, key, value = (
        torch.cat(heads(projection, count).chunk(2, dim=1), dim=-1)
        for projection, count in ((module.q_proj, 8), (module.k_proj, 4), (module.v_proj, 4))
    )
    initial = initial_share(3)
    share = differential_share(module.lambda_q1, module.lambda_k1, module.lambda_q2, module.lambda_k2, initial=initial)
    mixed = differential_attention(query, key, value, share=share, mask=Mask.causal())
    merged = normalize_heads(mixed, initial=initial, epsilon=config.rms_norm_eps).transpose(1, 2).flatten(2)
    # Their softmax and their share are float32 whatever the model's dtype.
    torch.testing.assert_close(module.o_proj(merged), theirs, rtol=1e-5, atol=1e-6)
