"""Public cases: the table is whole, a report is held against what its release deserves, an environment borrows packages."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from benchmarks.cases import __main__ as program
from benchmarks.cases import environment
from benchmarks.cases.case import Case, right
from benchmarks.cases.table import CASES

FAULTY = [{"fault": "causal-leak", "severity": "error"}]
NOTED = [{"fault": "causal-leak", "severity": "note"}]
OTHER = [{"fault": "scale-missing", "severity": "error"}]


def test_a_faulty_release_must_be_flagged_under_its_name() -> None:
    case = Case("x", "somebody#1", "causal-leak", "package==1.0", "package==1.1")
    assert right(case, "faulty", FAULTY)
    assert not right(case, "faulty", OTHER)
    assert not right(case, "faulty", NOTED)
    assert not right(case, "faulty", [])


def test_a_fixed_release_must_not() -> None:
    case = Case("x", "somebody#1", "causal-leak", "package==1.0", "package==1.1")
    assert not right(case, "fixed", FAULTY)
    assert right(case, "fixed", OTHER)
    assert right(case, "fixed", [])
    assert case.releases() == (("faulty", "package==1.0"), ("fixed", "package==1.1"))


def test_a_release_that_cannot_be_installed_is_neither_right_nor_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object, **__: object) -> Path:
        raise environment.CannotInstall("no such wheel")

    written: list[str] = []
    monkeypatch.setattr(program, "interpreter", refused)
    monkeypatch.setattr(program, "CASES", (Case("x", "somebody#1", "causal-leak", "package==1.0", "package==1.1"),))
    monkeypatch.setattr(program.written, "write", lambda name, text: written.append(text))
    monkeypatch.setattr(sys, "argv", ["cases", "--folder", str(tmp_path)])
    assert program.main() == 0
    assert "0 of 0 checks say what they should; 2 releases cannot be installed here" in written[0]
    assert capsys.readouterr().out.count("no such wheel") == 2


def test_every_case_has_a_model_that_builds_a_target_and_a_reason_where_no_release_is_fixed() -> None:
    assert len({c.name for c in CASES}) == len(CASES) >= 18
    for case in CASES:
        functions = [n.name for n in ast.parse(case.file.read_text()).body if isinstance(n, ast.FunctionDef)]
        assert "build" in functions
        assert case.fixed or case.why


def test_an_environment_borrows_what_it_does_not_have(tmp_path: Path) -> None:
    site = tmp_path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    (site / "site-packages").mkdir(parents=True)
    environment._borrow(tmp_path)
    borrowed = (site / "site-packages" / "borrowed.pth").read_text().strip()
    assert (Path(borrowed) / "torch").is_dir()
