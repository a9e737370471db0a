"""Files are written whole or not at all, in the form the suffix names."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from tests.reports.made import BROKEN

from intently.errors import CannotCheck
from intently.reports import files


@pytest.mark.parametrize("name", ["report.json", "report.svg", "report.txt", "REPORT.JSON"])
def test_the_suffix_chooses_the_form(tmp_path, name):
    path = BROKEN.save(tmp_path / name)
    content = path.read_text("utf-8")
    if path.suffix.lower() == ".json":
        assert json.loads(content)["verdict"] == "broken"
    elif path.suffix == ".svg":
        assert ElementTree.fromstring(content).tag.endswith("svg")
        assert "causal-leak" in content
    else:
        assert content.startswith("BROKEN: 1 error")
        assert "\x1b" not in content
    assert os.listdir(tmp_path) == [name], "no temporary file is left"  # noqa: PTH208


def test_an_unknown_suffix_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"'\.docx'.*\.json, \.svg, \.txt"):
        BROKEN.save(tmp_path / "report.docx")
    assert list(tmp_path.iterdir()) == []


def test_the_picture_is_the_same_twice():
    assert files.svg(BROKEN) == files.svg(BROKEN)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    files.write(path, "new")
    assert path.read_text() == "new", "negative control: without the failure it is replaced"


def test_a_link_is_written_through(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    files.write(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_a_device_is_written_to_not_replaced():
    files.require_writable(Path(os.devnull))
    files.write(Path(os.devnull), "new")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("name", ["missing/report.json", "."])
def test_what_cannot_be_written_is_known_before(tmp_path, name):
    with pytest.raises(CannotCheck) as error:
        files.require_writable(tmp_path / name)
    assert str(tmp_path) in error.value.fact
    assert error.value.hint


def test_what_can_be_written_is_left_as_it_is(tmp_path):
    old = tmp_path / "old.json"
    old.write_text("old")
    files.require_writable(old)
    files.require_writable(tmp_path / "new.json")
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]
