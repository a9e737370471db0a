"""The pages on promises and faults are filled from the texts in the code."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from intently.faults.base import Fault
from intently.promises.base import Promise

DOCS = Path(__file__).parents[2] / "docs"
CATALOGUE = runpy.run_path(str(DOCS / "catalogue.py"))

CAUSAL = Promise("causal", "the future does not leak", "decoders", "change it", ("paper",), try_on=lambda trial: ())
LEAK = Fault(
    name="causal-leak",
    stage="mask",
    promises=("causal",),
    severity="error",
    summary="a query sees later keys",
    symptom="first line\nsecond line",
    why_silent="",
    fix="add the triangle",
    bad="def build(): ...\n",
    good="",
    sources=(),
    look=lambda examination: (),
)


def test_a_promise_links_to_the_faults_that_break_it():
    page = CATALOGUE["promises"]([CAUSAL], [LEAK])
    assert page.startswith("### causal { #causal }\n\nthe future does not leak")
    assert "- **Broken by:** [causal-leak](fault.md#causal-leak)" in page


def test_a_fault_links_back_and_leaves_out_what_is_empty():
    page = CATALOGUE["faults"]([LEAK])
    assert "- **Breaks:** [causal](promise.md#causal)" in page
    assert "- **Symptom:** first line\n    second line" in page
    assert "```python\ndef build(): ...\n```" in page
    assert "Why silent" not in page
    assert "Silent:" not in page


@pytest.mark.parametrize(("page", "marker"), [("promise.md", "_PROMISES"), ("fault.md", "_FAULTS")])
def test_each_page_has_the_place_that_is_filled(page, marker):
    assert (DOCS / page).read_text("utf-8").count(CATALOGUE[marker]) == 1


def test_other_pages_are_left_as_they_are():
    assert CATALOGUE["on_page_markdown"]("# Mask", page=None) == "# Mask"
