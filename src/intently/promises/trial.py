"""A target under its conditions: what moves what, from outside; and, on a separate run, what its sites show."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from intently.errors import CannotCheck
from intently.intent import Intent
from intently.masks import Mask
from intently.sites import Edit, Settings, Site
from intently.targets.feeding import Feed, Way, whole_batch
from intently.targets.generating import generation
from intently.targets.running import PLAIN, Fed, Runner
from intently.targets.stream import Batch
from intently.targets.target import Switch, Target

# An edit that may depend on the batch that runs (which keys are pads).
BatchEdit = Callable[[Site, Batch], Any]

MOST_POSITIONS = 12  # positions changed one by one; more are sampled evenly
TELLING = 2  # positions changed where one that shows a fault is enough


@dataclass(frozen=True)
class Layout:
    """How a batch is put together: how many samples, which masks are passed, where the pads lie."""

    name: str
    samples: int
    pads: Mapping[str, str] = field(default_factory=dict)  # stream → "right", "left" or "none" (a mask of ones)

    @property
    def padded(self) -> tuple[str, ...]:
        return tuple(s for s, side in self.pads.items() if side != "none")


@dataclass(frozen=True)
class Condition:
    """A circumstance in which promises are tried; with `feed` the tokens come in pieces through the model's cache."""

    switch: Switch
    layout: Layout
    feed: Feed | None = None

    @property
    def name(self) -> str:
        where = self.layout.name if self.feed is None else self._fed()
        return where if self.switch.name == PLAIN.name else f"{self.switch.name} · {where}"

    def _fed(self) -> str:
        assert self.feed is not None
        told = self.layout.samples == 1 or self.layout.pads
        said = [self.feed.name, *([self.layout.name] if told else [])]
        return f"{self.feed.way.name}: {', '.join(said)}{', positions given' if self.feed.positions else ''}"

    @property
    def whole(self) -> Condition:
        """The same tokens in one forward without a cache."""
        if self.feed is None or not self.feed.cuts:
            return self
        return Condition(self.switch, self.layout, self.feed.whole() if self.feed.positions else None)


@dataclass(frozen=True)
class Influence:
    """What one position of one sample moves: `moved[stream][position, batch, output]` are largest absolute differences.

    Positions are those of sample 0, `positions[stream]` their numbers.
    """

    base: Tensor  # [batch, output, values]
    moved: Mapping[str, Tensor]
    positions: Mapping[str, Tensor]
    batch: Batch

    def finite(self, rows: Tensor) -> bool:
        """Whether every real output is a number; `rows` is bool [batch, output]."""
        return bool(torch.isfinite(self.base[rows]).all())


class Trial:
    """Runs one target, without looking inside, under its conditions; results are kept, so each run is made once.

    `edits` (site key → edit) make it a trial of the repaired model; `conditions` can be narrowed.
    """

    def __init__(
        self,
        target: Target,
        intent: Intent,
        runner: Runner,
        conditions: Sequence[Condition],
        lengths: Mapping[str, int],
        *,
        floor: float = 0.0,
        seed: int = 0,
        edits: Mapping[str, BatchEdit] | None = None,
        progress: Callable[[], None] | None = None,
    ):
        self.target = target
        self.intent = intent
        self.runner = runner
        self.conditions = tuple(c for c in conditions if c.feed is None)
        self.fed = tuple(c for c in conditions if c.feed is not None)
        self.lengths = lengths
        self.floor = floor
        self.seed = seed
        self.edits = dict(edits or {})
        self.progress = progress or (lambda: None)
        self.in_precision: Mapping[str, Runner] = {}
        self._unrepaired: Trial | None = None
        self.found: dict[Any, Any] = {}  # what a promise worked out, and its faults ask for again
        self._influence: dict[str, Influence] = {}
        self._glanced: Mapping[str, Tensor] = {}  # the positions to change, of streams of which not all are
        self._outputs: dict[tuple[str, int], Tensor] = {}
        self._sites: dict[str, tuple[Tensor, tuple[Site, ...]]] = {}
        self._pieces: dict[str, Fed] = {}
        self._columns: dict[str, Tensor] = {}
        self._forwards: dict[str, Tensor] = {}  # of one forward over what was generated

    @property
    def everything(self) -> tuple[Condition, ...]:
        """The conditions of whole forwards and those fed in pieces, which only promises about caches try."""
        return (*self.conditions, *self.fed)

    # -- batches ----------------------------------------------------------------------------------------------------

    def kept(self, layout: Layout) -> dict[str, Tensor]:
        """The masks that a layout passes: sample 0 is the short one, and sample 1 is a little longer than it."""
        masks = {}
        for name, side in layout.pads.items():
            stream = self.target.stream(name)
            positions = stream.positions(self.lengths[name])
            mask = torch.ones(layout.samples, positions, dtype=torch.bool)
            pads = max(1, min(3, positions // 2))
            # Different lengths, so that one sample's mask cannot pass for another's.
            for sample, count in ((0, pads), (1, 1 if pads > 1 else 0))[: layout.samples]:
                if side == "right":
                    mask[sample, positions - count :] = False
                elif side == "left":
                    mask[sample, :count] = False
            masks[name] = mask
        for stream in self.target.streams:
            if stream.part == "value" and stream.follows in masks:
                masks[stream.argument] = masks[stream.follows]
        return masks

    def padded(self, layout: Layout) -> tuple[str, ...]:
        """Streams in which sample 0 has pads."""
        return tuple(name for name, kept in self.kept(layout).items() if not bool(kept.all()))

    def batch(self, layout: Layout, *, seed: int | None = None, dtype: torch.dtype | None = None) -> Batch:
        return self.target.batch(
            layout.samples,
            self.lengths,
            seed=self.seed if seed is None else seed,
            dtype=dtype or self.runner.dtype,
            kept=self.kept(layout),
        )

    def real_rows(self, condition: Condition, outputs: int) -> Tensor:
        """bool [batch, output]: outputs that stand at real positions."""
        kept = self.kept(condition.layout).get(self.target.main.argument)
        rows = torch.ones(condition.layout.samples, outputs, dtype=torch.bool)
        return kept if kept is not None and kept.shape == rows.shape else rows

    # -- runs -------------------------------------------------------------------------------------------------------

    def run(self, batch: Batch, switch: Switch, *, seed: int = 0, precision: str = "") -> Tensor:
        """One forward, perhaps in another precision; through the edits when there are any."""
        self.progress()
        runner = self.in_precision[precision] if precision else self.runner
        if self.edits:
            return runner.edited(batch, switch, seed=seed, edits=self._bound(batch))
        return runner.output(batch, switch, seed=seed)

    def output(self, condition: Condition, *, seed: int = 0) -> Tensor:
        key = (condition.name, seed)
        if key not in self._outputs:
            self._outputs[key] = self.feed(condition, seed=seed)
        return self._outputs[key]

    def feed(self, condition: Condition, *, seed: int = 0) -> Tensor:
        """What a condition gives, run anew: whole, or in pieces; through the edits when there are any."""
        batch, feed = self.batch(condition.layout), condition.feed
        if feed is None:
            return self.run(batch, condition.switch, seed=seed)
        if feed.new:
            self.progress()
            generated, self._forwards[condition.name] = self.runner.generated(batch, feed)
            return generated
        if not feed.cuts:
            return self.run(whole_batch(self.target, batch, feed), condition.switch, seed=seed)
        self.progress()
        edited = (lambda piece: Settings(edited_only=True, edits=self._bound(piece))) if self.edits else None
        fed = self.runner.fed(batch, feed, condition.switch, seed=seed, settings=edited)
        self._columns[condition.name] = fed.columns
        return fed.output

    def whole(self, condition: Condition) -> Tensor:
        """What one forward gives under a condition that is fed in pieces: the values that pieces give, too."""
        self.output(condition)
        if condition.name in self._forwards:
            return self._forwards[condition.name]
        return self.output(condition.whole)[..., self._columns[condition.name]]

    def pieces(self, condition: Condition) -> tuple[tuple[Batch, tuple[Site, ...]], ...]:
        """The batch and the sites of each traced piece; of a condition that runs whole, the one batch."""
        feed = condition.feed
        if feed is None or not feed.cuts:
            batch = self.batch(condition.layout)
            return ((batch if feed is None else whole_batch(self.target, batch, feed), self.sites(condition)),)
        if condition.name not in self._pieces:
            self.progress()
            self._pieces[condition.name] = self.runner.fed(
                self.batch(condition.layout), feed, condition.switch,
                settings=lambda piece: Settings(True, edits=self._bound(piece)),
            )  # fmt: skip
        fed = self._pieces[condition.name]
        return tuple(zip(fed.pieces, fed.sites, strict=True))

    def influence(self, condition: Condition) -> Influence:
        """Change every position of sample 0 in turn, all streams, and see which outputs move."""
        if condition.name not in self._influence:
            batch = self.batch(condition.layout)
            base = self.output(condition)
            moved, positions = {}, {}
            for stream in self.target.streams:
                count = stream.positions(self.lengths[stream.argument])
                chosen = self._glanced.get(stream.argument, torch.arange(count))
                if len(chosen) > MOST_POSITIONS:
                    chosen = torch.linspace(0, count - 1, MOST_POSITIONS).long().unique()
                rows = []
                for position in chosen.tolist():
                    content = batch.arguments[stream.argument]
                    changed = stream.change(content, 0, position, self.seed + 1)
                    arguments = {**batch.arguments, stream.argument: changed}
                    other = self.run(Batch(arguments, batch.lengths, batch.samples, batch.kept), condition.switch)
                    if other.shape != base.shape:
                        raise CannotCheck(
                            f"how much comes out depends on what goes in: {list(base.shape)}, and {list(other.shape)} with one input changed",
                            cause="outputs cannot be held against each other where the model works out how long its answer is",
                            hint="check the part of the model that runs before that",
                        )
                    rows.append(difference(other, base))
                moved[stream.argument] = torch.stack(rows)
                positions[stream.argument] = chosen
            self._influence[condition.name] = Influence(base, moved, positions, batch)
        return self._influence[condition.name]

    def sites(self, condition: Condition) -> tuple[Site, ...]:
        """The sites of one traced run under a condition, piece after piece where it is fed in pieces."""
        if condition.feed is not None and condition.feed.cuts:
            return tuple(site for _, sites in self.pieces(condition) for site in sites)
        return self._traced(condition)[1]

    @property
    def original(self) -> Trial:
        """The trial of the model as it is, of which this one may be a repaired variation."""
        return self._unrepaired or self

    @cached_property
    def passes(self) -> tuple[Mask, ...] | None:
        """The masks that inputs are meant to pass on their way to the outputs, one a self-attention call of the main stream.

        Calls are counted in a plain run of the model as it is; None where some may have run unseen.
        """
        if self._unrepaired is not None:
            return self._unrepaired.passes
        plain = next((c for c in self.conditions if c.switch.name == PLAIN.name and not c.layout.padded), None)
        if plain is None:
            return None
        found = [self.intent.mask_at(s.path) for s in self.sites(plain) if self.in_main_stream(s)]
        masks = tuple(m for m in found if m is not None)
        return None if self.runner.opaque or not found or len(masks) < len(found) else masks

    def in_main_stream(self, site: Site) -> bool:
        """Whether a call is self-attention among the positions that the outputs follow."""
        main = self.target.main
        if main.part:
            return site.queries == site.keys
        alone = len(self.target.streams) == 1
        return site.role == "self" and (alone or main.argument in site.origins.get("query", frozenset()))

    def sites_in(self, precision: str, condition: Condition) -> tuple[Site, ...]:
        """The sites of one traced run in another precision (see `in_precision`)."""
        key = f"{precision}: {condition.name}"
        if key not in self._sites:
            self.progress()
            runner = self.in_precision[precision]
            batch = self.batch(condition.layout, dtype=runner.dtype)
            self._sites[key] = runner.traced(batch, condition.switch, edits=self._bound(batch))
        return self._sites[key][1]

    def traced_output(self, condition: Condition) -> Tensor:
        return self._traced(condition)[0]

    def traced(self, batch: Batch, switch: Switch) -> tuple[Tensor, tuple[Site, ...]]:
        """The output and the sites of one traced run of any batch; it is not kept."""
        self.progress()
        return self.runner.traced(batch, switch, edits=self._bound(batch))

    def _traced(self, condition: Condition) -> tuple[Tensor, tuple[Site, ...]]:
        if condition.name not in self._sites:
            self.progress()
            batch = self.batch(condition.layout)
            batch = batch if condition.feed is None else whole_batch(self.target, batch, condition.feed)
            self._sites[condition.name] = self.runner.traced(batch, condition.switch, edits=self._bound(batch))
        return self._sites[condition.name]

    def _bound(self, batch: Batch) -> dict[str, Edit]:
        """The edits, told which batch they run on."""
        return {key: (lambda site, e=edit: e(site, batch)) for key, edit in self.edits.items()}

    # -- variations -------------------------------------------------------------------------------------------------

    def repaired(self, edits: Mapping[str, BatchEdit], conditions: Iterable[Condition]) -> Trial:
        """The same trial of the model with edits at its sites."""
        other = Trial(
            self.target, self.intent, self.runner, tuple(conditions), self.lengths, floor=self.floor, seed=self.seed, edits=edits,
            progress=self.progress,
        )  # fmt: skip
        other.in_precision = self.in_precision
        other._unrepaired = self._unrepaired or self
        return other

    def narrowed(self, conditions: Iterable[Condition]) -> Trial:
        """The same trial under some of its conditions; what either of the two runs, both know."""
        other, chosen = copy.copy(self), tuple(conditions)
        other.conditions = tuple(c for c in chosen if c.feed is None)
        other.fed = tuple(c for c in chosen if c.feed is not None)
        return other

    def glancing(self, positions: Mapping[str, Tensor]) -> Trial:
        """The same trial with only some positions of each stream changed: enough to see a promise broken, not kept."""
        other = copy.copy(self)
        other._influence, other._glanced = {}, positions
        return other

    def stilled(self, condition: Condition, repaired: Trial) -> dict[str, Tensor] | None:
        """Per stream the positions that move other outputs here than in a repaired trial, the most telling ones.

        None where either has not changed them one by one.
        """
        mine, theirs = self._influence.get(condition.name), repaired._influence.get(condition.name)
        if mine is None or theirs is None:
            return None
        noise = max(self.threshold(mine.base), self.threshold(theirs.base))
        found = {}
        for stream, positions in mine.positions.items():
            differ = (mine.moved[stream] > noise) != (theirs.moved[stream] > noise)
            found[stream] = positions[differ.flatten(1).sum(1).topk(min(TELLING, len(positions))).indices]
        return found

    def assume(self, condition: Condition, other: Trial) -> None:
        """Take another trial's output for a condition instead of running it."""
        self._outputs[(condition.name, 0)] = other.output(condition)

    def threshold(self, base: Tensor) -> float:
        """The largest difference that counts as rounding, in output units."""
        finite = base[torch.isfinite(base)]
        return self.floor * float(finite.abs().amax()) if finite.numel() else self.floor

    def named(self, name: str) -> Condition:
        found = next((c for c in self.everything if c.name == name), None)
        if found is None:
            raise CannotCheck(f"no condition is named {name!r}")
        return found


def difference(a: Tensor, b: Tensor) -> Tensor:
    """`[batch, output]`: largest absolute difference of the values; inf where only one of the two is a number."""
    gap = (a - b).abs()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    gap = torch.where(same, torch.zeros_like(gap), gap)
    return torch.nan_to_num(gap, nan=float("inf"), posinf=float("inf")).amax(-1)


def conditions_of(target: Target, samples: int) -> tuple[Condition, ...]:
    """Every circumstance to try for a target: masks absent, of ones and real; pads on either side; alone and in a batch."""
    layouts = [Layout(f"batch {samples}", samples)]
    layouts += [Layout("batch 1", 1)] if samples > 1 and not target.samples else []
    padded = [s for s in target.streams if s.padding is not None]
    if padded:
        ones = {s.argument: "none" for s in padded}
        layouts.append(Layout("mask of ones", samples, ones))
        if not target.samples:
            layouts.append(Layout("mask of ones, batch 1", 1, ones))
        for stream in padded:
            label = "" if len(padded) == 1 else f"{stream.argument}: "
            layouts.append(Layout(f"{label}pads right", samples, {stream.argument: "right"}))
            if not target.samples:  # one padded sample alone: where a model thinks that it needs no mask
                layouts.append(Layout(f"{label}pads right, batch 1", 1, {stream.argument: "right"}))
            if stream.padding is not None and stream.padding.form != "lengths":
                layouts.append(Layout(f"{label}pads left", samples, {stream.argument: "left"}))
    switches = (PLAIN, *target.switches)
    return tuple(Condition(switch, layout) for switch in switches for layout in layouts)


STEPS, LONGEST_ALONE = 3, 12  # steps of one token after a prefill; as many positions are fed one by one


def feeds_of(trial: Trial, ways: Sequence[Way]) -> tuple[Condition, ...]:
    """Every circumstance in which to feed a target in pieces: steps, chunks and one by one, with pads, with other caches."""
    target = trial.target
    length = target.main.positions(trial.lengths[target.main.argument])
    if not ways or length < STEPS + 2:
        return ()
    usual, *others = ways
    chunk = STEPS if length <= LONGEST_ALONE else length // 4
    steps = (length - STEPS, *(1,) * STEPS)
    chunks = (*(chunk,) * (length // chunk), *((length % chunk,) if length % chunk else ()))
    in_steps, in_chunks = Feed(usual, "prefill and steps", steps), Feed(usual, f"chunks of {chunk}", chunks)
    layouts = [c.layout for c in trial.conditions if c.switch.name == PLAIN.name]
    found = []
    greedy = generation(trial.runner.model, target, usual) if length <= LONGEST_ALONE else None

    def generated(layout: Layout) -> list[Condition]:
        return [Condition(PLAIN, layout, greedy)] if greedy is not None else []

    for layout in layouts:
        main, samples = layout.pads.get(target.main.argument), layout.samples
        if samples == 1 and not layout.pads and length <= LONGEST_ALONE:
            found.append(Condition(PLAIN, layout, Feed(usual, "one by one", (1,) * length)))
        elif samples > 1 and not layout.pads:
            backends = [s for s in target.switches if s.backend][:1]
            found.append(Condition(PLAIN, layout, in_steps))
            found += generated(layout)
            found += [Condition(switch, layout, in_chunks) for switch in (PLAIN, *backends)]
            found += [Condition(PLAIN, layout, replace(in_chunks, way=way)) for way in others]
        elif samples > 1 and (main == "left" or (main is None and "right" in layout.pads.values())):
            found.append(Condition(PLAIN, layout, in_steps))
            found += generated(layout) if main is None or len(target.streams) == 1 else []
            if main == "left" and usual.positions:
                found.append(Condition(PLAIN, layout, replace(in_steps, positions=True)))
    return tuple(found)


def equal_case(target: Target, conditions: Sequence[Condition], heads: int) -> Condition | None:
    """As many samples as heads, where pads lie on the right: a mask may then fit along the wrong axis."""
    like = next(
        (c for c in conditions if c.layout.padded and c.layout.samples > 1 and c.switch.name == PLAIN.name), None
    )
    padded = sorted((s for s in target.streams if s.padding is not None), key=lambda s: s is not target.main)
    stream = padded[0].argument if padded else None
    if stream is None or target.samples or heads < 2 or (like is not None and like.layout.samples == heads):
        return None
    return Condition(PLAIN, Layout(f"pads right, batch {heads}", heads, {stream: "right"}))
