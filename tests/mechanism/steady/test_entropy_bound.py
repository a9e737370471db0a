"""The entropy bound: never broken by any logits, reached by the paper's, and derived anew by a search."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intently.mechanism import stages
from intently.mechanism.steady import entropy_bound, row_entropy

SMALL = settings(max_examples=60, deadline=None, derandomize=True)


def spectral(logits: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(logits, ord=2)


def entropy_in_numpy(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=-1)


def theorem(sigma: float, count: int) -> float:
    """Theorem 3.1 as printed, in plain Python."""
    beta = math.exp(-sigma * math.sqrt(count / (count - 1)))
    rest = 1 + (count - 1) * beta
    return math.log(rest) + sigma * math.sqrt(count * (count - 1)) * beta / rest


def extremal(sigma: float, count: int) -> torch.Tensor:
    """One key favoured, the others alike, sum 0, norm sigma."""
    logits = torch.full((count,), -sigma / math.sqrt(count * (count - 1)), dtype=torch.float64)
    logits[0] = sigma * math.sqrt((count - 1) / count)
    return logits


def test_row_entropy_by_hand():
    weights = torch.tensor([[0.25] * 4, [0.5, 0.5, 0, 0], [1.0, 0, 0, 0], [0.0, 0, 0, 0], [0.5, 0.25, 0.25, 0]])
    expected = [math.log(4), math.log(2), 0, 0, 1.5 * math.log(2)]
    assert row_entropy(weights).tolist() == pytest.approx(expected)
    assert row_entropy(weights.bfloat16()).dtype == torch.float32
    logits = torch.randn(3, 4, 5, dtype=torch.float64)
    np.testing.assert_allclose(row_entropy(logits.softmax(dim=-1)).numpy(), entropy_in_numpy(logits.numpy()))


def test_row_entropy_has_finite_gradients_where_keys_are_hidden():
    logits = torch.tensor([[1.0, 2.0, -torch.inf], [3.0, -torch.inf, -torch.inf]], requires_grad=True)
    row_entropy(logits.softmax(dim=-1)).sum().backward()
    assert logits.grad.isfinite().all()
    weights = torch.rand(2, 3, dtype=torch.float64).add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(row_entropy, weights)


@SMALL
@given(
    rows=st.integers(1, 6),
    count=st.integers(2, 12),
    rank=st.integers(1, 4),
    size=st.floats(-3, 4),
    seed=st.integers(0, 2**16),
)
def test_no_row_is_ever_below_the_bound(rows, count, rank, size, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(n, rank, generator=generator, dtype=torch.float64) for n in (rows, count))
    logits = left @ right.mT * 2.0**size
    least = entropy_in_numpy(logits.numpy()).min()
    assert least >= entropy_bound(spectral(logits), count).item() - 1e-12
    centred = logits - logits.mean(dim=-1, keepdim=True)  # a smaller norm for the same rows
    assert least >= entropy_bound(spectral(centred), count).item() - 1e-12
    assert entropy_bound(spectral(centred), count) >= entropy_bound(spectral(logits), count) - 1e-12


@pytest.mark.parametrize("count", [2, 3, 8, 100])
@pytest.mark.parametrize("sigma", [0.0, 0.1, 1.0, 3.0, 10.0, 30.0])
def test_equals_the_theorem_and_is_reached(sigma, count):
    bound = entropy_bound(sigma, count).item()
    assert bound == pytest.approx(theorem(sigma, count), rel=1e-12, abs=1e-14)
    logits = extremal(sigma, count)
    assert logits.norm().item() == pytest.approx(sigma)
    assert row_entropy(logits.softmax(dim=0)).item() == pytest.approx(bound, rel=1e-9, abs=1e-12)
    # As a matrix of rank one with all its norm in that row, the spectral norm is sigma as well: the bound is tight.
    matrix = torch.stack([logits, torch.zeros(count, dtype=torch.float64)])
    assert spectral(matrix).item() == pytest.approx(sigma)
    # The control: a norm a tenth too small would be broken by these logits.
    assert sigma == 0 or bound < entropy_bound(0.9 * sigma, count).item()


@pytest.mark.parametrize(("sigma", "count"), [(0.5, 3), (2.0, 5), (4.0, 8)])
def test_a_search_finds_nothing_lower(sigma, count):
    # Derived anew: gradient descent on the entropy of 64 vectors of length sigma ends at the bound, not below.
    logits = torch.randn(64, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(300):
        logits = sigma * torch.nn.functional.normalize(logits, dim=-1)
        logits.requires_grad_()
        (slope,) = torch.autograd.grad(row_entropy(logits.softmax(dim=-1)).sum(), logits)
        logits = (logits - slope * sigma / slope.norm(dim=-1, keepdim=True).clamp(min=1e-12) * 0.1).detach()
    least = row_entropy((sigma * torch.nn.functional.normalize(logits, dim=-1)).softmax(dim=-1)).min().item()
    assert least == pytest.approx(theorem(sigma, count), rel=1e-3)
    assert least >= theorem(sigma, count) - 1e-9


def test_falls_with_the_norm_and_holds_for_rows_that_see_part():
    sigmas = torch.linspace(0, 40, 50)
    assert (entropy_bound(sigmas, 16).diff() < 0).all()
    states = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    seen = stages(states, states, states, mask=torch.ones(6, 6).tril().bool())
    everything = seen.scores / math.sqrt(8)
    bound = entropy_bound(spectral(everything)[..., None], torch.arange(1, 7))
    assert (row_entropy(seen.weights) >= bound - 1e-12).all()
    assert bound[..., 0].eq(0).all()
    # The control: the total number of keys is too many for the first rows.
    assert (row_entropy(seen.weights)[..., 0] < entropy_bound(0.1, 6)).all()


def test_refuses_a_negative_norm():
    with pytest.raises(ValueError, match=r"norm is -1\.0"):
        entropy_bound(-1.0, 4)
