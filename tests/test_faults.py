"""The texts of faults and promises: the bad example is flagged by name, the good one is silent, nothing is empty."""

from __future__ import annotations

import re
import types

import pytest
import torch

import intently
from intently import Report, Target
from intently.faults import FAULTS
from intently.promises import PROMISES

# Promises that only notes are told about: code that is right may cost more than it needs to.
INFORMING = {p for p in PROMISES if all(f.severity == "note" for f in FAULTS.values() if p in f.promises)}
STAGES = {"project", "score", "mask", "scale", "normalize", "aggregate", "outside"}


def build(name: str, text: str) -> Target:
    """What `build()` of an example's text returns, run as a module of its own."""
    module = types.ModuleType(name.replace("-", "_"))
    exec(compile(text, f"<{name}>", "exec"), module.__dict__)
    return module.build()


def checked(name: str, text: str) -> Report:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        return intently.check(build(name, text))


# Faults that no repair can prove: the finding says why.
UNPROVABLE = {"order-blind"}


@pytest.mark.parametrize("name", FAULTS)
def test_bad_is_flagged(name: str) -> None:
    report = checked(name, FAULTS[name].bad)
    findings = [f for f in report.findings if f.severity == FAULTS[name].severity]
    proof = "suspected" if name in UNPROVABLE else "proven"
    assert [(f.fault, f.severity, f.proof) for f in findings] == [(name, FAULTS[name].severity, proof)]
    assert all(f.proof_note for f in findings)


@pytest.mark.parametrize("name", FAULTS)
def test_good_is_silent(name: str) -> None:
    report = checked(name, FAULTS[name].good)
    assert [(f.fault, f.message) for f in report.findings if f.severity != "note" or f.fault == name] == []
    assert report.ok
    assert [c for c in report.grid if c.verdict == "broken" and c.promise not in INFORMING] == []


@pytest.mark.parametrize("name", FAULTS)
def test_bad_and_good_differ_by_a_few_lines(name: str) -> None:
    bad, good = (text.strip().splitlines() for text in (FAULTS[name].bad, FAULTS[name].good))
    assert bad != good
    assert len(set(bad) ^ set(good)) <= 8


@pytest.mark.parametrize("name", FAULTS)
def test_texts_of_faults(name: str) -> None:
    fault = FAULTS[name]
    assert fault.name == name
    assert re.fullmatch(r"[a-z-]+", name)
    assert fault.stage in STAGES
    assert fault.severity in ("error", "warning", "note")
    for text in (fault.summary, fault.symptom, fault.why_silent, fault.fix):
        assert text == text.strip()
        assert text.endswith(".")
        assert "  " not in text
    assert "\n" not in fault.summary
    assert fault.promises
    assert set(fault.promises) <= PROMISES.keys()
    assert fault.sources
    assert all(fault.sources)
    assert fault.since


@pytest.mark.parametrize("name", PROMISES)
def test_texts_of_promises(name: str) -> None:
    promise = PROMISES[name]
    assert promise.name == name
    assert re.fullmatch(r"[a-z-]+", name)
    for text in (promise.statement, promise.how):
        assert text == text.strip()
        assert text.endswith(".")
        assert "  " not in text
    assert promise.applies_to
    assert promise.sources
    assert all(promise.sources)
    assert promise.since


def test_every_promise_is_broken_by_some_fault() -> None:
    assert {p for fault in FAULTS.values() for p in fault.promises} == PROMISES.keys()


def test_an_example_that_is_not_flagged_would_be_noticed() -> None:
    """The good text in place of the bad one: the test above must not pass on it."""
    report = checked("scale-missing", FAULTS["scale-missing"].good)
    assert "scale-missing" not in [f.fault for f in report.findings]
