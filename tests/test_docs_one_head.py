"""The pages on the mechanism: their cells print what stands below them, and the figures are the page's own."""

from __future__ import annotations

import importlib
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from intently import Intent, check, mechanism
from intently.faults import FAULTS

DOCS = Path(__file__).parents[1] / "docs"
MECHANISM = DOCS / "mechanism"
PAGES = sorted(path.stem for path in MECHANISM.glob("*.md"))
STAGE_PAGES = {
    "project": "project", "score": "score", "mask": "mask-and-scale", "scale": "mask-and-scale", "normalize": "normalize",
    "aggregate": "aggregate",
}  # fmt: skip
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.fixture(scope="session")
def cells() -> ModuleType:
    return _program("cells")


def _program(name: str) -> ModuleType:
    """A file of docs/, imported as `python docs/<name>.py` sees its neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        return __import__(name)


def _text(page: str) -> str:
    return (MECHANISM / f"{page}.md").read_text("utf-8")


def differences(printed: str, shown: str) -> list[str]:
    """The lines in which two outputs differ by words, or by more than one unit of a number's last digit."""
    pairs = list(zip(printed.splitlines(), shown.splitlines(), strict=False))
    found = [f"{one!r} is not {other!r}" for one, other in pairs if not _alike(one, other)]
    return found if len(printed.splitlines()) == len(shown.splitlines()) else [*found, "not as many lines"]


def _alike(one: str, other: str) -> bool:
    if NUMBER.sub("#", one).split() != NUMBER.sub("#", other).split():
        return False
    numbers = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= 1.01 * 10.0 ** -len(b.partition(".")[2]) * ("." in b) for a, b in numbers)


@pytest.mark.parametrize("page", PAGES)
def test_the_cells_print_what_the_page_shows(cells: ModuleType, page: str) -> None:
    printed, _ = cells.run(_text(page), page)
    assert not differences(printed, _text(page))


def test_a_wrong_output_is_noticed(cells: ModuleType) -> None:
    right = "```python\nprint(0.61, 'keys')\n```\n\n```text\n0.61 keys\n```\n"
    for wrong in ("0.65 keys", "0.61 cabinet", "0.61 keys\nmore", "-0.61 keys"):
        page = right.replace("0.61 keys\n", wrong + "\n")
        assert differences(cells.run(page)[0], page)
    assert not differences(cells.run(right)[0], right)


def test_a_cell_without_its_output_is_refused(cells: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"page\.md, line 2: the cell prints, and no text block stands below it"):
        cells.run("```python\nprint(1)\n```\n")
    with pytest.raises(ValueError, match="prints nothing, and a text block stands below"):
        cells.run("```python\none = 1\n```\n\n```text\n1\n```\n")


def test_a_session_of_the_command_line_is_left_alone(cells: ModuleType) -> None:
    page = "```python\none = 1\n```\n\n```text\n$ intently demo\nwhatever\n```\n"
    assert cells.run(page)[0] == page


def test_every_fault_stands_on_the_page_of_its_stage() -> None:
    for fault in FAULTS.values():
        if fault.stage in STAGE_PAGES:
            assert f"(../fault.md#{fault.name})" in _text(STAGE_PAGES[fault.stage]), fault.name


def test_every_form_has_a_row_in_the_table() -> None:
    rows = "".join(line for line in _text("forms").splitlines() if line.startswith("| `"))
    forms = {
        name
        for path in Path(mechanism.__file__).with_name("forms").glob("*.py")
        for name in re.findall(r"^def (\w+_attention)\(", path.read_text("utf-8"), re.MULTILINE)
    }
    assert "additive_attention" in forms
    assert not sorted(name for name in forms if f"`{name}`" not in rows)


@pytest.mark.parametrize(
    ("package", "page"),
    [("forms", "forms"), ("positions", "positions"), ("steady", "steadying"), ("layers", "layers"), ("onnx", "onnx")],
)
def test_a_name_that_its_module_hides_is_listed_by_itself(package: str, page: str) -> None:
    whole = f"intently.mechanism.{package}"
    assert f"::: {whole}\n" in _text(page)  # lists the rest
    for name in importlib.import_module(whole).__all__:
        if (Path(mechanism.__file__).parent / package / f"{name}.py").exists():
            assert f"::: {whole}.{name}.{name}\n" in _text(page), name


@pytest.mark.parametrize(
    ("name", "intent", "fault"),
    [
        ("reshaped", "causal", "heads-interleaved"),
        ("unscaled", "bidirectional", "scale-missing"),
        ("inverted", "causal", "mask-inverted"),
        ("across", "bidirectional", "softmax-wrong-axis"),
    ],
)
def test_the_broken_code_is_still_found(name: str, intent: str, fault: str) -> None:
    broken = runpy.run_path(str(MECHANISM / "broken.py"))[name]
    report = check(broken() if name == "reshaped" else broken, intent=Intent.parse(intent))
    assert [finding.fault for finding in report.findings] == [fault]


def test_the_figures_are_the_same_in_every_run_and_fetch_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the figures need the extra 'plots'")
    one_head = _program("one_head")
    one_head.main(tmp_path / "once")
    one_head.main(tmp_path / "again")
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "once").iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert set(drawn) == {path.name for path in (DOCS / "assets" / "one-head").iterdir()}
    assert set(drawn) == set(re.findall(r"assets/one-head/([\w-]+\.svg)", _text("one-head")))
    for name, content in drawn.items():
        assert b"font-family" not in content, name
        assert b"<dc:date>" not in content, name
        for element in ElementTree.fromstring(content).iter():
            for attribute, value in element.attrib.items():
                if attribute.endswith("href"):
                    assert value.startswith("#"), f"{name} refers to {value}"
