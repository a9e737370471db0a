"""Looking leaves the output bit for bit as it was, and shows what the layers computed."""

from __future__ import annotations

import pytest
import torch

from intently import Mask
from intently.mechanism.layers import (
    AdditiveAttention,
    Attend,
    CrossAttention,
    Decoder,
    GrowingCache,
    MultiHeadAttention,
    TransformerBlock,
    look,
)
from intently.mechanism.positions import Rotary


def decoder() -> Decoder:
    blocks = [
        TransformerBlock(
            MultiHeadAttention(16, heads=4, kv_heads=2, position=Rotary(4), attend=Attend(mask=mask)),
            torch.nn.Linear(16, 16),
            norms=[torch.nn.RMSNorm(16) for _ in range(3)],
            cross=CrossAttention(16, heads=2),
        )
        for mask in (None, Mask.causal() & Mask.window(2))
    ]
    return Decoder(blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_output_is_the_same_bit_for_bit(dtype):
    model, states, source = decoder().to(dtype), torch.randn(2, 6, 16, dtype=dtype), torch.randn(2, 5, 16, dtype=dtype)
    before = model(states, source=source)
    with look(model) as seen:
        during = model(states, source=source)
        weights = seen["blocks.1.attention.attend"].weights  # asking in between changes nothing either
    assert torch.equal(during, before)
    assert torch.equal(model(states, source=source), before)
    assert list(seen) == [f"blocks.{number}.{part}.attend" for number in (0, 1) for part in ("attention", "cross")]
    assert torch.equal((weights[0, 0] > 0).int(), (Mask.causal() & Mask.window(2)).matrix(6).int())
    assert seen["blocks.0.cross.attend"].weights.shape == (2, 2, 6, 5)


def test_what_is_shown_is_what_the_kernel_gave():
    model = MultiHeadAttention(16, heads=4, kv_heads=2, attend=Attend(mask=Mask.causal())).double()
    with look(model) as seen:
        output = model(torch.randn(2, 6, 16).double())
    stages = seen["attend"]
    assert torch.allclose(model.output(stages.output.transpose(1, 2).flatten(2)), output, atol=1e-12)
    assert torch.allclose(stages.weights.sum(dim=-1), torch.ones(2, 4, 6).double())


def test_gradients_pass_as_ever():
    model, states = MultiHeadAttention(8, heads=2), torch.randn(2, 6, 8)
    model(states).square().sum().backward()
    expected = model.query.weight.grad.clone()
    model.zero_grad()
    with look(model) as seen:
        model(states).square().sum().backward()
    assert torch.equal(model.query.weight.grad, expected)
    assert not seen["attend"].weights.requires_grad


def test_steps_are_seen_one_by_one():
    model, cache = MultiHeadAttention(8, heads=2, attend=Attend(mask=Mask.causal())), GrowingCache()
    states = torch.randn(1, 4, 8)
    with look(model) as seen:
        for token in states.split([2, 1, 1], dim=1):
            model(token, cache=cache)
    with pytest.raises(LookupError, match=r"called 3 times; choose one of seen\.calls\('attend'\)"):
        seen["attend"]
    steps = seen.calls("attend")
    assert [each.weights.shape[-2:] for each in steps] == [(2, 2), (1, 3), (1, 4)]
    with look(model) as whole:
        model(states)
    assert torch.allclose(steps[2].weights, whole["attend"].weights[:, :, 3:], atol=1e-6)


def test_hooks_are_gone_afterwards_also_after_an_error():
    model = MultiHeadAttention(8, heads=2)
    with pytest.raises(RuntimeError, match="midway"), look(model) as seen:
        model(torch.randn(1, 3, 8))
        raise RuntimeError("midway")
    assert len(seen) == 1
    model(torch.randn(1, 3, 8))
    assert len(seen.calls("attend")) == 1
    assert not model.attend._forward_hooks


def test_additive_attention_shows_its_scores():
    layer, states = AdditiveAttention(8, hidden=6).double(), torch.randn(2, 5, 8).double()
    with look(torch.nn.ModuleDict({"search": layer})) as seen:
        output = layer(receiving=states[:, :1], source=states)
    stages = seen["search"]
    by_hand = torch.tanh(layer.query(states[0, :1]) + layer.key(states[0])) @ layer.weight
    assert torch.allclose(stages.scores[0, 0], by_hand)
    assert torch.allclose(stages.weights @ states, output)


def test_what_is_not_there_is_said():
    with pytest.raises(ValueError, match="Linear contains no layer with stages"), look(torch.nn.Linear(2, 2)):
        pass
    with look(MultiHeadAttention(8, heads=2)) as seen:
        pass
    with pytest.raises(KeyError, match="has not been called since the look began"):
        seen["attend"]
    with pytest.raises(KeyError, match=r"no layer with stages at 'blocks\.0'; there are 'attend'"):
        seen["blocks.0"]
