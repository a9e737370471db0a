"""σReparam against torch's spectral norm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import parametrize

from intently.mechanism.steady import SigmaReparam, sigma_reparam


def linear(inputs: int = 5, outputs: int = 7) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs).double()


def spectral(weight: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(weight.detach().flatten(1), ord=2).item()


@pytest.mark.parametrize("gamma", [1.0, 2.5])
@pytest.mark.parametrize("module", [linear, lambda: linear(7, 5), lambda: torch.nn.Conv1d(3, 4, 2).double()])
def test_the_spectral_norm_is_gamma(module, gamma):
    layer = module()
    before = layer.weight.detach().clone()
    sigma_reparam(layer, gamma=gamma, warm_up=300)
    torch.testing.assert_close(layer.weight, before * gamma / spectral(before))
    assert spectral(layer.weight) == pytest.approx(gamma)
    assert spectral(before) != pytest.approx(gamma, rel=0.05)  # the control: it was not so before


def test_none_keeps_what_the_layer_computes():
    layer, states = linear(), torch.randn(3, 5, dtype=torch.float64)
    before = layer(states)
    sigma_reparam(layer, gamma=None, warm_up=300)
    torch.testing.assert_close(layer(states), before)
    assert layer.parametrizations.weight[0].gamma.item() == pytest.approx(spectral(layer.weight))


def test_training_steps_converge_and_evaluation_does_not_move():
    layer = sigma_reparam(linear(), warm_up=0).train()
    off = [abs(spectral(layer.weight) - 1) for _ in range(400)]
    assert off[0] > 1e-2 and off[-1] < 1e-9
    rough = sigma_reparam(linear(), warm_up=1).eval()
    state = copy.deepcopy(rough.state_dict())
    first = rough.weight.clone()
    assert all(rough.weight.equal(first) for _ in range(3))
    assert all(rough.state_dict()[name].equal(value) for name, value in state.items())
    rough.train()
    assert not rough.weight.equal(first)  # the control: in training it does


def test_a_layer_in_evaluation_stays_so():
    assert not sigma_reparam(linear().eval()).parametrizations.weight[0].training


def test_gradients_with_the_singular_vectors_held_fixed():
    torch.manual_seed(1)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    module = SigmaReparam(weight, gamma=2.0, warm_up=300).eval()
    # At convergence the gradient of uᵀWv is that of σ itself, so the whole may be checked against torch's own.
    upstream = torch.randn(4, 3, dtype=torch.float64)
    ours = torch.autograd.grad((module(weight) * upstream).sum(), [weight, module.gamma])
    gamma = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    theirs = gamma * weight / torch.linalg.matrix_norm(weight, ord=2)
    for mine, true in zip(ours, torch.autograd.grad((theirs * upstream).sum(), [weight, gamma]), strict=True):
        torch.testing.assert_close(mine, true)
    assert torch.autograd.gradcheck(module, (weight,), eps=1e-7, atol=1e-5)


def test_two_forwards_before_one_backward():
    layer = sigma_reparam(linear()).train()
    states = torch.randn(3, 5, dtype=torch.float64)
    (layer(states) + layer(2 * states)).sum().backward()
    assert layer.parametrizations.weight.original.grad.isfinite().all()


def test_an_update_cannot_raise_the_norm_unseen():
    layer = sigma_reparam(linear(), warm_up=300).train()
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(1000.0)
    assert spectral(layer.weight) == pytest.approx(1.0)


def test_state_loads_copies_and_comes_off():
    layer = sigma_reparam(linear(), warm_up=30)
    other = sigma_reparam(linear(), warm_up=1)
    other.load_state_dict(layer.state_dict())
    assert other.eval().weight.equal(layer.eval().weight)
    assert copy.deepcopy(layer).weight.equal(layer.weight)
    last = layer.weight.clone()
    parametrize.remove_parametrizations(layer, "weight")
    assert layer.weight.equal(last) and isinstance(layer.weight, torch.nn.Parameter)


def test_half_precision_iterates_in_float32_and_zero_stays_finite():
    layer = sigma_reparam(torch.nn.Linear(5, 7).bfloat16(), warm_up=100).eval()
    assert layer.weight.dtype == torch.bfloat16
    assert layer.parametrizations.weight[0].left.dtype == torch.float32
    assert spectral(layer.weight.float()) == pytest.approx(1.0, abs=0.02)
    empty = torch.nn.Linear(3, 3)
    torch.nn.init.zeros_(empty.weight)
    assert sigma_reparam(empty).weight.eq(0).all()


def test_refusals_say_what_is_wrong():
    with pytest.raises(ValueError, match="no parameter 'kernel'"):
        sigma_reparam(linear(), "kernel")
    with pytest.raises(ValueError, match=r"float64\[7\]"):
        sigma_reparam(linear(), "bias")
