"""Fault `cross-miswired`: a call meant for the source reads the model's own states, in keys or values; or the reverse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from intently.edits import attend_to
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look
from intently.faults.own_unread import misled, own_states, reaching_others
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
from intently.promises.memory_respected import silent
from intently.report import Witness
from intently.sites import Site
from intently.targets.stream import Batch

_NO_PROJECTION, _NOT_ANEW = "its keys or values are no plain projection of hidden states", "they cannot be made anew"
_SHOWN_BY = ("memory-respected", "causal", "sees-all", "padding-inert")  # promises that a wrong source may break


def miswired(trial: Trial, condition: Condition, sites: Sequence[Site]) -> Iterator[tuple[Wiring, str]]:
    """The calls that should read the source, with what tells it."""
    known = [w for w in wirings(trial, sites) if not replaced(w.site)]
    for w in known:
        if w.is_mixed:
            keys, values = ("the source", "the model's own states")[:: 1 if w.key == "source" else -1]
            yield w, f"its keys come from {keys} and its values from {values}"
    readers = {place(w.site): w for w in known if w.reads_source}
    for w in known:
        alike = readers.get(place(w.site))
        # Layers that take turns (one over itself, the next over the source) are no fault: there a block has one call.
        if w.is_own and alike is not None and _beside_own(w, alike, known) and _beside_own(alike, w, known):
            yield w, f"its keys and values are the model's own states, where {alike.site.path} reads the source"
    if not any(w.reads_source or w.is_mixed for w in known) and silent(trial, condition):
        names = " or ".join(silent(trial, condition))
        for w in _meant_for_source([w for w in known if w.is_own]):
            yield w, f"its keys and values are the model's own states, and no call reads {names}"


def _beside_own(w: Wiring, alike: Wiring, everyone: Sequence[Wiring]) -> bool:
    return beside(w, alike, everyone, lambda o: o.is_own)


def _meant_for_source(own: Sequence[Wiring]) -> list[Wiring]:
    """Of calls that all read own states, those whose name speaks of a source; else the second one of each layer."""
    return [w for w in own if speaks_of_source(w)] or [second for _, second in in_pairs(own)]


class Memory:
    """The hidden states that a call should have read, found in a run of the untouched model on the same batch."""

    def __init__(self, trial: Trial, condition: Condition, wrong: Wiring):
        self.trial, self.condition, self.wrong = trial, condition, wrong
        self._last: tuple[Batch, Tensor | None] | None = None

    def of(self, batch: Batch) -> Tensor | None:
        if self._last is None or self._last[0] is not batch:
            sites = self.trial.runner.traced(batch, self.condition.switch)[1]
            self._last = (batch, self._among(sites, batch))
        return self._last[1]

    def _among(self, sites: Sequence[Site], batch: Batch) -> Tensor | None:
        known = wirings(self.trial, sites)
        here = next((w for w in known if w.site.key_name == self.wrong.site.key_name), None)
        if here is None or here.site.tensors is None:
            return None
        if here.is_mixed:
            return read_by(here.site, "key" if here.key == "source" else "value", batch)
        alike = next((w for w in known if w.reads_source and place(w.site) == place(here.site)), None)
        if alike is not None:
            return read_by(alike.site, "key", batch)
        return self._ready(here.site, batch)

    def _ready(self, site: Site, batch: Batch) -> Tensor | None:
        """The latest hidden states made of the source alone, of the width that the call reads."""
        own = read_by(site, "key", batch)
        target = self.trial.target
        sources, main = {s.argument for s in target.sources}, target.main.argument
        for origins, tensor in reversed(list(site.ready.items())):
            if own is not None and origins & sources and main not in origins and tensor.shape[-1] == own.shape[-1]:
                return tensor if tensor.shape[0] == batch.samples else tensor.transpose(0, 1)
        return None

    def kept(self, batch: Batch) -> Tensor | None:
        """Which positions of these states are real; None where they are not the source's own."""
        hidden = self.of(batch)
        masks = [batch.kept[s.argument] for s in self.trial.target.sources]
        return next((m for m in masks if hidden is not None and m.shape == hidden.shape[:2]), None)


def look(seen: Examination) -> Iterator[Suspicion]:
    trial = seen.trial
    if not trial.target.sources:
        return
    for condition in seen.distinct:
        looks = {id(each.site): each for each in seen.looks([condition])}
        sites = [each.site for each in looks.values()]
        for wrong, why in misled(seen, condition, sites):
            yield _reading_the_source(seen, looks[id(wrong.site)], wrong, why)
        if trial.target.known:
            continue  # where a released architecture reads itself was trained that way
        for wrong, why in miswired(trial, condition, sites):
            yield _reading_itself(seen, looks[id(wrong.site)], wrong, why)


def _reading_the_source(seen: Examination, each: Look, wrong: Wiring, why: str) -> Suspicion:
    repair = own_states(seen)
    repairable = repair(each.site, each.batch) is not None
    return Suspicion(
        fault=FAULT,
        promise="sees-all",
        site=each.site,
        message=f"a call meant for the model's own states reads the source: {why}",
        witness=_origins(each.site),
        repair=repair if repairable else None,
        condition=each.condition.name,
        proven_by=reaching_others(seen.trial, each.condition, wrong, repair) if repairable else "",
        unprovable="" if repairable else f"{_NO_PROJECTION}, or the mask meant here is not known: {_NOT_ANEW}",
    )


def _origins(site: Site) -> Witness:
    held = {n: ", ".join(sorted(site.origins.get(n, frozenset()))) for n in ("query", "key", "value")}
    said = f"queries hold {held['query']}; keys hold {held['key']}; values hold {held['value']}"
    return Witness(said, None, {"queries": site.queries, "keys": site.keys})


def _reading_itself(seen: Examination, each: Look, wrong: Wiring, why: str) -> Suspicion:
    condition, site = each.condition, each.site
    memory = Memory(seen.trial, condition, wrong)
    fed = memory.of(each.batch)
    repairable = fed is not None and site.tensors is not None and feedable(site, fed)

    def repair(s: Site, batch: Batch) -> Any:
        return attend_to(lambda _: memory.of(batch), lambda _: memory.kept(batch))(s)

    promise = next((p for p in _SHOWN_BY if seen.breaks(p, condition)), "memory-respected")
    return Suspicion(
        fault=FAULT,
        promise=promise,
        site=site,
        message=f"a call meant for the source does not read it: {why}",
        witness=_origins(site),
        repair=repair if repairable else None,
        condition=condition.name,
        proven_by=_proof(seen.trial, condition, wrong, repair) if repairable and wrong.is_own else "",
        unprovable=""
        if repairable
        else f"{_NO_PROJECTION}, or no states of the source with their width were seen: {_NOT_ANEW}",
    )


def _proof(trial: Trial, condition: Condition, wrong: Wiring, repair) -> str:
    """With every call silenced that does read the source, this one alone decides whether the source moves the output."""
    sites = trial.sites(condition)
    others = [w.site for w in wirings(trial, sites) if "source" in (w.key, w.value)]
    batch = trial.batch(condition.layout)
    sources = {s.argument for s in trial.target.sources}
    other = trial.batch(condition.layout, seed=trial.seed + 1).arguments
    changed = Batch(
        {a: other[a] if a in sources else v for a, v in batch.arguments.items()},
        batch.lengths,
        batch.samples,
        batch.kept,
    )

    rows = trial.real_rows(condition, trial.output(condition).shape[1])
    fed = decides_alone(trial, condition, {wrong.site.key_name: repair}, others, changed, lambda gap: gap[rows])
    if fed is None:
        return ""
    alone = "with the other calls that read the source silenced, " if others else ""
    return f"{alone}the source moves nothing; with this call fed the source's states it moves an output by {fed:.3g}"


FAULT = Fault(
    name="cross-miswired",
    stage="project",
    promises=("memory-respected", "sees-all", "causal", "padding-inert"),
    severity="error",
    summary="A call meant for the source reads the model's own states, in its keys, its values or both; or one meant for these reads "
    "the source.",
    symptom="The decoder hardly depends on its source: it writes fluently about something else. Or it knows the source and none of its "
    "own earlier tokens.",
    why_silent="Own states have the right width, so every shape fits, and what is left of the model still learns.",
    fix="Project keys and values from the memory and only the queries from the decoder's states, cross(x, memory, memory); in "
    "self-attention all three from the decoder's states, own(x, x, x).",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.MultiheadAttention(16, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, memory):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.own(x, x, x, attn_mask=later)[0]
        return x + self.cross(x, x, x, attn_mask=later)[0]

def build():
    torch.manual_seed(0)
    return Target(Layer().eval(), Intent(Mask.causal()), features=16)
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.MultiheadAttention(16, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, memory):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.own(x, x, x, attn_mask=later)[0]
        return x + self.cross(x, memory, memory)[0]

def build():
    torch.manual_seed(0)
    return Target(Layer().eval(), Intent(Mask.causal()), features=16)
""",
    sources=("Vaswani et al. 2017, section 3.2.3: keys and values come from the output of the encoder",),
    look=look,
)
