"""A report for a person at a terminal: verdict first, then the grid, the findings, the sites, and what it cost."""

from __future__ import annotations

import linecache
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Columns
from rich.text import Text

from intently.promises import PROMISES
from intently.report import Cell, Finding, Report, SiteRecord, Source, Table
from intently.reports.characters import show
from intently.reports.folding import fold

SYMBOLS = {"kept": "✓", "broken": "✗", "not-applicable": "–", "not-tried": "·"}
_WORDS = {"kept": "kept", "broken": "broken", "not-applicable": "not applicable", "not-tried": "not tried"}
_STYLES = {"kept": "green", "broken": "bold red", "not-applicable": "dim", "not-tried": "dim"}
_SEVERITIES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_VERDICTS = {"kept": "bold green", "broken": "bold red", "unchecked": "bold yellow"}
# The worst wins where one promise has several cells under one condition.
_WORST = ("broken", "kept", "not-tried", "not-applicable")


def render(report: Report, console: Console) -> None:
    """Print the whole report."""
    parts: list[RenderableType] = [_head(report)]
    if report.grid:
        parts += ["", *_grid(report.grid, console.width)]
    for first, others in _alike(report.findings):
        parts += ["", _finding(first, others, console.width)]
    if report.sites:
        parts += ["", _heading("Attention sites"), _sites(report.sites)]
    if report.notes:
        parts += ["", _heading("Notes"), *(_item(note) for note in report.notes)]
    parts += ["", _cost(report)]
    show(Group(*parts), console)


def render_sites(sites: Sequence[SiteRecord], console: Console) -> None:
    """Print the table of sites alone."""
    show(_sites(sites) if sites else Text("no attention call was found"), console)


def verdict(report: Report) -> str:
    """The verdict in one sentence."""
    errors = [f for f in report.findings if f.severity == "error"]
    warnings = sum(f.severity == "warning" for f in report.findings)
    aside = f", {_count(warnings, 'warning')}" if warnings else ""
    if report.verdict == "broken":
        if not errors:
            promises = ", ".join(dict.fromkeys(c.promise for c in report.grid if c.verdict == "broken"))
            return f"BROKEN: {promises or 'a promise'} broken, and no named fault explains it{aside}"
        return f"BROKEN: {_count(len(errors), 'error')} {_where(errors, report.sites)}{aside}"
    if report.verdict == "kept":
        kept = {c.promise for c in report.grid if c.verdict == "kept"}
        conditions = {c.condition for c in report.grid if c.verdict == "kept"}
        tried = f"{_count(len(kept), 'promise')} under {_count(len(conditions), 'condition')}"
        return f"KEPT: {tried}, {_count(len(report.sites), 'attention site')}{aside}"
    return f"UNCHECKED: no promise could be tried{aside}"


# --- the parts, top to bottom ----------------------------------------------------------------------------------------


def _head(report: Report) -> RenderableType:
    word, _, rest = verdict(report).partition(":")
    return Group(
        Text.assemble((word, _VERDICTS[report.verdict]), (f":{rest}", "bold")),
        _labelled([("target", Text(report.target)), ("intent", Text(report.intent or "not stated"))]),
    )


def _grid(cells: Sequence[Cell], width: int) -> list[RenderableType]:
    promises = list(dict.fromkeys(c.promise for c in cells))
    conditions = list(dict.fromkeys(c.condition for c in cells))
    worst: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        at = (cell.promise, cell.condition)
        if at not in worst or _WORST.index(cell.verdict) < _WORST.index(worst[at].verdict):
            worst[at] = cell

    tallies = {p: _tally([worst[p, c] for c in conditions if (p, c) in worst]) for p in promises}
    room = width - max(map(len, promises)) - max(map(len, tallies.values())) - 4
    named = sum(len(c) + 2 for c in conditions) <= room
    keys = {c: c if named else str(number) for number, c in enumerate(conditions, 1)}
    per_row = len(conditions) if named else max(1, room // (len(str(len(conditions))) + 2))

    parts: list[RenderableType] = [_heading("Promises under each condition")]
    for start in range(0, len(conditions), per_row):
        part = conditions[start : start + per_row]
        table = _table("promise", "in words")
        for condition in part:
            table.add_column(Text(keys[condition]), justify="center", no_wrap=True)
        for promise in promises:
            symbols = [_symbol(worst.get((promise, condition))) for condition in part]
            table.add_row(Text(promise), _tallied(tallies[promise]), *symbols)
        parts.append(_indented(table))
    parts.append(_legend(cells))
    if not named:
        parts.append(_labelled([(keys[c], Text(c)) for c in conditions]))
    parts += [_item(line) for line in _evidence(worst.values())]
    return parts


def _tally(cells: Sequence[Cell]) -> str:
    """`broken in 2 of 5`, counting the conditions in which the promise was tried."""
    tried = [c for c in cells if c.verdict in ("kept", "broken")]
    broken = sum(c.verdict == "broken" for c in tried)
    if broken:
        return f"broken in {broken} of {len(tried)}"
    if tried:
        return f"kept in {len(tried)}"
    return _WORDS["not-tried" if any(c.verdict == "not-tried" for c in cells) else "not-applicable"]


def _tallied(words: str) -> Text:
    style = {"broken": "bold red", "kept": "green"}.get(words.split()[0], "dim")
    return Text(words, style=style, no_wrap=True)


def _symbol(cell: Cell | None) -> Text:
    return Text(SYMBOLS[cell.verdict], style=_STYLES[cell.verdict]) if cell else Text("")


def _legend(cells: Iterable[Cell]) -> Text:
    used = {c.verdict for c in cells}
    parts: list[str | tuple[str, str]] = []
    for name, symbol in SYMBOLS.items():
        if name in used:
            parts += ["   " if parts else "  ", (symbol, _STYLES[name]), (f" {_WORDS[name]}", "dim")]
    return Text.assemble(*parts)


def _evidence(cells: Iterable[Cell]) -> list[str]:
    """Why each promise is broken, by how much; and why the others were not tried, reasons shared."""
    cells = list(cells)
    lines = []
    broken: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.verdict == "broken":
            broken.setdefault(cell.promise, []).append(cell)
    for promise, its in broken.items():
        worst = max(its, key=lambda c: -math.inf if c.error is None else math.inf if math.isnan(c.error) else c.error)
        means = PROMISES[promise].error_means if promise in PROMISES else "outputs differ by"
        size = "" if worst.error is None else f": {means} {_number(worst.error)}"
        noise = "" if worst.noise is None else f" (noise floor {_number(worst.noise)})"
        note = f"; {worst.note}" if worst.note else ""
        lines.append(f"{promise} broken{size}{noise} under {worst.condition}{note}")
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.note and cell.verdict != "broken":
            reasons.setdefault((_WORDS[cell.verdict], cell.note), []).append(cell.promise)
    for (word, note), promises in reasons.items():
        lines.append(f"{', '.join(dict.fromkeys(promises))} {word}: {note}")
    return lines


def _finding(finding: Finding, others: Sequence[Finding], width: int) -> RenderableType:
    heads = f", heads {', '.join(map(str, finding.heads))}" if finding.heads is not None else ""
    title = Text.assemble(
        (finding.severity.upper(), _SEVERITIES[finding.severity]),
        "  ",
        (finding.fault, "bold"),
        f" at {finding.site}{heads}",
    )
    rows: list[tuple[str, RenderableType]] = [
        ("promise", Text(f"{finding.promise} (stage: {finding.stage}{_under(finding.condition)})")),
        ("witness", Text(finding.witness.statement)),
    ]
    if finding.witness.table:
        rows.append(("", _witness(finding.witness.table, width - 14)))
    if finding.source:
        rows.append(("where", _code_at(finding.source)))
    note = f": {finding.proof_note}" if finding.proof_note else ""
    rows.append((finding.proof, Text(note.removeprefix(": ") or _PROOFS[finding.proof])))
    rows.append(("fix", Text(finding.fix)))
    if others:
        paths = ", ".join(_counted(path, count) for path, count, _ in fold((f.site, None) for f in others))
        rows.append(("also at", Text(paths)))
    rows.append(("more", Text(f"intently explain {finding.fault}", style="cyan")))
    return Group(title, _indented(Text(finding.message)), _labelled(rows))


_PROOFS = {"proven": "repairing this site restored the promise", "suspected": "not proven by a repair"}


def _witness(table: Table, width: int) -> RenderableType:
    """The numbers, marked ones in brackets; columns that do not fit give way to those that are marked."""
    marked = set(table.marked)
    shown = [[_number(value) for value in values] for _, values in table.rows]
    cell = max([len(text) for row in shown for text in row] + [len(name) for name in table.columns] + [1]) + 4
    label = max([len(name) for name, _ in table.rows] + [len(table.corner)]) + 2
    room = max(2, (width - label) // cell)
    keep = list(range(len(table.columns)))
    if len(keep) > room:
        first = sorted(keep, key=lambda column: (all(at[1] != column for at in marked), column))[:room]
        keep = sorted(first)

    columns = Columns(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    columns.add_column(Text(table.corner), no_wrap=True)
    for column in keep:
        columns.add_column(Text(f"{table.columns[column]} "), justify="right", no_wrap=True)
    for row, (name, _) in enumerate(table.rows):
        numbers = [_entry(shown[row][column], (row, column) in marked) for column in keep]
        columns.add_row(Text(name, style="dim"), *numbers)
    left_out = len(table.columns) - len(keep)
    return Group(columns, Text(f"{_count(left_out, 'more column')} not shown", style="dim")) if left_out else columns


def _entry(number: str, marked: bool) -> Text:
    return Text(f"[{number}]", style="bold red") if marked else Text(f"{number} ")


def _code_at(source: Source) -> RenderableType:
    """File and line, and under it the line itself where it can be read."""
    place = Text(f"{_near(source.file)}:{source.line}")
    line = linecache.getline(source.file, source.line).strip()
    return Group(place, Text(f"  {line}", style="dim", no_wrap=True, overflow="ellipsis")) if line else place


def _sites(sites: Sequence[SiteRecord]) -> RenderableType:
    table = _table("site", "role", "heads/kv", "width", "scale", "mask", "kernel", "at")
    for path, count, first in fold((s.path, replace(s, path="")) for s in sites):
        site = sites[first]
        table.add_row(
            Text(_counted(path, count), overflow="fold"),
            Text(site.role),
            Text(str(site.heads) if site.heads == site.kv_heads else f"{site.heads}/{site.kv_heads}"),
            Text(str(site.head_dim) if site.head_dim == site.value_dim else f"{site.head_dim}, v {site.value_dim}"),
            Text("?" if site.scale is None else f"{site.scale:.4g}"),
            Text(_described(site), overflow="fold"),
            Text(site.kernel, overflow="fold"),
            Text(f"{Path(site.source.file).name}:{site.source.line}" if site.source else "", overflow="fold"),
        )
    return _indented(table)


def _described(site: SiteRecord) -> str:
    bias = f" + {site.bias}" if site.bias not in ("", "none") else ""
    dropout = f", dropout {site.dropout:g}" if site.dropout else ""
    return f"{site.mask}{bias}{dropout}"


def _cost(report: Report) -> Text:
    environment = ", ".join(f"{name} {value}" for name, value in report.environment.items())
    cost = f"{_count(report.forwards, 'forward pass', 'forward passes')}, {report.seconds:.1f} s"
    return Text(f"{cost}; {environment}" if environment else cost, style="dim")


# --- shared pieces ---------------------------------------------------------------------------------------------------


def _alike(findings: Sequence[Finding]) -> list[tuple[Finding, list[Finding]]]:
    """Findings by severity, the same fault at several sites told once."""
    groups: dict[tuple, list[Finding]] = {}
    for finding in sorted(findings, key=lambda f: list(_SEVERITIES).index(f.severity)):
        key = (finding.fault, finding.promise, finding.severity, finding.proof, finding.heads, finding.fix)
        groups.setdefault(key, []).append(finding)
    return [(group[0], group[1:]) for group in groups.values()]


def _where(errors: Sequence[Finding], sites: Sequence[SiteRecord]) -> str:
    """`at 3 of 6 attention sites`, and places that are no attention site counted apart."""
    known = {s.path for s in sites}
    inside = {f.site for f in errors} & known
    outside = {f.site for f in errors} - known
    parts = []
    if inside:
        parts.append(f"at {len(inside)} of {_count(len(known), 'attention site')}")
    if outside:
        parts.append(f"at {_count(len(outside), 'place')} outside attention")
    return " and ".join(parts)


def _under(condition: str) -> str:
    return f", under {condition}" if condition else ""


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _indented(content: RenderableType) -> RenderableType:
    return Padding(content, (0, 0, 0, 2), expand=False)


def _item(text: str) -> RenderableType:
    return _hanging([(Text("  -"), Text(text))])


def _labelled(rows: Sequence[tuple[str, RenderableType]]) -> RenderableType:
    width = max(len(label) for label, _ in rows)
    return _hanging([(Text(f"  {label:<{width}}", style="dim"), content) for label, content in rows])


def _hanging(rows: Sequence[tuple[Text, RenderableType]]) -> RenderableType:
    """Labels at the left, contents wrapped beside them."""
    grid = Columns.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, content in rows:
        grid.add_row(label, content)
    return grid


def _table(*columns: str) -> Columns:
    table = Columns(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(Text(column))
    return table


def _counted(path: str, count: int) -> str:
    return path if count == 1 else f"{path} ×{count}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _number(value: float) -> str:
    """Three places where they say something, else two digits and an exponent.

    >>> [_number(x) for x in (0.0, 0.31, 12.0, 2.2e-16, float("nan"))]
    ['0', '0.310', '12.000', '2.2e-16', 'nan']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def _near(file: str) -> str:
    """The path as seen from here, where that is shorter."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except ValueError:
        return file
