"""Every case of the zoo: what is planted is named, located and proven, and a clean twin raises no error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.zoo import CASES, IMPOSSIBLE, STYLES, Case, judge

from intently.faults import FAULTS

PLANTED = [case for case in CASES if case.fault is not None]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    assert judge(case).complaint == ""


def test_every_fault_is_planted_in_every_style_where_it_can_exist() -> None:
    planted = {(case.style, case.fault) for case in PLANTED}
    wanted = {(style, fault) for style in STYLES for fault in FAULTS}
    assert planted == wanted - IMPOSSIBLE.keys()


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
