"""Linear attention against the weights it never builds; its recurrence, and the limits that its docstring states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check

from intently.mechanism import attention
from intently.mechanism.forms import linear
from intently.mechanism.forms.linear import linear_attention, linear_attention_step


def tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "query": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width),
        "key": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.width),
        "value": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.value_width),
    }


def options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    nobody = draw.seen(sizes.batch, sizes.keys)
    nobody[:1] = False
    return {"plain": {}, "padding": {"keep": draw.seen(sizes.batch, sizes.keys)}, "nothing to see": {"keep": nobody}}


def causal_options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    return {name: {**each, "causal": True} for name, each in options(draw, sizes).items()}


def in_numpy(query, key, value, causal=False, keep=None):
    """The quadratic way: all weights, then a division by their sum."""
    features = [np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (query, key)]
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    for head in range(query.shape[1]):
        group = head // (query.shape[1] // key.shape[1])
        weights = features[0][:, head] @ features[1][:, group].transpose(0, 2, 1)
        if causal:
            weights = np.tril(weights)
        if keep is not None:
            weights = weights * keep[:, None, :]
        total = weights.sum(-1, keepdims=True)
        output[:, head] = weights / np.where(total == 0, 1, total) @ value[:, group]
    return output


LINEAR = Form(
    "linear",
    linear_attention,
    in_numpy,
    tensors,
    wrong={
        "softmax": lambda query, key, value, keep=None: attention(query, key, value),
        "relu": lambda query, key, **rest: linear_attention(query.relu(), key.relu(), **rest),
    },
    options=options,
)
CAUSAL = replace(
    LINEAR,
    name="causal linear",
    options=causal_options,
    sizes=Sizes(queries=5, keys=5),
    wrong={"not causal": lambda causal, **given: linear_attention(**given)},
)

test_linear = every_check(LINEAR, CAUSAL)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 64])
def test_blocks_of_any_size_agree(block, monkeypatch):
    whole = tensors(Draw.seeded(), CAUSAL.sizes)
    monkeypatch.setattr(linear, "_BLOCK", block)
    np.testing.assert_allclose(linear_attention(**whole, causal=True), in_numpy(**_arrays(whole), causal=True))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 3), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_the_recurrence_gives_the_same_however_the_tokens_are_cut(lengths, seed):
    total = sum(lengths)
    whole = tensors(Draw.seeded(seed), Sizes(queries=total, keys=total))
    sums, outputs, at = None, [], 0
    for length in lengths:
        part = {name: tensor[..., at : at + length, :] for name, tensor in whole.items()}
        output, sums = linear_attention_step(**part, sums=sums)
        outputs.append(output)
        at += length
    torch.testing.assert_close(torch.cat(outputs, dim=-2), linear_attention(**whole, causal=True))
    assert sums is not None and sums.mixed.shape == (2, 6, 8, 7)  # whatever the number of tokens


def test_the_weights_have_no_more_rank_than_the_width():
    """Twelve one-hot values give the weights themselves; softmax can single out each token, this cannot."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(12, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    one_hot = torch.eye(12, dtype=torch.float64)
    assert torch.linalg.matrix_rank(linear_attention(query, key, one_hot)) == 3
    assert torch.linalg.matrix_rank(attention(query, key, one_hot)) > 3


def test_features_that_vanish_give_zeros_and_not_nan():
    query = torch.full((1, 2), -1e3, requires_grad=True)  # exp underflows: no feature is left
    output = linear_attention(query, torch.ones(3, 2), torch.ones(3, 1))
    output.sum().backward()
    assert output.item() == 0 and query.grad is not None and query.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda q, k: linear_attention(q, k, k, causal=True),
            "as many queries as keys, there are 2 and 3.*linear_attention_step",
        ),
        (lambda q, k: linear_attention_step(q, k, k), "2 queries and 3 keys"),
        (lambda q, k: linear_attention(q, k, k, keep=torch.ones(2, 3).bool()), r"bool\[2, 3\]; bool\[3\] is needed"),
        (lambda q, k: linear_attention(q, k, k, keep=torch.ones(3)), r"float32\[3\]; bool\[3\] is needed"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 4), torch.ones(3, 4))


def test_a_mask_is_not_accepted():
    with pytest.raises(TypeError, match="mask"):
        linear_attention(torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 4), mask=torch.ones(3, 3).bool())


def _arrays(given: Tensors) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in given.items()}
