"""Laws that hold for any input: order of keys, shifts of a row, hidden keys, sums of weights."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intently.mechanism import attention, stages

BACKENDS = pytest.mark.parametrize("backend", ["stages", "fused", "blocked"])
SMALL = settings(max_examples=25, deadline=None, derandomize=True)


class Case(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor
    bias: torch.Tensor
    generator: torch.Generator

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value


@st.composite
def cases(draw) -> Case:
    """Shapes and the density of the mask are Hypothesis's to choose and shrink; contents follow from a seed."""
    batch, kv_heads, group, queries, keys, width, value_width = (draw(st.integers(1, 4)) for _ in range(7))
    seen = draw(st.floats(0.0, 1.0))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    plane = (batch, kv_heads * group, queries, keys)
    return Case(
        normal(batch, kv_heads * group, queries, width),
        normal(batch, kv_heads, keys, width),
        normal(batch, kv_heads, keys, value_width),
        torch.rand(plane, generator=generator) < seen,
        normal(*plane),
        generator,
    )


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-9, atol=1e-12)


@BACKENDS
@SMALL
@given(case=cases())
def test_the_order_of_keys_does_not_matter(backend, case):
    order = torch.randperm(case.key.shape[-2], generator=case.generator)
    moved = attention(
        case.query,
        case.key[..., order, :],
        case.value[..., order, :],
        mask=case.mask[..., order],
        bias=case.bias[..., order],
        backend=backend,
    )
    assert same(moved, attention(*case.tensors, mask=case.mask, bias=case.bias, backend=backend))


@BACKENDS
@SMALL
@given(case=cases(), shift=st.floats(-50.0, 50.0))
def test_a_constant_added_to_a_row_changes_nothing(backend, case, shift):
    rows = shift * torch.randn(*case.bias.shape[:-1], 1, generator=case.generator, dtype=torch.float64)
    shifted = attention(*case.tensors, mask=case.mask, bias=case.bias + rows, backend=backend)
    assert torch.allclose(
        shifted, attention(*case.tensors, mask=case.mask, bias=case.bias, backend=backend), rtol=1e-7, atol=1e-9
    )


@BACKENDS
@SMALL
@given(case=cases())
def test_hidden_keys_have_no_influence(backend, case):
    hidden = ~case.mask.any(dim=(0, 1, 2))  # keys that no query of any sample may see
    key, value = case.key.clone(), case.value.clone()
    key[..., hidden, :], value[..., hidden, :] = 1e3, -1e3
    changed = attention(case.query, key, value, mask=case.mask, backend=backend)
    assert torch.equal(changed, attention(*case.tensors, mask=case.mask, backend=backend))


@SMALL
@given(case=cases())
def test_weights_sum_to_one_or_to_zero(case):
    weights = stages(*case.tensors, mask=case.mask, bias=case.bias).weights
    sums = weights.sum(dim=-1)
    assert torch.allclose(sums, case.mask.any(dim=-1).double())
    assert (weights >= 0).all() and (weights[~case.mask] == 0).all()
    with_sink = stages(*case.tensors, mask=case.mask, bias=case.bias, sink=0.0).weights.sum(dim=-1)
    assert ((with_sink < 1) & (with_sink <= sums)).all()


@SMALL
@given(case=cases())
def test_backends_agree(case):
    left = attention(*case.tensors, mask=case.mask, bias=case.bias, backend="stages")
    assert same(left, attention(*case.tensors, mask=case.mask, bias=case.bias, backend="fused"))


def test_negative_control_a_seen_key_does_have_influence():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    moved = value.clone()
    moved[..., 2, :] += 1.0
    assert not same(attention(query, key, value), attention(query, key, moved))
    bias = torch.zeros(3, 3, dtype=torch.float64)
    bias[:, 0] = 1.0  # constant along the queries, not along the keys
    assert not same(attention(query, key, value), attention(query, key, value, bias=bias))
