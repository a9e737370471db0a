"""`python -m tests.zoo`: check every case, print what was planted against what was found, and fail when they differ."""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
from tests.zoo import CASES, IMPOSSIBLE, STYLES, Outcome, judge

import intently
from intently.faults import FAULTS


def table(corner: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[object]]]) -> str:
    """Right-aligned columns under a header."""
    lines = [(corner, *columns)] + [(name, *(str(v) for v in values)) for name, values in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _score(outcomes: Sequence[Outcome]) -> str:
    return f"{sum(o.right for o in outcomes)}/{len(outcomes)}" if outcomes else "–"


def confusion(outcomes: Sequence[Outcome]) -> str:
    """Planted × found, by the faults that an error names; a case counts once in each column that it falls in."""
    planted = [o for o in outcomes if o.fault is not None]
    names = [*FAULTS]
    short = {n: str(i + 1) for i, n in enumerate(names)}
    rows = []
    for name in (*names, None):
        mine = [o for o in outcomes if o.fault == name]
        found = [sum(any(f == other for f, _, _ in o.errors) for o in mine) for other in names]
        nothing = sum(not o.errors for o in mine)
        label = "none (clean twin)" if name is None else f"{short[name]} {name}"
        rows.append((label, [*(n or "·" for n in found), nothing or "·"]))
    heads = table("planted \\ found", [*short.values(), "none"], rows)
    return heads + f"\n{len(planted)} planted, {len(outcomes) - len(planted)} clean"


def by_fault(outcomes: Sequence[Outcome]) -> str:
    """Per fault: right name, right site, proven, and the false alarms on its twins."""
    rows = []
    for name in FAULTS:
        mine = [o for o in outcomes if o.fault == name]
        twins = [o for o in outcomes if o.case in {m.twin for m in mine}]
        values = [len(mine), sum(o.named for o in mine), sum(o.located for o in mine), sum(o.proven for o in mine)]
        values += [len(twins), sum(bool(o.errors or o.raised) for o in twins)]
        values += [_by_style(mine, name, style) for style in STYLES]
        rows.append((name, values))
    return table("fault", ["planted", "named", "located", "proven", "twins", "alarms", *STYLES], rows)


def _by_style(mine: Sequence[Outcome], name: str, style: str) -> str:
    return "cannot" if (style, name) in IMPOSSIBLE else _score([o for o in mine if o.style == style])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("only", nargs="*", help="words of a case's name; left out, every case is checked")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args(argv)
    chosen = [case for case in CASES if all(word in str(case) for word in asked.only)]
    started = time.perf_counter()
    with ProcessPoolExecutor(asked.processes, multiprocessing.get_context("spawn")) as pool:
        outcomes = list(pool.map(judge, chosen))
    seconds = time.perf_counter() - started
    print(confusion(outcomes), by_fault(outcomes), sep="\n\n")
    for (style, fault), why in IMPOSSIBLE.items():
        print(f"{fault} cannot be planted in {style}: {why}")
    wrong = [o for o in outcomes if not o.right]
    print()
    for outcome in wrong:
        print(f"{outcome.case}: {outcome.complaint}")
    planted, clean = [o for o in outcomes if o.fault is not None], [o for o in outcomes if o.fault is None]
    print(f"planted {_score(planted)} right in name, site and proof; clean {_score(clean)} without an error")
    print(
        f"intently {intently.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{datetime.date.today().isoformat()}, {seconds:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
