"""Every backend on what is easily got wrong: one of everything, none of something, odd memory, autocast, learned biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from intently import Mask
from intently.mechanism import attention, choose_backend, reference, stages, torch_math
from intently.mechanism.backends import blocked

EVERY = pytest.mark.parametrize("backend", ["auto", "stages", "fused", "blocked", "math", "oracle"])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK", 4)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def states(batch: int = 2, heads: int = 4, kv_heads: int = 2, queries: int = 9, keys: int = 11, width: int = 6, wide=6):
    lead = normal(batch, heads, queries, width), normal(batch, kv_heads, keys, width, seed=1)
    return *lead, normal(batch, kv_heads, keys, wide, seed=2)


SIZES = {
    "one query": {"queries": 1},
    "one key": {"keys": 1},
    "one of both": {"queries": 1, "keys": 1},
    "width 1": {"width": 1, "wide": 1},
    "value narrower": {"wide": 2},
    "value wider": {"wide": 13},
    "more queries than keys": {"queries": 11, "keys": 3},
}
MASKS = {"none": None, "causal": Mask.causal(), "decoding": (Mask.causal() & Mask.window(5)).bottom_right()}


@EVERY
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_one_of_everything(backend, mask, sizes):
    tensors = states(**sizes)
    torch.testing.assert_close(
        attention(*tensors, mask=mask, backend=backend), reference(*tensors, mask=mask).output, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("backend", ["auto", "stages", "blocked", "math", "oracle"])
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"keys": 0}, {"queries": 0}, {"wide": 0}], ids=str)
def test_none_of_something(backend, sizes):
    tensors = [tensor.requires_grad_() for tensor in states(**sizes)]
    output = attention(*tensors, mask=Mask.causal(), sink=0.5, backend=backend)
    assert output.shape == (*tensors[0].shape[:-1], tensors[2].shape[-1]) and (output == 0).all()
    output.sum().backward()
    assert all(tensor.grad is None or (tensor.grad == 0).all() for tensor in tensors)


@EVERY
def test_memory_in_any_order(backend):
    query, key, value = states()
    truth = reference(query, key, value, mask=MASKS["decoding"]).output
    apart = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value)]
    gaps = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in (query, key, value)]
    for tensors in (apart, gaps):
        assert not any(tensor.is_contiguous() for tensor in tensors)
        torch.testing.assert_close(attention(*tensors, mask=MASKS["decoding"], backend=backend), truth)
    one = [tensor[:1].expand(2, -1, -1, -1) for tensor in (query, key, value)]
    torch.testing.assert_close(attention(*one, backend=backend)[1], attention(*one, backend=backend)[0])
    flags = torch.tensor([True, False]).expand(9, 2).flatten()[:11]  # strides of its own
    torch.testing.assert_close(
        attention(query, key, value, mask=flags, backend=backend), reference(query, key, value, mask=flags).output
    )


@EVERY
def test_autocast_changes_nothing(backend):
    tensors = [tensor.float() for tensor in states()]
    expected = attention(*tensors, mask=Mask.causal(), backend=backend)
    half = [tensor.bfloat16() for tensor in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        assert (tensors[0] @ tensors[0].mT).dtype == torch.bfloat16  # it is at work
        assert torch.equal(attention(*tensors, mask=Mask.causal(), backend=backend), expected)
        rounded = attention(*half, mask=Mask.causal(), backend=backend)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, attention(*half, mask=Mask.causal(), backend=backend))


def test_autocast_spares_stages_and_oracles():
    tensors = [tensor.float() for tensor in states()]
    with torch.autocast("cpu", torch.bfloat16):
        assert all(each.dtype == torch.float32 for each in stages(*tensors))
        inside = [*reference(*tensors), torch_math(*tensors)]
    for each, outside in zip(inside, [*reference(*tensors), torch_math(*tensors)], strict=True):
        assert torch.equal(each, outside)


def test_autocast_reaches_no_recomputed_block():
    query, key, value = (tensor.float().requires_grad_() for tensor in states())
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = attention(query, key, value, mask=Mask.causal(), softcap=2.0, backend="blocked")
        gradients.append(torch.autograd.grad(output.square().sum(), query)[0])  # outside, as torch advises
    assert torch.equal(*gradients)


@EVERY
def test_a_learned_bias_by_rule_learns(backend):
    """Gradient of a table looked up by distance, against the same table written out as a tensor."""
    table = normal(4, 21, seed=3).requires_grad_()

    def relative(query_index: torch.Tensor, key_index: torch.Tensor) -> torch.Tensor:
        return table[:, query_index - key_index + 10]

    def gradient(bias: Any, backend: str) -> torch.Tensor:
        output = attention(*states(), bias=bias, mask=Mask.window(3, 3), backend=backend)
        return torch.autograd.grad(output.square().sum(), table)[0]

    places = torch.tensor([[i - j + 10 for j in range(11)] for i in range(9)])
    torch.testing.assert_close(gradient(relative, backend), gradient(table[:, places], "stages"))


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["fused inside", "stages inside"])
def test_dropout_is_the_same_in_the_backward_pass(options):
    """The output is linear in the values, so <output, g> = <values, gradient> holds exactly if the weights agree."""
    query, key, value = states(queries=11)
    value.requires_grad_()
    output = attention(query, key, value, dropout=0.5, backend="blocked", **options)
    toward = normal(*output.shape, seed=5)
    before = torch.get_rng_state()
    (gradient,) = torch.autograd.grad(output, value, toward)
    assert torch.equal(before, torch.get_rng_state())  # what is redrawn is not drawn from the caller's numbers
    torch.testing.assert_close((output * toward).sum(), (value * gradient).sum())
    assert not torch.allclose(output, attention(query, key, value, backend="blocked", **options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["auto", "stages", "fused", "blocked", "math", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_core_on_every_device(device, backend, dtype):
    if device == "cpu" and backend == "flex":
        pytest.skip("compiled once, in a test of its own")
    tensors = [tensor.to(device, dtype) for tensor in states(queries=40, keys=50, width=16, wide=16)]
    mask = Mask.causal() & Mask.window(9)
    truth = reference(*tensors, mask=mask).output
    output = attention(*tensors, mask=mask, backend=backend)
    assert output.dtype == dtype and output.device.type == device
    # TF32, where a GPU uses it, rounds products to 11 bits.
    bound = 8 * max(torch.finfo(dtype).eps, 2.0**-11 if device == "cuda" else 0.0)
    assert (output.double() - truth).abs().max() < bound
    assert choose_backend(*tensors, mask=mask, backend=backend).reason


@pytest.mark.parametrize(
    "options", [{}, {"sink": 0.5, "softcap": 2.0}, {"bias": normal(4, 9, 11)}], ids=["fused", "stages", "bias"]
)
def test_blocks_that_reach_no_key(options):
    mask = Mask.causal(-6) & Mask.padding([0, 11])  # the first six queries see nothing, the first sample never anything
    tensors = [tensor.requires_grad_() for tensor in states()]
    output = attention(*tensors, mask=mask, backend="blocked", **options)
    torch.testing.assert_close(output, reference(*tensors, mask=mask, **options).output)
    assert (output[:, :, :6] == 0).all() and (output[0] == 0).all()
    gradients = torch.autograd.grad(output.square().sum(), tensors)
    truth = torch.autograd.grad(reference(*tensors, mask=mask, **options).output.square().sum(), tensors)
    torch.testing.assert_close(gradients, truth)
