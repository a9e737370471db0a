"""The negative control of the harness: each check must find the one thing that it is there to find."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.mechanism import every_form
from tests.mechanism.every_form import Form
from torch import Tensor

from intently._typing import Float


def mean(states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The simplest form there is: every position receives the mean of those it sees."""
    if mask is None:
        return states.mean(-2, keepdim=True).expand_as(states)
    shares = mask.to(states.dtype) / mask.sum(-1, keepdim=True).clamp(min=1)
    return shares @ states


def in_numpy(states, mask=None):
    if mask is None:
        return states * 0 + states.mean(-2, keepdims=True)
    counts = mask.sum(-1, keepdims=True)
    return mask / counts.clip(min=1) @ states


SOUND = Form(
    "mean",
    mean,
    in_numpy,
    lambda draw, sizes: {"states": draw.normal(sizes.batch, sizes.keys, sizes.width)},
    wrong={"sum": lambda states, mask=None: mean(states, mask) * states.shape[-2]},
    options=lambda draw, sizes: {"plain": {}, "blind": {"mask": draw.blind(sizes.keys, sizes.keys)}},
    stages=mean,
    blind="blind",
    sizes=every_form.Sizes(queries=5, keys=5),
    projects=True,  # its mixture is a bare matrix product
)

test_a_sound_form_passes = every_form.every_check(SOUND)


def nan_gradient(states, mask=None):
    if mask is None:
        return mean(states)
    counts = mask.sum(-1, keepdim=True)
    return torch.where(counts == 0, 0.0, (mask.to(states.dtype) @ states) / (counts + 0.0 * states.sum()))


def in_half(states, mask=None):
    return mean(states.half(), mask).to(states.dtype) if states.dtype == torch.float32 else mean(states, mask)


def by_storage(states, mask=None):
    """Reads the memory where it should read the tensor."""
    return mean(torch.as_strided(states, states.shape, states.new_empty(states.shape).stride()), mask)


def data_dependent(states, mask=None):
    return mean(states, mask) if bool(states.sum() < torch.inf) else states


def wrongly_annotated(
    states: Float[Tensor, "batch length width"], mask: Tensor | None = None
) -> Float[Tensor, "batch width length"]:
    return mean(states, mask)


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        ("equals_the_oracle", {"call": lambda states, mask=None: 1.001 * mean(states, mask)}),
        ("wrong_variants_are_caught", {"wrong": {"no slip": mean}}),
        ("wrong_variants_are_caught", {"wrong": {}}),
        ("equals_our_stages", {"stages": lambda states, mask=None: states}),
        ("float32_keeps_the_values", {"call": in_half}),
        ("bfloat16_keeps_the_values", {"call": lambda states, mask=None: mean(states.float(), mask)}),
        ("float16_keeps_the_values", {"call": lambda states, mask=None: mean(states * 1e5, mask) / 1e5}),
        (
            "autocast_keeps_the_values",
            {"call": lambda states, mask=None: mean(states, mask) + 9 * torch.is_autocast_enabled("cpu")},
        ),
        ("autocast_keeps_the_values", {"projects": False}),
        ("edges_equal_the_oracle", {"call": lambda states, mask=None: mean(states, mask) / (states.shape[-1] != 1)}),
        ("annotations_hold", {"call": wrongly_annotated}),
        ("blind_rows_are_zero", {"call": nan_gradient}),
        ("gradients_are_right", {"call": nan_gradient}),
        ("gradients_are_right", {"call": lambda states, mask=None: mean(2 * states - states.detach(), mask)}),
        ("strides_do_not_matter", {"call": by_storage}),
        ("vmap_equals_a_loop", {"call": data_dependent}),
        ("compiles_in_one_graph", {"call": data_dependent}),
    ],
)
def test_a_broken_form_is_caught(check, broken):
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        getattr(every_form, check)(replace(SOUND, **broken))


def dot_product(query, key, value, inside=torch.float32):
    exact = torch.float64 if query.dtype == torch.float64 else inside
    scores = query.to(exact) @ key.to(exact).mT / query.shape[-1] ** 0.5
    return (scores.softmax(-1).to(exact) @ value.to(exact)).to(value.dtype)


def dot_product_in_numpy(query, key, value):
    shares = np.exp(query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1]))
    return shares / shares.sum(-1, keepdims=True) @ value


def three(draw, sizes):
    lengths = {"query": sizes.queries, "key": sizes.keys, "value": sizes.keys}
    return {name: draw.normal(sizes.batch, sizes.heads, length, sizes.width) for name, length in lengths.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_softmax_in_half_precision_is_caught(dtype):
    check = getattr(every_form, f"{str(dtype).removeprefix('torch.')}_keeps_the_values")
    sound = Form("dot product", dot_product, dot_product_in_numpy, three, wrong={})
    check(sound)
    with pytest.raises(AssertionError, match="lifted"):
        check(replace(sound, call=partial(dot_product, inside=dtype)))
