"""A model built upon a released class is held to that class's factors, layer by layer."""

from __future__ import annotations

import copy

import pytest
import torch

import intently
from intently.targets import huggingface, published
from intently.targets.huggingface_build import build


def someone_elses(model: torch.nn.Module) -> torch.nn.Module:
    """The same model as an instance of a class that its user wrote."""
    model = copy.deepcopy(model)
    model.__class__ = type("Mine", (type(model),), {"__module__": "mine"})
    return model


@pytest.mark.parametrize(("model_type", "factor"), [("t5", 1.0), ("gpt_neo", 1.0), ("llama", 8**-0.5)])
def test_factors_are_those_of_the_released_class(model_type: str, factor: float) -> None:
    model = someone_elses(build(model_type).model)
    target = huggingface.from_model(model)
    assert not target.known
    assert target.intent is not None
    assert target.intent.scales
    width = next(s.head_dim for s in target.sites())
    expected = factor if model_type != "llama" else width**-0.5
    assert all(value == pytest.approx(expected, rel=1e-4) for value in target.intent.scales.values())


def test_a_released_class_is_not_held_to_anything() -> None:
    model = build("llama").model
    assert not published.is_own(model)
    assert huggingface.from_model(model).known
    model.model.layers[1].mlp = someone_elses(model.model.layers[1].mlp)
    assert published.is_own(model)


def test_one_layer_that_was_changed_is_found() -> None:
    model = someone_elses(build("llama").model)
    model.model.layers[1].self_attn.scaling = 1.0
    report = intently.check(model, select=["scaled"])
    assert [(f.fault, f.site, f.proof) for f in report.findings] == [
        ("scale-missing", "model.layers.1.self_attn", "proven")
    ]


def test_a_factor_that_was_published_is_no_fault_though_it_is_unusual() -> None:
    report = intently.check(someone_elses(build("t5").model), select=["scaled"])
    assert [f.fault for f in report.findings] == []
    assert {c.verdict for c in report.grid if c.promise == "scaled"} >= {"kept"}
