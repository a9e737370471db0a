"""`python -m benchmarks.inject [TYPES…]`: plant each fault in each architecture, check it, write results/inject.md."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch

import intently
from benchmarks import workers, written
from benchmarks.inject.architectures import ARCHITECTURES
from benchmarks.inject.changes import CHANGES, Change
from benchmarks.inject.planted import plant
from intently import Target
from intently.errors import CannotCheck
from intently.report import SiteRecord
from intently.targets.huggingface import tiny

STATE = written.RESULTS / "inject.jsonl"
LIMIT = 900  # seconds an architecture
CLEAN = "nothing"


def someone_elses(model: torch.nn.Module) -> torch.nn.Module:
    """The model as an instance of a class that its user wrote: held to what it is built upon."""
    released = type(model)
    model.__class__ = type(f"My{released.__name__}", (released,), {"__module__": "planted"})
    return model


def places(sites: Sequence[SiteRecord], change: Change, everywhere: bool) -> list[SiteRecord]:
    """Where a change is planted: in every call that it applies to, or in one; calls that share a module are left out."""
    paths = [s.path for s in sites]
    fitting = [
        s for s in sites if change.applies(s) and "#" not in s.path and paths.count(s.path) == 1 and s.path != "(root)"
    ]
    return fitting if everywhere else fitting[len(fitting) // 2 : len(fitting) // 2 + 1]


def judged(model: torch.nn.Module) -> dict[str, Any]:
    """Verdict and errors of a check."""
    try:
        report = intently.check(Target(model))
    except CannotCheck as error:
        return {"verdict": "unchecked", "why": str(error)[:200], "errors": [], "seconds": 0.0}
    errors = [(f.fault, f.site, f.proof, f.condition) for f in report.findings if f.severity == "error"]
    return {"verdict": report.verdict, "errors": errors, "seconds": report.seconds, "forwards": report.forwards}


def one(name: str) -> dict[str, Any]:
    """Everything that is planted in one architecture. Each change goes to one call or to all, in turn."""
    number = ARCHITECTURES.index(name) if name in ARCHITECTURES else 0
    torch.set_num_threads(1)
    try:
        built = tiny(name)
    except CannotCheck as error:
        return {"why": str(error)[:200]}
    model = built.model
    if any(s.argument == "" for s in built.streams):
        return {"why": "no streams"}
    sites = built.sites()
    rows = [{"change": CLEAN, "where": "", "sites": [], **judged(someone_elses(copy.deepcopy(model)))}]
    for turn, change in enumerate(CHANGES, number):
        everywhere = turn % 2 == 0
        chosen = places(sites, change, everywhere)
        if change.masked and not any(s.padding for s in built.streams):
            continue
        if not chosen or (change.uncapped and not _capped(model)) or (change.stepping and not _steps(model)):
            continue
        mine = someone_elses(copy.deepcopy(model))
        for site in chosen:
            plant(mine.get_submodule(site.path), change, site)
        where = "all" if everywhere else "one"
        if not _moves(built, model, mine, change):
            rows.append({"change": change.name, "where": where, "sites": [], "verdict": "no effect", "errors": []})
            continue
        rows.append({"change": change.name, "where": where, "sites": [s.path for s in chosen], **judged(mine)})
    return {"rows": rows}


def _capped(model: Any) -> bool:
    return any(getattr(model.config, n, None) for n in ("attn_logit_softcapping", "attn_logit_softcap"))


def _steps(model: Any) -> bool:
    return bool(getattr(model.config, "use_cache", False))


def _moves(target: Target, clean: Any, planted: Any, change: Change) -> bool:
    """Whether the change alters outputs at all; what only a cache, pads or chance shows is taken on trust."""
    if change.stepping or change.drop or "mask" in change.name:
        return True
    from intently.targets.signature import lengths_for
    from intently.targets.target import call, tensors_of

    batch = target.batch(2, lengths_for(target.streams, 13), dtype=torch.float32)
    with torch.no_grad():
        mine, theirs = (next(tensors_of(call(m.eval(), batch.arguments))) for m in (planted, clean))
    return bool((mine - theirs).abs().max() > 1e-5 * theirs.abs().max())


def score(row: dict[str, Any]) -> dict[str, bool]:
    """Found at all; under a right name; there and nowhere else under that name; proven; and no other name beside it."""
    change = next(c for c in CHANGES if c.name == row["change"])
    errors = [tuple(e) for e in row["errors"]]
    mine = [e for e in errors if e[0] in change.names]
    return {
        "found": bool(errors) or row["verdict"] == "broken",
        "named": bool(mine),
        "placed": bool(mine) and {e[1].split("#")[0] for e in mine} == set(row["sites"]),
        "proven": bool(mine) and all(e[2] == "proven" for e in mine),
        "alone": bool(mine) and all(e[0] in change.names | change.also for e in errors),
    }


def tables(done: dict[str, dict[str, Any]]) -> str:
    """By fault, then by architecture, then what was missed."""
    planted = [(n, r) for n, d in done.items() for r in d.get("rows", ()) if r["change"] != CLEAN and r["sites"]]
    clean = [(n, r) for n, d in done.items() for r in d.get("rows", ()) if r["change"] == CLEAN]
    columns = ("", "planted", "found", "right name", "right place", "proven", "no other name")

    def line(name: str, rows: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
        scores = [score(r) for r in rows]
        return (name, len(rows), *(sum(s[k] for s in scores) for k in ("found", "named", "placed", "proven", "alone")))

    by_change = [line(c.name, [r for _, r in planted if r["change"] == c.name]) for c in CHANGES]
    by_type = [line(n, [r for m, r in planted if m == n]) for n in done if any(m == n for m, _ in planted)]
    total = line("all", [r for _, r in planted])
    alarms = [(n, "; ".join(f"{e[0]} at {e[1]}" for e in r["errors"])) for n, r in clean if r["errors"]]
    note = f"{len(clean)} architectures as released, held as someone's own: {len(alarms)} with an error"
    text = written.table(
        "Faults planted in released architectures", columns, [total, *(r for r in by_change if r[1])], note
    )
    text += "\n" + _plain("By architecture", columns, by_type)
    text += "\n" + _plain("As released", ("architecture", "errors"), alarms or [("all", "none")])
    missed = [
        (
            n,
            f"{r['change']} ({r['where']})",
            ", ".join(r["sites"][:2]),
            "; ".join(f"{e[0]} at {e[1]} ({e[2]})" for e in r["errors"][:3]) or r["verdict"],
        )
        for n, r in planted
        if not (score(r)["named"] and score(r)["placed"])
    ]
    text += "\n" + _plain("Not named, or not placed", ("architecture", "planted", "at", "told"), missed)
    skipped = [(n, d["why"]) for n, d in done.items() if "why" in d]
    return text + ("\n" + _plain("Not run", ("architecture", "why"), skipped) if skipped else "")


def _plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(str(c).replace("|", "/") for c in r) + " |" for r in rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inject", description=__doc__)
    parser.add_argument("types", nargs="*", help="transformers types; all of the list when none is named")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--anew", action="store_true", help="forget what was done before")
    given = parser.parse_args()
    if given.anew:
        STATE.unlink(missing_ok=True)
    names = given.types or list(ARCHITECTURES)
    state = workers.State(STATE)
    if given.types:
        state.done = {n: d for n, d in state.done.items() if n not in names}
    run = workers.each(
        names, lambda n: workers.outcome("benchmarks.inject.__main__", n, limit=LIMIT), state, given.processes
    )
    for number, (name, found) in enumerate(run, 1):
        print(f"{number}/{len(names)} {name}: {_said(found)}", flush=True)
    if not given.types:
        print(f"wrote {written.write('inject.md', tables({n: state.done[n] for n in names}))}")


def _said(found: dict[str, Any]) -> str:
    if "why" in found:
        return found["why"]
    rows = [r for r in found["rows"] if r["change"] != CLEAN and r["sites"]]
    good = sum(score(r)["named"] and score(r)["placed"] for r in rows)
    wrong = [f"{r['change']} ({r['where']})" for r in rows if not (score(r)["named"] and score(r)["placed"])]
    alarms = [e[0] for r in found["rows"] if r["change"] == CLEAN for e in r["errors"]]
    return f"{good} of {len(rows)} named and placed; missed: {', '.join(wrong) or 'none'}; clean: {', '.join(alarms) or 'silent'} ({found['took']} s)"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; what was done is kept, and the next run goes on from there")
