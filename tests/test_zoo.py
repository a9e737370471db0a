"""Every case of the zoo: what is planted is named, located and proven, and a clean twin raises no error."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from tests.zoo import CASES, IMPOSSIBLE, STYLES, Case, caches, judge
from torch import Tensor

from intently.faults import FAULTS
from intently.targets.target import tensors_of

PLANTED = [case for case in CASES if case.fault is not None]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    assert judge(case).complaint == ""


def first_rows_after_a_change_at_the_end(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Outputs before the last position, without a mask and with one of ones, for two inputs that differ in the last."""
    target = case.build()
    names = list(inspect.signature(target.model.forward).parameters)
    generator = torch.Generator().manual_seed(1)
    if names[0] == "input_ids":
        one = torch.randint(0, 17, (2, 9), generator=generator)
        other = torch.cat([one[:, :-1], one[:, -1:] + 1], 1)
    else:
        one = torch.randn(2, 9, target.features or 0, generator=generator)
        other = torch.cat([one[:, :-1], -one[:, -1:]], 1)
    ones = torch.ones(2, 9, dtype=torch.long)
    masks = {"attention_mask": ones, "key_padding_mask": ones == 0}
    given = [{}, *({n: masks[n]} for n in names if n in masks)]
    with torch.no_grad():
        made = [[next(tensors_of(target.model(ids, **more)))[:, :-1] for ids in (one, other)] for more in given]
    return [(first, second) for first, second in made]


# Those of the cached decoders leak only once something is cached.
IN_ONE_FORWARD = [c for c in PLANTED if c.fault == "causal-leak" and c not in caches.CASES]


@pytest.mark.parametrize("case", IN_ONE_FORWARD, ids=str)
def test_planted_leaks_are_leaks_and_their_twins_are_tight(case: Case) -> None:
    twin = next(c for c in CASES if str(c) == case.twin)
    assert any((a - b).abs().max() > 1e-4 for a, b in first_rows_after_a_change_at_the_end(case))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in first_rows_after_a_change_at_the_end(twin))


def test_every_fault_is_planted_in_two_styles_at_least_where_it_can_exist() -> None:
    planted = {(case.style, case.fault) for case in PLANTED}
    assert not planted & IMPOSSIBLE.keys()
    for fault in FAULTS:
        possible = [style for style in STYLES if (style, fault) not in IMPOSSIBLE]
        assert sum((style, fault) in planted for style in possible) >= min(2, len(possible)), fault


def test_every_planted_case_has_a_clean_twin() -> None:
    clean = {str(case) for case in CASES if case.fault is None}
    assert len(PLANTED) >= 40
    assert {case.twin for case in PLANTED} == clean


def test_a_harness_that_is_told_otherwise_complains() -> None:
    case = next(c for c in PLANTED if c.style == "matmul" and c.fault == "scale-missing")
    twin = next(c for c in CASES if str(c) == case.twin)
    found = judge(case)
    assert found.complaint == ""
    assert replace(found, fault="scale-twice").complaint.startswith("misnamed")
    assert replace(found, sites=("blocks.1.attention",)).complaint.startswith("mislocated")
    assert replace(found, fault=None, sites=()).complaint.startswith("false alarm")
    assert replace(found, errors=tuple((f, s, "suspected") for f, s, _ in found.errors)).complaint.startswith(
        "unproven"
    )
    assert replace(found, errors=(*found.errors, ("causal-leak", "x", "proven"))).complaint.startswith("named twice")
    assert replace(found, raised="no").complaint.startswith("could not be checked")
    assert replace(judge(twin), fault="scale-missing", sites=case.sites).complaint.startswith("missed")
