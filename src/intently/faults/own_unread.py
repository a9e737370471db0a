"""Calls meant for the model's own states that read the source instead: the reverse of a source that is not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from intently.edits import attend_to
from intently.faults.evidence import Examination
from intently.faults.wiring import (
    Wiring,
    beside,
    decides_alone,
    feedable,
    in_pairs,
    place,
    read_by,
    replaced,
    speaks_of_source,
    wirings,
)
from intently.promises import Condition, Trial
from intently.promises.sees_all import unseen
from intently.sites import Site
from intently.targets.stream import Batch


def misled(seen: Examination, condition: Condition, sites: Sequence[Site]) -> Iterator[tuple[Wiring, str]]:
    """The calls that should read the model's own states and read the source, with what tells it."""
    trial = seen.trial
    known = [w for w in wirings(trial, sites) if not replaced(w.site)]
    if not any(w.reads_source for w in known):
        return
    main = trial.target.main.argument
    hidden = seen.breaks("sees-all", condition) and bool(unseen(trial, condition)[main].any())
    if hidden and not any(w.is_own or w.is_mixed for w in known):
        for w in _meant_for_own([w for w in known if w.reads_source]):
            yield w, f"its keys and values come from it, and no call reads the states of {main}"
    if trial.target.known and not hidden:
        return  # what reaches its outputs all the same was trained that way
    readers = {place(w.site): w for w in known if w.is_own}
    for w in known:
        alike = readers.get(place(w.site))
        # In layers that read nothing but the source, a call that does so is no second one.
        if w.reads_source and alike is not None and _beside_source(w, alike, known) and _beside_source(alike, w, known):
            yield w, f"its keys and values come from it, where {alike.site.path} reads the model's own states"


def _beside_source(w: Wiring, alike: Wiring, everyone: Sequence[Wiring]) -> bool:
    return beside(w, alike, everyone, lambda o: o.reads_source)


def _meant_for_own(readers: Sequence[Wiring]) -> list[Wiring]:
    """Of calls that all read the source, those beside others whose name speaks of it; else the first one of each layer."""
    unnamed = [w for w in readers if not speaks_of_source(w)]
    return unnamed if 0 < len(unnamed) < len(readers) else [first for first, _ in in_pairs(readers)]


def own_states(seen: Examination) -> Callable[[Site, Batch], Any]:
    """A repair: keys and values made of the states that the queries are made of, under the mask meant for these."""

    def repair(site: Site, batch: Batch) -> Any:
        hidden = read_by(site, "query", batch)
        meant = replace(site, role="self", keys=site.queries, origins={**site.origins, "key": site.origins["query"]})
        wanted = seen.wanted(meant, batch)
        if hidden is None or wanted is None or hidden.shape[1] != site.queries or not feedable(site, hidden):
            return None
        return attend_to(lambda _: hidden, lambda _: wanted)(site)

    return repair


def reaching_others(trial: Trial, condition: Condition, wrong: Wiring, repair: Callable[[Site, Batch], Any]) -> str:
    """With every other call over own states silenced, this one alone decides whether a token reaches another's output."""
    others = [w.site for w in wirings(trial, trial.sites(condition)) if "own" in (w.key, w.value)]
    batch, main = trial.batch(condition.layout), trial.target.main
    content = main.change(batch.arguments[main.argument], 0, 0, trial.seed + 1)
    changed = Batch({**batch.arguments, main.argument: content}, batch.lengths, batch.samples, batch.kept)

    if trial.output(condition).shape[1] != main.positions(trial.lengths[main.argument]):
        return ""
    repairs = {wrong.site.key_name: repair}
    fed = decides_alone(trial, condition, repairs, others, changed, lambda gap: gap[0, 1:])
    if fed is None:
        return ""
    alone = "with the other calls over own states silenced, " if others else ""
    return f"{alone}the first token moves no other output; with this call fed own states it moves one by {fed:.3g}"
