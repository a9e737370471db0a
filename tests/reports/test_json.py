"""The JSON form: valid by its schema, valid JSON, and back again; the schema refuses what is wrong."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reports.made import ALL, BROKEN, HARD

from intently.report import SCHEMA, Cell, Report, Witness
from intently.reports.json import dumps, from_json, schema, to_json

VALIDATOR = jsonschema.Draft202012Validator(schema())


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_the_schema_is_a_schema_of_the_version_it_names():
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["properties"]["schema"]["const"] == SCHEMA == "intently.report/1"


@pytest.mark.parametrize("report", ALL)
def test_every_report_is_valid_by_the_schema(report):
    VALIDATOR.validate(json.loads(dumps(report), parse_constant=refuse))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.update(schema="intently.report/2"),
        lambda data: data.update(verdict="fine"),
        lambda data: data.update(surprise=1),
        lambda data: data.pop("grid"),
        lambda data: data["grid"][0].update(error="much"),
        lambda data: data["findings"][0].update(severity="fatal"),
        lambda data: data["findings"][0].update(heads=[-1]),
        lambda data: data["findings"][0]["source"].pop("line"),
        lambda data: data["findings"][0]["witness"].pop("statement"),
        lambda data: data["sites"][0].update(heads="8"),
        lambda data: data["environment"].update(torch=2.13),
    ],
)
def test_the_schema_refuses_a_spoiled_report(spoil):
    data = copy.deepcopy(to_json(BROKEN))
    VALIDATOR.validate(data)
    spoil(data)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(data)


def test_the_fields_the_command_line_promises():
    data = to_json(BROKEN)
    assert set(data) >= {"target", "verdict", "intent", "grid", "findings", "sites", "environment"}
    assert set(data["grid"][0]) >= {"promise", "condition", "verdict", "error", "noise"}
    assert set(data["findings"][0]) >= {
        *("fault", "promise", "stage", "severity", "site", "heads", "source", "message", "witness", "proof", "fix"),
    }
    assert set(data["findings"][0]["source"]) == {"file", "line"}
    assert set(data["sites"][0]) >= {
        *("path", "role", "heads", "kv_heads", "head_dim", "scale", "mask", "kernel", "source"),
    }


def test_what_json_has_no_number_for():
    grid = to_json(HARD)["grid"]
    assert [cell["error"] for cell in grid] == ["NaN", "Infinity"]
    assert [cell["noise"] for cell in grid] == [0.0, None]
    read = from_json(json.loads(dumps(HARD)))
    assert str(read.grid[0].error) == "nan"
    assert read.grid[1].error == float("inf")


def test_witness_values_become_plain_json():
    numpy = pytest.importorskip("numpy")
    values = {"n": numpy.int64(3), "x": numpy.float32(0.5), "at": (1, 2), "who": Path("a"), "bad": float("nan")}
    finding = replace(BROKEN.findings[1], witness=Witness("w", None, values))
    plain = to_json(replace(BROKEN, findings=(finding,)))["findings"][0]["witness"]["values"]
    assert plain == {"n": 3, "x": 0.5, "at": [1, 2], "who": "a", "bad": "NaN"}


@pytest.mark.parametrize("report", [r for r in ALL if r is not HARD])
def test_a_report_comes_back(report):
    again = from_json(json.loads(dumps(report)))
    assert to_json(again) == to_json(report)
    assert again.grid == report.grid
    assert again.sites == report.sites
    assert [f.witness.table for f in again.findings] == [f.witness.table for f in report.findings]


def test_another_schema_is_refused():
    with pytest.raises(ValueError, match=r"expected schema 'intently.report/1', got 'other/1'"):
        from_json({**to_json(BROKEN), "schema": "other/1"})


number = st.none() | st.floats()
cells = st.builds(
    Cell,
    promise=st.from_regex(r"\A[a-z][a-z0-9-]*\Z"),
    condition=st.text(),
    verdict=st.sampled_from(["kept", "broken", "not-applicable", "not-tried"]),
    error=number,
    noise=number,
    note=st.text(),
)


@given(st.lists(cells, max_size=4))
def test_any_grid_is_valid_and_comes_back(grid):
    report = Report("t", "unchecked", "", tuple(grid), (), (), {}, 0, 0.0)
    data = json.loads(dumps(report), parse_constant=refuse)
    VALIDATOR.validate(data)
    assert repr(from_json(data).grid) == repr(report.grid)  # repr: nan is not equal to itself


def test_the_documentation_tells_every_field_in_the_words_of_the_schema():
    page = (Path(__file__).parents[2] / "docs" / "report-schema.md").read_text("utf-8")

    def fields(part):
        for name, field in part.get("properties", {}).items():
            yield name, field["description"]

    shipped = schema()
    for part in (shipped, *shipped["$defs"].values()):
        for name, description in fields(part):
            assert f"| `{name}` |" in page, name
            assert f"| {description} |" in page, name
