"""Promise `knobs-live`: what a model holds to shape its attention does shape it, in every layer that is alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.knobs import Knob, applied, asleep, knobs_of, movement, shown
from intently.promises.trial import Condition, Trial
from intently.report import Cell
from intently.sites import Site
from intently.targets.running import PLAIN


@dataclass(frozen=True)
class Lack:
    """A call without a bias, a cap or a sink that its peers have."""

    site: Site
    trait: str
    peer: Site
    size: float
    peers: int
    alone: bool  # every other call has it


def dead(trial: Trial, condition: Condition) -> tuple[Knob, ...]:
    """Knobs of the untouched model that move no output; those of a repaired one that still do not, and could."""
    original = trial.original
    key = ("knobs-live", condition.name)
    if key not in original.found:
        sites = original.sites(condition)
        held = [k for k in knobs_of(original.runner.model, sites) if k.named or not original.target.known]
        found = asleep(original, condition, held) if held else ()
        # A field may be stored twice: where the calls show what it says, it is alive.
        quiet = tuple(k for k in found if k.tensors or not _shown(k, sites))
        original.found[key] = (quiet, sum(k.named for k in held))
    found = original.found[key][0]
    if not trial.edits:
        return found
    sites = original.sites(condition)
    noise = trial.threshold(trial.output(condition))
    curable = [k for k in found if any(k.concerns(s) and applied(k, s) for s in sites)]
    return tuple(k for k in curable if movement(trial, condition, k) <= noise)


def _shown(knob: Knob, sites: Iterable[Site]) -> bool:
    concerned = [shown(s) for s in sites if knob.concerns(s)]
    return any(t is None or t.get(knob.kind) for t in concerned)


def lacking(trial: Trial, condition: Condition) -> tuple[Lack, ...]:
    """Calls that lack what at least half of the calls of their kind have; a released architecture has it where it is meant."""
    if trial.target.known:
        return ()
    kinds: dict[tuple[object, ...], list[tuple[Site, dict[str, float]]]] = {}
    modules = dict(trial.runner.model.named_modules()) if isinstance(trial.runner.model, nn.Module) else {}
    original = {s.key_name: s for s in trial.original.sites(condition)}
    for site in trial.sites(condition):
        traits = shown(site)
        if traits is not None and site.key_name in original:
            path, _, number = site.path.partition("#")
            owner = type(modules.get(path.replace("(root)", ""), None)).__name__
            kinds.setdefault((owner, number, site.role, site.heads, site.queries, site.keys), []).append((site, traits))
    found = []
    for calls in kinds.values():
        for trait in ("bias", "softcap", "sink"):
            having = [(s, t[trait]) for s, t in calls if t[trait]]
            without = [s for s, t in calls if not t[trait]]
            if without and len(having) >= len(without):
                peer, size = having[0]
                found += [Lack(s, trait, peer, size, len(having), len(without) == 1 < len(having)) for s in without]
    return tuple(found)


def try_on(trial: Trial) -> Iterable[Cell]:
    if not isinstance(trial.runner.model, nn.Module):
        return cells.inapplicable("knobs-live", trial, "a function holds no settings")
    found = []
    for condition in trial.conditions:
        layout = condition.layout
        if (
            condition.switch.name != PLAIN.name
            or layout.padded
            or layout.samples < 2
            or cells.same_as(trial, condition)
        ):
            continue
        if cells.ill(trial, condition):
            found.append(cells.untried("knobs-live", condition, "real outputs are not finite"))
            continue
        quiet, lacks = dead(trial, condition), lacking(trial, condition)
        named = trial.original.found[("knobs-live", condition.name)][1]
        if not named and not quiet and not lacks:
            note = "no cap, bias, slope or sink is held by a module that attends"
            found.append(Cell("knobs-live", condition.name, "not-applicable", note=note))
            continue
        bad = len(quiet) + len(lacks)
        note = ", ".join([k.name for k in quiet] + [f"{x.trait} at {x.site.path}" for x in lacks])
        found.append(cells.cell("knobs-live", condition, float(bad), 0.0, broken=bad > 0, note=note[:200]))
    return found


PROMISE = Promise(
    name="knobs-live",
    statement="Each cap, sink, slope and table of bias that a model holds for its attention moves an output, and does so in every "
    "layer of a kind.",
    applies_to="modules that hold such settings and in which an attention call ran",
    how="One backward pass tells which tensors of the attending modules the outputs depend on; the others, and caps and flags "
    "among the fields, are set otherwise one by one. At the sites of a traced run, calls of one kind are held against each other. "
    "`error` counts what is without effect.",
    sources=("reports of stored and never applied softcaps, sinks and biases in ported models",),
    try_on=try_on,
    error_means="settings without effect:",
)
