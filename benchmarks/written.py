"""What every benchmark writes down: a markdown table under a line with date and versions, and a picture."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from intently import __version__
from intently.reports import files

RESULTS = Path(__file__).parent / "results"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """The table as markdown."""
    date = datetime.date.today().isoformat()
    head = f"# {title}\n\n{date}, intently {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    lines = [head + (f". {note}" if note else ""), ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write(name: str, text: str) -> Path:
    """Write one result file, whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / name
    files.write(path, text)
    return path


def picture(name: str, svg: str | None) -> None:
    """Write a picture beside the tables, if there is one."""
    if svg is not None:
        print(f"wrote {write(name, svg)}")
