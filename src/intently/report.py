"""What a check found, as plain frozen data: the grid, the findings, the sites. Renderers know it; it knows no renderer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SCHEMA = "intently.report/1"

CellVerdict = Literal["kept", "broken", "not-applicable", "not-tried"]
Severity = Literal["error", "warning", "note"]
Proof = Literal["proven", "suspected"]
Verdict = Literal["kept", "broken", "unchecked"]


class BrokenPromise(AssertionError):
    """Raised by `Report.raise_if_broken`; its text is the report in words."""


@dataclass(frozen=True)
class Source:
    """A line of the user's own code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Cell:
    """One promise tried under one condition. `error` and `noise` are absolute differences of outputs, in output units."""

    promise: str
    condition: str
    verdict: CellVerdict
    error: float | None = None
    noise: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A small labelled matrix of numbers; `marked` holds the (row, column) entries that break the promise."""

    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    marked: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Witness:
    """The smallest failing case: a sentence with numbers, and where it helps the rows that show it."""

    statement: str
    table: Table | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A fault at a site, with a witness, and a proof when repairing that site restored the promise."""

    fault: str
    promise: str
    stage: str
    severity: Severity
    site: str
    message: str
    witness: Witness
    proof: Proof
    fix: str
    heads: tuple[int, ...] | None = None  # None: all heads
    source: Source | None = None
    condition: str = ""
    proof_note: str = ""  # what was repaired and what came of it, or why proof is impossible


@dataclass(frozen=True)
class SiteRecord:
    """One attention call found in the running model, described."""

    path: str
    role: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    queries: int
    keys: int
    scale: float | None
    mask: str
    kernel: str
    dtype: str
    dropout: float
    bias: str
    source: Source | None


@dataclass(frozen=True)
class Report:
    """The outcome of one check."""

    target: str
    verdict: Verdict
    intent: str
    grid: tuple[Cell, ...]
    findings: tuple[Finding, ...]
    sites: tuple[SiteRecord, ...]
    environment: Mapping[str, str]
    forwards: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True when no finding is an error."""
        return self.verdict == "kept"

    def raise_if_broken(self) -> None:
        """Raise `BrokenPromise` with the errors in words unless `ok`."""
        if self.ok:
            return
        errors = [f for f in self.findings if f.severity == "error"]
        lines = [f"{self.target}: {self.verdict}"]
        lines += [f"{f.fault} at {f.site} ({f.proof}): {f.message}" for f in errors]
        explained = {f.promise for f in self.findings}
        unnamed = {c.promise: c for c in reversed(self.grid) if c.verdict == "broken" and c.promise not in explained}
        lines += [f"{c.promise} is broken under {c.condition}" for c in unnamed.values()] if not errors else []
        raise BrokenPromise("\n".join(lines))

    def save(self, path: str | Path) -> Path:
        """Write the report whole or not at all; the suffix chooses the form (`.json`, `.svg`, `.txt`)."""
        from intently.reports.files import save

        return save(self, Path(path))
