"""The rules handed to FlexAttention, run without its compiler on every form; one call compiled; what is refused."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from intently import Mask
from intently.mechanism import attention, explain_backends, reference
from intently.mechanism.backends import flex

GENERATOR = torch.Generator().manual_seed(9)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def distance(query_index: torch.Tensor, key_index: torch.Tensor) -> torch.Tensor:
    return -torch.tensor([0.5, 0.25, 0.1, 0.2])[:, None, None] * (query_index - key_index).abs()


STATES = normal(2, 4, 5, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 6)
TWO_AXES = normal(2, 3, 4, 5, 8), normal(2, 3, 2, 7, 8), normal(2, 3, 2, 7, 6)
BLIND = torch.rand(2, 1, 5, 7, generator=GENERATOR) > 0.4
BLIND[0, :, 1] = False
FORMS = {
    "plain": (STATES, {}),
    "scale": (STATES, {"scale": 0.3}),
    "causal": (STATES, {"mask": Mask.causal()}),
    "bottom-right window": (STATES, {"mask": (Mask.causal() & Mask.window(2)).bottom_right()}),
    "padding": (STATES, {"mask": Mask.padding([3, 7], side="left")}),
    "documents": (STATES, {"mask": Mask.documents(3, 4)}),
    "per head": (STATES, {"mask": Mask.per_head(*map(Mask.window, (1, 2, 3, 4)))}),
    "mask": (STATES, {"mask": BLIND}),
    "mask per key": (STATES, {"mask": BLIND[0, 0, 0]}),
    "bias": (STATES, {"bias": normal(4, 5, 7)}),
    "bias per key": (STATES, {"bias": normal(2, 1, 1, 7), "mask": BLIND}),
    "bias by rule": (STATES, {"bias": distance}),
    "softcap": (STATES, {"softcap": 0.8}),
    "sink": (STATES, {"sink": normal(4)}),
    "sink and mask": (STATES, {"sink": normal(4), "mask": BLIND}),
    "all": (STATES, {"sink": normal(4), "mask": Mask.causal(), "softcap": 1.5, "bias": distance, "scale": 0.5}),
    "two batch axes": (TWO_AXES, {"mask": BLIND[:, None], "bias": normal(3, 4, 1, 7), "sink": 0.5}),
    "two batch axes, causal": (TWO_AXES, {"mask": Mask.causal()}),
    "no head axis": ((normal(3, 5, 8), normal(3, 7, 8), normal(3, 7, 2)), {"mask": Mask.causal()}),
    "half": (tuple(tensor.half() for tensor in STATES), {"mask": BLIND, "sink": 0.5}),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(("tensors", "options"), FORMS.values(), ids=FORMS.keys())
def test_rules_equal_the_reference(tensors, options, monkeypatch):
    monkeypatch.setattr(flex, "_kernel", lambda: flex_attention)
    output = attention(*tensors, **options, backend="flex")
    assert output.dtype == tensors[2].dtype
    bound = 8 * torch.finfo(output.dtype).eps
    assert (output.double() - reference(*tensors, **options).output).abs().max() < bound


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_negative_control_a_lost_rule_is_seen(monkeypatch):
    monkeypatch.setattr(flex, "_kernel", lambda: flex_attention)
    tensors, options = FORMS["all"]
    for lost in options:
        less = {name: value for name, value in options.items() if name != lost}
        apart = attention(*tensors, **less, backend="flex") - reference(*tensors, **options).output
        assert apart.abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled():
    tensors, options = FORMS["all"]
    torch._dynamo.reset()
    torch.testing.assert_close(
        attention(*tensors, **options, backend="flex").double(),
        reference(*tensors, **options).output,
        rtol=0,
        atol=2e-6,
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"query": STATES[0].double(), "key": STATES[1].double(), "value": STATES[2].double()}, "float64[2, 4, 5, 8]"),
        ({"query": STATES[0].clone().requires_grad_()}, "no backward pass"),
        ({"dropout": 0.1}, "no dropout"),
        ({"key": STATES[1][:, :, :0], "value": STATES[2][:, :, :0]}, "an axis is empty"),
    ],
    ids=["float64", "gradient", "dropout", "no keys"],
)
def test_refusals(change, reason):
    arguments = {**dict(zip(("query", "key", "value"), STATES, strict=True)), **change}
    answer = {verdict.name: verdict for verdict in explain_backends(**arguments)}["flex"]
    assert not answer.can and reason in answer.reason
    with pytest.raises(ValueError, match='backend="flex" cannot compute this'):
        attention(**arguments, backend="flex")


def test_refuses_a_rule_too_large_to_write_out():
    states = torch.zeros(1, 1, 1, 8).expand(1, 4, 4096, 8)
    answers = {verdict.name: verdict.reason for verdict in explain_backends(states, states, states, bias=distance)}
    assert "64 MiB a head" in answers["flex"]
