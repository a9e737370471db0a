"""Fault `side-channel`: a promise is broken though every attention call keeps it; something else carries the information."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from intently.faults.base import Fault, Suspicion
from intently.faults.cache_apart import parted
from intently.faults.evidence import Examination
from intently.faults.recording import Channel, Recording, gap, hooked, over, swapped, tensors_held
from intently.promises import Condition, Trial, difference
from intently.promises.cache_equal import gaps, noise
from intently.promises.causal import leaks
from intently.promises.documents_isolated import crossed, overwritten
from intently.report import Severity, Witness
from intently.targets.stream import Batch
from intently.targets.target import tensors_of

# Told by what moves when something is changed.
_MOVED = ("causal", "padding-inert", "batch-independent", "documents-isolated", "repeatable")
FOLLOWED = (*_MOVED, "cache-equal")
_MOST = 12


@dataclass(frozen=True)
class Pair:
    """Two runs that should agree on some outputs and do not: the case that a search for the channel replays."""

    first: Batch
    second: Batch
    guarded: Tensor  # bool [batch, position]: where nothing may move
    said: str
    seeds: tuple[int, int] = (0, 0)
    without: Condition | None = None  # the condition of the first run, where it is another than the second's


def look(seen: Examination) -> Iterator[Suspicion]:
    """Runs last, on the repaired model: what is still broken there is not attention's doing."""
    for promise in _MOVED:
        for condition in seen.broken(promise):
            pair = _pair(seen, promise, condition)
            if pair is None:
                continue
            channels, cured = search(seen.trial, condition, pair)
            for channel in channels:
                yield Suspicion(
                    fault=FAULT,
                    promise=promise,
                    site=None,
                    place=channel.path,
                    message=f"{type(channel.module).__name__} at {channel.path} brings it in: its inputs agree where they should, its "
                    f"output moves by {channel.moved:.3g}; every attention call keeps the promise",
                    witness=Witness(pair.said, None, {"moved": channel.moved}),
                    severity=_severity(seen, promise, channel),
                    condition=condition.name,
                    proven_by=f"with the output of {' and '.join(c.path for c in channels)} held where it should not move, the promise is kept"
                    if cured
                    else "",
                    unprovable=""
                    if cured
                    else "holding its output was not enough: the information takes another way as well",
                )
            if not channels:
                yield Suspicion(
                    fault=FAULT,
                    promise=promise,
                    site=None,
                    message="no attention call explains it, and no single module could be found that does",
                    witness=Witness(pair.said),
                    severity=_severity(seen, promise, None),
                    condition=condition.name,
                    unprovable="the model is no module, or one call does everything",
                )
            break  # one condition tells the channel; the grid shows the others
    yield from _parted(seen)


def _parted(seen: Examination) -> Iterator[Suspicion]:
    """Modules that give another output for the same input when the model is fed in pieces; steps tell it before chunks do."""
    for condition in sorted(seen.broken("cache-equal"), key=lambda c: not _in_steps(c))[:1]:
        channels, cured = parted(seen.trial, condition)
        apart = float(gaps(seen.trial, condition).amax())
        how = "steps of one token" if _in_steps(condition) else "chunks of several tokens"
        said, told = (
            "though every attention call that could be read sees the same keys",
            _with_positions(seen, condition),
        )
        cause = told or "positions, what is cached, or a state that is not carried on"
        if condition.feed is not None and condition.feed.new:
            how, cause = "by its own generate", "a mask, positions or a cache prepared otherwise than for a forward"
        handed = _handed_over(seen, condition)
        cause = f"generate hands over {handed} from 0 on, where a forward makes others" if handed else cause
        places = [(c.path, f"{type(c.module).__name__} at {c.path}", f"by {c.moved:.3g}, relatively") for c in channels]
        held = " and ".join(path for path, _, _ in places)
        for path, name, moved in places or [("", "the model", f"by {apart:.3g}")]:
            yield Suspicion(
                fault=FAULT,
                promise="cache-equal",
                site=None,
                place=path,
                message=f"fed in {how}, {name} gives another output for the same input ({moved}), {said}: {cause}",
                witness=Witness(
                    f"{condition.name}: an output differs from the whole forward by {apart:.3g}", None, {"moved": apart}
                ),
                severity="warning" if told else "error",
                condition=condition.name,
                proven_by=f"with the output of {held} as in the whole forward, cache-equal is kept"
                if cured and path
                else f"one forward that is given {handed} from 0 on gives what generate does"
                if handed
                else "",
                unprovable="" if cured else "no single module differs alone, or holding it was not enough",
            )


def _handed_over(seen: Examination, condition: Condition) -> str:
    """The argument of positions that makes all the difference between `generate` and a forward; empty where none does."""
    feed, trial = condition.feed, seen.trial
    if feed is None or not feed.new or not feed.way.positions or condition.layout.padded:
        return ""
    given = replace(feed, positions=True)
    generated, whole = trial.runner.generated(trial.batch(condition.layout), given)
    return feed.way.positions if float(difference(generated, whole).amax()) <= noise(trial, condition) else ""


def _in_steps(condition: Condition) -> bool:
    """Whether a condition feeds one token after another, as generation does."""
    return condition.feed is not None and max(condition.feed.cuts[1:], default=condition.feed.new and 1) == 1


def _with_positions(seen: Examination, condition: Condition) -> str:
    """What to say where passing the positions is all that it needs: then it depends on the caller."""

    def without(given: Condition) -> Condition:
        assert given.feed is not None
        return replace(given, feed=replace(given.feed, positions=False))

    given = [c for c in seen.trial.fed if c.feed is not None and c.feed.positions and not seen.breaks("cache-equal", c)]
    cured = any(seen.breaks("cache-equal", without(c)) for c in given)
    if condition.feed is None or condition.feed.positions or condition.feed.new or not cured:
        return ""
    return f"with {condition.feed.way.positions} passed the promise is kept, so that without them a step counts its positions from 0"


def _severity(seen: Examination, promise: str, channel: Channel | None) -> Severity:
    """Pads that a convolution or a pooling sees, and models that draw at random, may be meant; the future never is."""
    if promise in ("causal", "batch-independent", "documents-isolated"):
        return "warning" if seen.trial.target.known else "error"
    if promise == "padding-inert":
        pooled = seen.trial.output(seen.trial.conditions[0]).shape[1] == 1
        return "note" if pooled or seen.trial.target.known else "warning"
    return "note" if seen.trial.target.known else "warning"


def _pair(seen: Examination, promise: str, condition: Condition) -> Pair | None:
    trial = seen.trial
    batch = trial.batch(condition.layout)
    main = trial.target.main
    if promise == "repeatable":
        rows = torch.ones(batch.samples, main.positions(trial.lengths[main.argument]), dtype=torch.bool)
        return Pair(batch, batch, rows, "the same input under two seeds gives two outputs", (0, 1))
    if promise == "documents-isolated":
        moved = crossed(trial, condition)
        changed, hit = (int(i) for i in (moved == moved.amax()).nonzero()[0])
        guarded = (torch.tensor(trial.target.documents) != changed).expand(batch.samples, -1)
        said = f"overwriting document {changed} of sample 0 moves document {hit} by {float(moved.amax()):.3g}"
        return Pair(batch, overwritten(trial, batch, changed), guarded, said)
    influence = trial.influence(condition)
    outputs = influence.base.shape[1]
    noise = trial.threshold(influence.base)
    length = main.positions(trial.lengths[main.argument])
    if promise == "causal":
        moved = leaks(trial, condition)
        if float(moved.amax()) <= noise:
            return None
        output, index = (int(i) for i in (moved == moved.amax()).nonzero()[0])
        position = int(influence.positions[main.argument][index])
        guarded = torch.ones(batch.samples, length, dtype=torch.bool)
        guarded[0, position:] = False
        said = f"changing input {position} of sample 0 moves output {output} by {float(moved.amax()):.3g}"
        return Pair(batch, _changed(trial, batch, main.argument, position), guarded, said)
    if promise == "batch-independent":
        for stream, moved in influence.moved.items():
            others = moved[:, 1:]
            if others.numel() and float(others.amax()) > noise:
                index, sample, output = (int(i) for i in (others == others.amax()).nonzero()[0])
                position = int(influence.positions[stream][index])
                guarded = torch.ones(batch.samples, length, dtype=torch.bool)
                guarded[0] = False
                said = f"changing sample 0 at {position} moves output {output} of sample {sample + 1} by {float(others.amax()):.3g}"
                return Pair(batch, _changed(trial, batch, stream, position), guarded, said)
        return None
    rows = trial.real_rows(condition, outputs)[0]
    for stream in trial.padded(condition.layout):
        kept = batch.kept[stream][0][influence.positions[stream]]
        moved = influence.moved[stream][:, 0][:, rows].clone()
        moved[kept] = 0
        if float(moved.amax()) > noise:
            index = int((moved == moved.amax()).nonzero()[0][0])
            position = int(influence.positions[stream][index])
            guarded = torch.ones(batch.samples, batch.kept[stream].shape[1], dtype=torch.bool)
            guarded[0] = batch.kept[stream][0]
            said = f"changing pad {position} of sample 0 moves a real output by {float(moved.amax()):.3g}"
            return Pair(batch, _changed(trial, batch, stream, position), guarded, said)
    return None


def _changed(trial: Trial, batch: Batch, stream: str, position: int) -> Batch:
    content = trial.target.stream(stream).change(batch.arguments[stream], 0, position, trial.seed + 1)
    return Batch({**batch.arguments, stream: content}, batch.lengths, batch.samples, batch.kept)


# -- the search -----------------------------------------------------------------------------------------------------


def search(trial: Trial, condition: Condition, pair: Pair) -> tuple[list[Channel], bool]:
    """Modules that carry the information: find one, hold its output, look again, until the outputs agree."""
    root = trial.runner.model
    if not isinstance(root, nn.Module):
        return [], False
    names = {id(m): n or "(root)" for n, m in root.named_modules()}
    channels: list[Channel] = []
    held: set[int] = set()
    noise = 0.0
    for _ in range(_MOST):
        first, output = _record(trial, pair.without or condition, pair.first, pair.seeds[0], {}, pair)
        noise = trial.threshold(output)
        second, other = _record(trial, condition, pair.second, pair.seeds[1], dict.fromkeys(held, first), pair)
        guarded = _guarded_like(pair.guarded, output)
        if not bool((difference(output, other)[guarded] > noise).any()):
            return channels, True
        found = _first_channel(first, second, pair.guarded, names, held)
        if found is None:
            return channels, False
        channels.append(found)
        held.add(id(found.module))
    return channels, False


def _guarded_like(guarded: Tensor, output: Tensor) -> Tensor:
    if guarded.shape == output.shape[:2]:
        return guarded
    whole = guarded.all(1)
    return whole[:, None].expand(output.shape[:2]) if whole.any() else torch.ones(output.shape[:2], dtype=torch.bool)


def _record(
    trial: Trial, condition: Condition, batch: Batch, seed: int, held: dict[int, Recording], pair: Pair
) -> tuple[Recording, Tensor]:
    recording = Recording()
    count: dict[int, int] = {}

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        inputs = [t.detach() for t in tensors_held([args, kwargs])]
        if id(module) in held:
            output = _hold(module, output, held[id(module)], count, pair.guarded)
        recording.calls.append((module, inputs, [t.detach() for t in tensors_of(output)]))
        return output

    with hooked(trial.runner.model, hook):
        output = trial.run(batch, condition.switch, seed=seed)
    return recording, output


def _hold(module: nn.Module, output: Any, reference: Recording, count: dict[int, int], guarded: Tensor) -> Any:
    """The output with its guarded positions taken from the reference run."""
    number = count.get(id(module), 0)
    count[id(module)] = number + 1
    earlier = [o for m, _, o in reference.calls if m is module]
    if number >= len(earlier):
        return output
    mine, theirs = list(tensors_of(output)), earlier[number]
    swaps = {}
    for a, b in zip(mine, theirs, strict=False):
        mask = over(guarded, a)
        if a.shape == b.shape and mask is not None:
            swaps[id(a)] = torch.where(mask, b, a)
    return swapped(output, swaps)


def _first_channel(
    first: Recording, second: Recording, guarded: Tensor, names: dict[int, str], held: set[int]
) -> Channel | None:
    """The smallest module with clean inputs and a moved output; of several, the one that ends first."""
    later: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
    count: dict[int, int] = {}
    for module, inputs, outputs in second.calls:
        count[id(module)] = count.get(id(module), 0) + 1
        later[id(module), count[id(module)]] = (inputs, outputs)
    count.clear()
    for module, in_a, out_a in first.calls:
        count[id(module)] = count.get(id(module), 0) + 1
        if id(module) in held or id(module) not in names or (id(module), count[id(module)]) not in later:
            continue
        in_b, out_b = later[id(module), count[id(module)]]
        if gap(in_a, in_b, guarded) <= 0 and (moved := gap(out_a, out_b, guarded)) > 1e-11:
            return Channel(module, names[id(module)], moved)
    return None


FAULT = Fault(
    name="side-channel",
    stage="outside",
    promises=(*FOLLOWED, "memory-respected"),
    severity="error",
    summary="The model breaks a promise that every attention call keeps: a convolution, norm, pooling, scan or router carries it.",
    symptom="A decoder sees the future, or samples see each other, with every mask in order.",
    why_silent="Attention is looked at first, and there all is well.",
    fix="Make that module causal (pad a convolution on the left only), or let it work on each position or sample alone.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.qkv = nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 48)

    def forward(self, x):
        x = x + self.mix(x.mT).mT
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]

def build():
    torch.manual_seed(0)
    return Target(Block(), Intent(Mask.causal()), features=16)
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.qkv = nn.Conv1d(16, 16, 3), nn.Linear(16, 48)

    def forward(self, x):
        x = x + self.mix(nn.functional.pad(x.mT, (2, 0))).mT
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]

def build():
    torch.manual_seed(0)
    return Target(Block(), Intent(Mask.causal()), features=16)
""",
    sources=("Baevski et al. 2020, wav2vec 2.0: group norm over time sees the whole input",),
    look=look,
)
