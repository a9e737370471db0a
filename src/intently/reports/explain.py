"""The texts of promises and faults for a terminal: one of them at length, or all of them a line each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table as Columns
from rich.text import Text

from intently.faults.base import Fault
from intently.promises.base import Promise
from intently.reports.characters import show

_STAGES = ("project", "score", "mask", "scale", "normalize", "aggregate", "outside")


def render_list(promises: Mapping[str, Promise], faults: Mapping[str, Fault], console: Console) -> None:
    """Every promise, then every fault by stage, a line each."""
    parts: list[RenderableType] = [
        Text("Promises", style="bold"),
        _lines((promise.name, promise.statement) for promise in promises.values()),
    ]
    stages = list(dict.fromkeys([*_STAGES, *(fault.stage for fault in faults.values())]))
    for stage in stages:
        its = [fault for fault in faults.values() if fault.stage == stage]
        if its:
            parts += ["", Text(f"Faults: {stage}", style="bold"), _lines((f.name, f.summary) for f in its)]
    parts += ["", Text("intently explain NAME tells about one of them", style="dim")]
    show(Group(*parts), console)


def render_promise(promise: Promise, faults: Mapping[str, Fault], console: Console) -> None:
    """One promise, and the faults that break it."""
    breakers = [fault.name for fault in faults.values() if promise.name in fault.promises]
    rows = [
        ("applies to", promise.applies_to),
        ("tried by", promise.how),
        ("broken by", ", ".join(breakers) or "no named fault"),
        ("sources", "\n".join(promise.sources)),
        ("since", promise.since),
    ]
    show(Group(_title(promise.name, "promise"), _body(promise.statement), "", _lines(rows)), console)


def render_fault(fault: Fault, console: Console) -> None:
    """One fault: the pattern, how it shows, why nobody notices, the code that has it and the code that has not."""
    rows = [
        ("stage", fault.stage),
        ("severity", fault.severity),
        ("breaks", ", ".join(fault.promises)),
        ("symptom", fault.symptom),
        ("why silent", fault.why_silent),
        ("fix", fault.fix),
        ("sources", "\n".join(fault.sources)),
        ("since", fault.since),
    ]
    parts: list[RenderableType] = [_title(fault.name, "fault"), _body(fault.summary), "", _lines(rows)]
    for label, code in (("Flagged", fault.bad), ("Silent", fault.good)):
        if code.strip():
            parts += ["", Text(label, style="bold"), Padding(_code(code), (0, 0, 0, 2))]
    show(Group(*parts), console)


def _title(name: str, kind: str) -> Text:
    return Text.assemble((name, "bold cyan"), (f"  {kind}", "dim"))


def _body(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))


def _code(code: str) -> Syntax:
    return Syntax(code.strip(), "python", theme="ansi_dark", background_color="default", word_wrap=True)


def _lines(rows: Iterable[tuple[str, str]]) -> RenderableType:
    grid = Columns.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="cyan")
    grid.add_column(overflow="fold")
    for label, text in rows:
        if text:
            grid.add_row(Text(f"  {label}"), Text(text))
    return grid
