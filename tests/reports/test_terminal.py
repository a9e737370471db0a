"""The terminal report: what it says, in which order, on which terminals."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace

import pytest
from rich.console import Console
from tests.reports.made import ALL, BROKEN, HARD, KEPT, LEAK, SITE, UNCHECKED

from intently.report import Cell, Source
from intently.reports.files import text
from intently.reports.terminal import render, verdict

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def rendered(report, width=100, encoding="utf-8", **options):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    render(report, Console(file=file, width=width, legacy_windows=False, **options))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_the_verdict_leads_and_the_cost_ends():
    lines = text(BROKEN).splitlines()
    assert lines[0] == "BROKEN: 1 error at 1 of 4 attention sites"
    assert lines[-1] == "62 forward passes, 3.4 s; torch 2.13.0, python 3.11.7"


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (KEPT, "KEPT: 1 promise under 2 conditions, 4 attention sites"),
        (UNCHECKED, "UNCHECKED: no promise could be tried"),
        (replace(BROKEN, findings=()), "BROKEN: causal broken, and no named fault explains it"),
        (replace(BROKEN, sites=()), "BROKEN: 1 error at 1 place outside attention"),
        (
            replace(KEPT, findings=(replace(LEAK, severity="warning"),)),
            "KEPT: 1 promise under 2 conditions, 4 attention sites, 1 warning",
        ),
        (
            replace(BROKEN, findings=(LEAK, replace(LEAK, site="layers.3.attn"), replace(LEAK, site="layers.3.attn"))),
            "BROKEN: 3 errors at 2 of 4 attention sites",
        ),
    ],
)
def test_the_verdict_in_a_sentence(report, sentence):
    assert verdict(report) == sentence


def test_the_grid_is_readable_without_colour():
    out = text(BROKEN)
    row = next(line for line in out.splitlines() if line.strip().startswith("causal  "))
    assert row.split() == ["causal", "broken", "in", "1", "of", "2", "✗", "✓"]
    assert "✓ kept   ✗ broken   – not applicable   · not tried" in out
    assert "padding-inert not tried: the model takes no key mask" in out
    assert "causal broken: outputs differ by 0.310 (noise floor 2.2e-16) under eager" in out


def test_many_conditions_get_numbers_and_a_legend():
    conditions = [
        f"{backend}, {mask}, batch {n}" for backend in "ab" for mask in ("none", "ones", "left") for n in (1, 3)
    ]
    grid = tuple(Cell("causal", c, "broken" if c == conditions[6] else "kept") for c in conditions)
    out = text(replace(BROKEN, grid=grid))
    header = next(line for line in out.splitlines() if "in words" in line)
    row = next(line for line in out.splitlines() if line.strip().startswith("causal  "))
    assert header.split()[3:] == [str(n) for n in range(1, 13)]
    assert row.split()[6:].index("✗") == 6
    assert re.search(r"^ +7 +b, none, batch 1$", out, re.MULTILINE)


def test_conditions_that_do_not_fit_one_row_wrap():
    grid = tuple(Cell("causal", f"a condition with a long name, number {n}", "kept") for n in range(60))
    out = text(replace(KEPT, grid=grid))
    headers = [line.split()[3:] for line in out.splitlines() if "in words" in line]
    assert len(headers) > 1
    assert list(itertools.chain(*headers)) == [str(n) for n in range(1, 61)]
    assert max(map(len, out.splitlines())) <= 100


def test_the_worst_cell_wins_under_one_condition():
    grid = (Cell("scaled", "site", "kept"), Cell("scaled", "site", "broken"), Cell("scaled", "site", "kept"))
    assert "broken in 1 of 1" in text(replace(BROKEN, grid=grid))


def test_a_finding_tells_all_and_marks_the_entry_without_colour():
    out = text(BROKEN)
    error, note = out.index("ERROR  causal-leak at layers.1.attn, heads 0, 3"), out.index("NOTE  slow-path")
    assert error < note, "errors come first"
    assert "[0.310]" in out
    assert "[0.290]" not in out
    assert "overwriting token 3 moved the output at 2 by 0.31" in out
    assert "adding the triangle at layers.1.attn restored causal" in out
    assert "Pass `is_causal=True`, or a lower triangle of [query, key]." in out
    assert "intently explain causal-leak" in out


def test_the_source_line_is_shown_where_it_can_be_read(tmp_path):
    code = tmp_path / "net.py"
    code.write_text("import torch\nscores = q @ k.mT\n")
    out = text(replace(BROKEN, findings=(replace(LEAK, source=Source(str(code), 2)),)))
    assert "net.py:2" in out.replace("\n", "")
    assert "scores = q @ k.mT" in out
    assert "gone.py:9" in text(replace(BROKEN, findings=(replace(LEAK, source=Source("gone.py", 9)),)))


def test_the_same_fault_in_many_layers_is_told_once():
    findings = tuple(replace(LEAK, site=f"layers.{layer}.attn") for layer in range(12))
    out = text(replace(BROKEN, findings=findings))
    assert out.count("ERROR  causal-leak") == 1
    assert "layers.1–11.attn ×11" in out


def test_identical_layers_fold_into_one_row():
    assert "layers.0–3.attn ×4" in text(KEPT)
    odd = replace(SITE, path="layers.2.attn", mask="causal")
    sites = (KEPT.sites[0], KEPT.sites[1], odd, KEPT.sites[3])
    out = text(replace(KEPT, sites=sites))
    assert "layers.0–1,3.attn ×3" in out
    assert re.search(r"layers\.2\.attn +self +8/2 +16 +0\.25 +causal  ", out)


def test_brackets_in_paths_and_messages_are_text_not_markup():
    out = text(HARD)
    assert "blocks[0].attn[/bold]" in out
    assert "[red]really[/red]" in out
    assert "net.py:build [tiny]" in out


@pytest.mark.parametrize("report", ALL)
@pytest.mark.parametrize("width", [60, 100])
def test_no_line_is_wider_than_the_terminal(report, width):
    assert max(map(len, rendered(report, width).splitlines())) <= width


@pytest.mark.parametrize("report", ALL)
def test_no_colour_in_a_pipe(report):
    assert "\x1b" not in rendered(report)


def test_colour_on_a_terminal_and_none_with_no_color():
    colour = {"force_terminal": True, "color_system": "truecolor"}
    assert ANSI.search(rendered(BROKEN, **colour)), "negative control: a terminal gets colour"
    plain = rendered(BROKEN, **colour, no_color=True)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7][;m]", plain)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("report", ALL)
def test_any_encoding_can_show_any_report(report, encoding):
    out = rendered(report, encoding=encoding)
    assert "✓" not in out
    assert report.verdict.upper() in out
    if report is KEPT:
        assert "+ kept   - not applicable   . not tried" in out.replace("–", "-").replace("·", ".")


def test_a_strict_ascii_stream_fails_without_the_stand_ins():
    """Negative control: the stream in `rendered` is one that cannot take the symbols."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with pytest.raises(UnicodeEncodeError):
        Console(file=file).print("✓")
    file.detach()


def test_a_witness_too_wide_keeps_the_marked_columns():
    table = replace(
        LEAK.witness.table,
        columns=tuple(map(str, range(40))),
        rows=(("0", tuple(float(n) for n in range(40))),),
        marked=((0, 33),),
    )
    finding = replace(LEAK, witness=replace(LEAK.witness, table=table))
    out = text(replace(BROKEN, findings=(finding,)))
    assert "[33.000]" in out
    assert "more columns not shown" in out
    assert max(map(len, out.splitlines())) <= 100
