"""The survey's table says what the rows say, and its variants turn switches that the types have."""

from __future__ import annotations

import json

from benchmarks import survey

from intently.targets import huggingface

BROKEN = {
    "name": "a", "class": "A", "verdict": "broken", "intent": "causal", "forwards": 90, "seconds": 3.0, "unnamed": [],
    "findings": [
        {"fault": "causal-leak", "site": "x.0", "severity": "error", "proof": "proven", "condition": ""},
        {"fault": "causal-leak", "site": "x.1", "severity": "error", "proof": "proven", "condition": ""},
        {"fault": "slow-path", "site": "x.1", "severity": "note", "proof": "proven", "condition": ""},
    ],
}  # fmt: skip
KEPT = {"name": "b", "class": "B", "verdict": "kept", "intent": "full", "forwards": 70, "seconds": 1.0, "findings": []}
NOT_BUILT = {"name": "c", "why": "it needs a package"}


def test_errors_of_one_fault_are_told_together() -> None:
    assert survey.errors(BROKEN) == ["causal-leak at x.0 and 1 more (proven)"]
    assert survey.errors({**KEPT, "unnamed": ["causal is broken, and no fault known here explains it"]}) != []
    assert survey.errors(NOT_BUILT) == []


def test_the_table_counts_and_puts_errors_first() -> None:
    text = survey.table([NOT_BUILT, KEPT, BROKEN])
    assert "3 names, 2 built and checked: 1 kept, 1 broken, 0 unchecked; median check 3.0 s" in text
    assert text.index("| a |") < text.index("| b |") < text.index("| c |")
    assert "it needs a package" in text


def test_variants_turn_switches_that_exist() -> None:
    found = list(survey.variants("falcon"))
    assert "falcon?alibi=true" in found
    assert all(name.startswith("falcon?") for name in found)
    config = huggingface.building._default_config("falcon")
    for name in found:
        fields = dict(part.split("=") for part in name.partition("?")[2].split("&"))
        assert any(getattr(config, field) != json.loads(value) for field, value in fields.items())


def test_one_type_that_cannot_be_built_says_why() -> None:
    assert "no model type" in survey.one("nothing-like-it")["why"]


def test_a_type_that_is_a_decoder_too_is_tried_as_one() -> None:
    assert {"roberta/RobertaForCausalLM?is_decoder=true", "bart/BartForCausalLM"} <= {
        *survey.variants("roberta"),
        *survey.variants("bart"),
    }
    assert not [v for v in survey.variants("llama") if "/" in v]
