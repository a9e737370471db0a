"""A report as JSON, schema `intently.report/1`, and back. `schema.json` beside this file is the contract."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from numbers import Integral, Real
from typing import Any

from intently.report import SCHEMA, Cell, Finding, Report, SiteRecord, Source, Table, Witness

_NOT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that `to_json` keeps.

    >>> schema()["properties"]["schema"]["const"]
    'intently.report/1'
    """
    return json.loads(files("intently.reports").joinpath("schema.json").read_text("utf-8"))


def dumps(report: Report) -> str:
    """The report as text: valid JSON, two spaces of indent, ending in a newline."""
    return json.dumps(to_json(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON values. Numbers that JSON lacks become "NaN", "Infinity" and "-Infinity"."""
    return {
        "schema": SCHEMA,
        "target": report.target,
        "verdict": report.verdict,
        "intent": report.intent,
        "grid": [
            {
                "promise": cell.promise,
                "condition": cell.condition,
                "verdict": cell.verdict,
                "error": _number(cell.error),
                "noise": _number(cell.noise),
                "note": cell.note,
            }
            for cell in report.grid
        ],
        "findings": [_finding(finding) for finding in report.findings],
        "sites": [_site(site) for site in report.sites],
        "environment": {name: str(value) for name, value in report.environment.items()},
        "forwards": report.forwards,
        "seconds": _number(report.seconds),
        "notes": list(report.notes),
    }


def from_json(data: Mapping[str, Any]) -> Report:
    """The report that `to_json` wrote. Raises ValueError for another schema.

    The values of a witness come back as JSON has them: a tuple as a list.
    """
    if data.get("schema") != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA!r}, got {data.get('schema')!r}")
    return Report(
        target=data["target"],
        verdict=data["verdict"],
        intent=data["intent"],
        grid=tuple(
            Cell(**{**cell, "error": _float(cell["error"]), "noise": _float(cell["noise"])}) for cell in data["grid"]
        ),
        findings=tuple(_read_finding(finding) for finding in data["findings"]),
        sites=tuple(_read_site(site) for site in data["sites"]),
        environment=dict(data["environment"]),
        forwards=data["forwards"],
        seconds=_need(data["seconds"]),
        notes=tuple(data["notes"]),
    )


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "fault": finding.fault,
        "promise": finding.promise,
        "stage": finding.stage,
        "severity": finding.severity,
        "site": finding.site,
        "heads": None if finding.heads is None else list(finding.heads),
        "source": _source(finding.source),
        "message": finding.message,
        "witness": {
            "statement": finding.witness.statement,
            "table": _table(finding.witness.table),
            "values": {str(name): _plain(value) for name, value in finding.witness.values.items()},
        },
        "proof": finding.proof,
        "proof_note": finding.proof_note,
        "condition": finding.condition,
        "fix": finding.fix,
    }


def _site(site: SiteRecord) -> dict[str, Any]:
    return {
        "path": site.path,
        "role": site.role,
        "heads": site.heads,
        "kv_heads": site.kv_heads,
        "head_dim": site.head_dim,
        "value_dim": site.value_dim,
        "queries": site.queries,
        "keys": site.keys,
        "scale": _number(site.scale),
        "mask": site.mask,
        "kernel": site.kernel,
        "dtype": site.dtype,
        "dropout": _number(site.dropout),
        "bias": site.bias,
        "source": _source(site.source),
    }


def _source(source: Source | None) -> dict[str, Any] | None:
    return None if source is None else {"file": source.file, "line": source.line}


def _table(table: Table | None) -> dict[str, Any] | None:
    if table is None:
        return None
    return {
        "corner": table.corner,
        "columns": list(table.columns),
        "rows": [{"name": name, "values": [_number(value) for value in values]} for name, values in table.rows],
        "marked": [list(at) for at in table.marked],
    }


def _read_finding(data: Mapping[str, Any]) -> Finding:
    witness, heads = data["witness"], data["heads"]
    fields = {
        **data,
        "heads": None if heads is None else tuple(heads),
        "source": _read_source(data["source"]),
        "witness": Witness(witness["statement"], _read_table(witness["table"]), dict(witness["values"])),
    }
    return Finding(**fields)


def _read_site(data: Mapping[str, Any]) -> SiteRecord:
    fields = {
        **data,
        "scale": _float(data["scale"]),
        "dropout": _need(data["dropout"]),
        "source": _read_source(data["source"]),
    }
    return SiteRecord(**fields)


def _read_source(data: Mapping[str, Any] | None) -> Source | None:
    return None if data is None else Source(data["file"], data["line"])


def _read_table(data: Mapping[str, Any] | None) -> Table | None:
    if data is None:
        return None
    return Table(
        corner=data["corner"],
        columns=tuple(data["columns"]),
        rows=tuple((row["name"], tuple(_need(value) for value in row["values"])) for row in data["rows"]),
        marked=tuple((row, column) for row, column in data["marked"]),
    )


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return None if value is None else float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _float(value: float | str | None) -> float | None:
    return _NOT_NUMBERS[value] if isinstance(value, str) else value


def _need(value: float | str) -> float:
    return _NOT_NUMBERS[value] if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """What JSON can hold: containers and numbers as such, anything else as its text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return _number(float(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
