"""Writing files whole or not at all, and a report in the form its suffix names."""

from __future__ import annotations

import io
import os
from pathlib import Path

from rich.console import Console

from intently.errors import CannotCheck
from intently.report import Report
from intently.reports import json
from intently.reports.terminal import render

WIDTH = 100


def save(report: Report, path: str | Path) -> Path:
    """Write the report as `.json`, `.svg` or `.txt`, and return the path. Raises ValueError for another suffix."""
    path = Path(path)
    forms = {".json": json.dumps, ".svg": svg, ".txt": text}
    if path.suffix.lower() not in forms:
        raise ValueError(f"no form of a report is named {path.suffix!r} ({path}): use {', '.join(forms)}")
    write(path, forms[path.suffix.lower()](report))
    return path


def text(report: Report) -> str:
    """What a terminal of 100 columns without colour shows."""
    file = io.StringIO()
    render(report, Console(file=file, width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def svg(report: Report) -> str:
    """A picture of the terminal report, in colour."""
    console = Console(
        file=io.StringIO(),
        width=WIDTH,
        record=True,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
    )
    render(report, console)
    return console.export_svg(title=f"intently check {report.target}", unique_id="intently")


def write(path: Path, content: str) -> None:
    """Replace the file at once: who reads it sees the old content or the new, never half of it."""
    path = path.resolve()
    if path.exists() and not path.is_file():  # a pipe or device cannot be replaced, only written to
        path.write_text(content, "utf-8")
        return
    beside = _beside(path)
    try:
        with beside.open("x", encoding="utf-8", newline="\n") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Raise `CannotCheck` now if `write` would fail later: a long check should not end without its result."""
    path = path.resolve()
    if path.is_dir():
        raise CannotCheck(f"{path} is a folder, not a file to write to", hint=f"{path / 'report.json'}")
    if path.exists() and not path.is_file():
        return
    if not path.parent.is_dir():
        raise CannotCheck(f"{path} cannot be written: there is no folder {path.parent}", hint=f"mkdir -p {path.parent}")
    beside = _beside(path)
    try:
        beside.touch(exist_ok=False)
    except OSError as error:
        raise CannotCheck(
            f"{path} cannot be written", cause=error.strerror or str(error), hint="another folder, or its permissions"
        ) from error
    finally:
        beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
