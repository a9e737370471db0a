"""The command line as a person meets it: statuses, streams, sentences. The check itself is stood in for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from tests.reports.made import BROKEN, KEPT, UNCHECKED
from typer.testing import CliRunner

import intently
from intently import cli
from intently.errors import CannotCheck
from intently.faults.base import Fault
from intently.promises.base import Promise

SRC = Path(__file__).parents[1] / "src"

CAUSAL = Promise("causal", "outputs up to t do not change", "decoders", "change what follows", ("paper",), lambda t: ())
LEAK = Fault(
    name="causal-leak",
    stage="mask",
    promises=("causal",),
    severity="error",
    summary="a query sees later keys",
    symptom="the loss is too good",
    why_silent="it looks like skill",
    fix="add the triangle",
    bad="def build():\n    return 'bad [1]'",
    good="def build():\n    return 'good'",
    sources=("issue",),
    look=lambda examination: (),
)


@pytest.fixture
def stand_in(monkeypatch):
    """A check that gives `world.report`, or raises it, and remembers how it was called."""
    world = types.SimpleNamespace(report=KEPT, seen={}, during=lambda: None)

    def load(text, **options):
        world.seen.update(text=text, **options)
        return types.SimpleNamespace(sites=lambda: KEPT.sites)

    def check(target, **options):
        world.seen.update(options)
        print("the model talks")
        world.during()
        if isinstance(world.report, BaseException):
            raise world.report
        return world.report

    for name, content in {
        "targets": {"load": load},
        "check": {"check": check},
        "promises": {"PROMISES": {"causal": CAUSAL}},
        "faults": {"FAULTS": {"causal-leak": LEAK}},
    }.items():
        module = types.ModuleType(f"intently.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"intently.{name}", module)
        monkeypatch.setattr(intently, name, module, raising=False)
    return world


def run(*arguments, **environment):
    return CliRunner().invoke(cli.app, list(arguments), env=environment, prog_name="intently")


def program(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "intently", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(SRC), **environment},
    )


# --- without torch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["--version"]])
def test_help_starts_without_torch(arguments):
    code = f"""
import sys
from intently.cli import app
try:
    app({arguments!r}, prog_name="intently")
except SystemExit as end:
    assert end.code == 0, end.code
heavy = [name for name in ("torch", "numpy", "transformers") if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SRC)}
    )
    assert done.returncode == 0, done.stderr


def test_importing_is_free_and_names_are_there():
    code = "import sys, intently; assert 'torch' not in sys.modules; print(intently.__version__, *dir(intently))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SRC)}
    )
    assert done.returncode == 0, done.stderr
    assert {"check", "sites", "Mask", "Intent", "Target", "Report"} <= set(done.stdout.split())


def test_an_unknown_name_is_told_with_those_there_are():
    with pytest.raises(AttributeError, match=r"no attribute 'chekc'; it has .*check"):
        intently.chekc  # type: ignore[attr-defined]


def test_python_dash_m_is_the_program():
    done = program("--version")
    assert (done.returncode, done.stdout) == (0, f"intently {intently.__version__}\n")


# --- statuses and streams --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("report", "status"), [(KEPT, 0), (BROKEN, 1), (UNCHECKED, 2)])
def test_the_status_tells_the_verdict(stand_in, report, status):
    stand_in.report = report
    done = run("check", "net.py:build")
    assert done.exit_code == status
    assert done.stdout.startswith(report.verdict.upper())


def test_what_the_model_prints_stays_out_of_the_report(stand_in):
    done = run("check", "net.py:build")
    assert "the model talks" not in done.stdout
    assert "the model talks" in done.stderr


def test_the_options_arrive(stand_in):
    run(
        *("check", "net.py:build", "--intent", "causal & window(4)", "--tokens", "11", "--length", "9", "--seed", "3"),
        *("--padding", "mask:hide", "--select", "causal, causal-leak", "--ignore", "causal", "--dtype", "float32"),
    )
    assert stand_in.seen == {
        "text": "net.py:build",
        "intent": "causal & window(4)",
        "tokens": 11,
        "features": None,
        "length": 9,
        "padding": "mask:hide",
        "seed": 3,
        "select": ("causal", "causal-leak"),
        "ignore": ("causal",),
        "dtype": "float32",
        "progress": None,
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "5", "--features", "8"], "not both"),
        (["--tokens", "1"], "2"),
        (["--length", "many"], "--length"),
        (["--dtype", "int8"], "int8"),
        (["--padding", "mask:maybe"], "keep or :hide"),
        (["--html", "x.html"], "--html"),
        (["extra"], "extra"),
    ],
)
def test_a_wrong_option_is_a_usage_error(stand_in, arguments, sentence):
    done = run("check", "net.py:build", *arguments, COLUMNS="200")
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.output
    assert stand_in.seen == {}, "nothing was loaded"


def test_a_misspelt_promise_gets_the_nearest(stand_in):
    done = run("check", "net.py:build", "--select", "causel")
    assert done.exit_code == 2
    assert "no promise or fault is named 'causel'" in done.stderr
    assert "try: causal" in done.stderr


@pytest.mark.parametrize(
    ("error", "sentences"),
    [
        (
            CannotCheck("net.py has no name 'build'", "it defines: make", "net.py:make"),
            ["cause: it", "try: net.py:make"],
        ),
        (ValueError("shape [2, 3]"), ["the check itself failed", "cause: ValueError: shape [2, 3]", "try: --debug"]),
        (SystemExit(0), ["the target's code called sys.exit(0)"]),
    ],
)
def test_no_verdict_is_a_sentence_and_status_2(stand_in, error, sentences):
    stand_in.report = error
    done = run("check", "net.py:build")
    assert done.exit_code == 2
    assert done.stdout == ""
    for sentence in ["cannot check: ", *sentences]:
        assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in run("check", "net.py:build", "--debug").stderr, "negative control: --debug shows it"


def test_an_interrupt_is_no_verdict(stand_in, tmp_path):
    stand_in.report = KeyboardInterrupt()
    done = run("check", "net.py:build", "--json", str(tmp_path / "r.json"))
    assert done.exit_code == 130
    assert done.stderr.endswith("interrupted; nothing written\n")
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_quiet_is_the_verdict_alone(stand_in):
    stand_in.report = BROKEN
    assert run("check", "net.py:build", "--quiet").stdout == "BROKEN: 1 error at 1 of 4 attention sites\n"


# --- json ------------------------------------------------------------------------------------------------------------


def test_json_on_standard_output_is_nothing_but_json(stand_in):
    stand_in.report = BROKEN
    done = run("check", "net.py:build", "--json", "-")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["verdict"] == "broken"


def test_json_into_a_file_beside_the_report(stand_in, tmp_path):
    path = tmp_path / "report.json"
    done = run("check", "net.py:build", "--json", str(path))
    assert json.loads(path.read_text("utf-8"))["schema"] == "intently.report/1"
    assert done.stdout.startswith("KEPT")
    assert f"wrote {path}" in done.stderr.replace("\n", "")


def test_a_path_that_cannot_be_written_stops_before_the_work(stand_in, tmp_path):
    done = run("check", "net.py:build", "--json", str(tmp_path / "no" / "r.json"))
    assert done.exit_code == 2
    assert "there is no folder" in done.stderr
    assert stand_in.seen == {}


# --- colour and width ------------------------------------------------------------------------------------------------


def test_a_pipe_gets_100_columns_and_no_colour(stand_in):
    stand_in.report = replace(BROKEN, notes=("word " * 60,))
    for environment in ({"COLUMNS": "40"}, {"COLUMNS": "300"}, {"NO_COLOR": "1"}):
        out = run("check", "net.py:build", **environment).stdout
        assert "\x1b" not in out
        assert 80 < max(map(len, out.splitlines())) <= 100


def test_the_pipe_may_close_early(stand_in, monkeypatch):
    """`intently check … | head -1`: the status is the verdict still."""
    stand_in.report = BROKEN
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as end:
            cli.app(["check", "net.py:build"])
        assert end.value.code == 1


# --- the other commands ----------------------------------------------------------------------------------------------


def test_sites_lists_them(stand_in):
    done = run("sites", "net.py:build", "--tokens", "7")
    assert done.exit_code == 0
    assert "layers.0–3.attn ×4" in done.stdout
    assert stand_in.seen["tokens"] == 7


def test_explain_lists_all_a_line_each(stand_in):
    out = run("explain").stdout
    assert re.search(r"^ +causal +outputs up to t do not change$", out, re.MULTILINE)
    assert re.search(r"^Faults: mask\n +causal-leak +a query sees later keys$", out, re.MULTILINE)


def test_explain_a_fault(stand_in):
    out = run("explain", "causal-leak").stdout
    for part in ("a query sees later keys", "the loss is too good", "it looks like skill", "add the triangle", "issue"):
        assert part in out
    assert out.index("return 'bad [1]'") < out.index("return 'good'")
    assert "\x1b" not in out


def test_explain_a_promise_names_what_breaks_it(stand_in):
    out = run("explain", "causal").stdout
    assert "change what follows" in out
    assert re.search(r"broken by +causal-leak", out)


def test_explain_a_name_nobody_knows(stand_in):
    done = run("explain", "causl-leak")
    assert done.exit_code == 2
    assert "causal-leak" in done.stderr


@pytest.mark.parametrize(
    ("verdicts", "status", "last"),
    [((KEPT, BROKEN), 0, "The demo did what it should"), ((KEPT, KEPT), 1, "The demo failed")],
)
def test_the_demo_says_whether_it_did_what_it_should(stand_in, monkeypatch, verdicts, status, last):
    models = types.ModuleType("intently.demo")
    vars(models).update(honest=lambda: verdicts[0], faulty=lambda: verdicts[1])
    monkeypatch.setitem(sys.modules, "intently.demo", models)
    monkeypatch.setattr(intently, "demo", models, raising=False)
    monkeypatch.setattr(sys.modules["intently.check"], "check", lambda target, progress: target)
    done = run("demo")
    assert done.exit_code == status
    assert done.stdout.startswith("Two small decoders")
    assert last in done.stdout
    assert done.stdout.index("The honest one") < done.stdout.index("The faulty one") < done.stdout.index(last)
