"""Real pretrained weights, where a folder of them is named: `INTENTLY_MODELS=/path/to/folder make test`.

Each subfolder with a `config.json` is checked whole; its attention is as published, so no error may come of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from intently.check import check
from intently.targets import load

NAMED = os.environ.get("INTENTLY_MODELS")
FOLDERS = sorted(p.parent for p in Path(NAMED).glob("*/config.json")) if NAMED else []


@pytest.mark.skipif(not FOLDERS, reason="INTENTLY_MODELS names no folder with models (subfolders with a config.json)")
@pytest.mark.parametrize("folder", FOLDERS or [Path("none")], ids=lambda p: p.name)
def test_published_weights_raise_no_error(folder: Path) -> None:
    report = check(load(str(folder)))
    assert report.verdict == "kept"
    assert report.sites
    assert not [f for f in report.findings if f.severity == "error"]
