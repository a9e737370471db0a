"""Fault `stale-state`: a mask or table that an earlier call of another length left behind is used again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises import Condition, Trial, difference
from intently.promises.repeatable import AFTER, Aftermath, aftermath, rounding
from intently.report import Witness
from intently.targets.running import PLAIN, Runner

_MOST = 24  # modules whose leftovers are put back one by one


def look(seen: Examination) -> Iterator[Suspicion]:
    trial = seen.trial
    if not any(c.promise == "repeatable" and c.condition == AFTER and c.verdict == "broken" for c in seen.cells):
        return
    condition = next(c for c in trial.conditions if c.switch.name == PLAIN.name and c.layout.samples > 1)
    after = aftermath(trial, condition)
    if after is None or after.gap(trial, condition) <= rounding(trial, condition):
        return
    guilty = _guilty(trial, condition, after)
    for path, names in guilty.items():
        held = " and ".join(names)
        yield Suspicion(
            fault=FAULT,
            promise="repeatable",
            site=None,
            place=path,
            message=f"the next call uses what a call of another length left in {held} of {path}",
            witness=_witness(trial, condition, after),
            severity="warning" if trial.target.known else None,
            condition=AFTER,
            proven_by=f"with {held} as a copy holds it that ran no other length, the outputs agree",
        )
    if not guilty:
        yield Suspicion(
            fault=FAULT,
            promise="repeatable",
            site=None,
            message="a call gives another output after calls of other lengths, and no attribute of a module explains it",
            witness=_witness(trial, condition, after),
            severity="warning" if trial.target.known else None,
            condition=AFTER,
            unprovable="the state is kept outside of the modules (a global, a cached function), where nothing can be put back",
        )


def _witness(trial: Trial, condition: Condition, after: Aftermath) -> Witness:
    before = " and ".join(map(str, after.lengths))
    length = trial.lengths[trial.target.main.argument]
    if after.raised:
        return Witness(f"after calls of length {before}, a call of length {length} raises {after.raised}")
    gap = after.gap(trial, condition)
    return Witness(
        f"after calls of length {before}, the output of a call of length {length} moves by {gap:.3g}",
        None,
        {"before": list(after.lengths), "length": length, "difference": gap},
    )


def _guilty(trial: Trial, condition: Condition, after: Aftermath) -> dict[str, tuple[str, ...]]:
    """Modules whose leftovers must be put back for the outputs to agree, with the attributes that hold them."""
    clean, stale = trial.runner.fresh(), after.runner
    if not isinstance(clean.model, nn.Module) or not isinstance(stale.model, nn.Module):
        return {}
    clean.output(trial.batch(condition.layout), condition.switch)
    right = {path: _state(module) for path, module in clean.model.named_modules()}
    wrong = {path: _state(module) for path, module in stale.model.named_modules()}
    changed = {path: names for path in right if (names := _changed(right[path], wrong.get(path, {})))}

    def agree(paths: Mapping[str, Any]) -> bool:
        for path in changed:
            _put(stale.model.get_submodule(path), right[path] if path in paths else wrong[path], changed[path])
        return _agrees(trial, condition, stale)

    if not changed or not agree(changed):
        return {}
    if len(changed) > _MOST:
        return changed
    needed = {p: names for p, names in changed.items() if not agree({q: n for q, n in changed.items() if q != p})}
    return {path or "(root)": names for path, names in (needed or changed).items()}


def _agrees(trial: Trial, condition: Condition, runner: Runner) -> bool:
    plain = trial.output(condition)
    try:
        output = runner.output(trial.batch(condition.layout), condition.switch)
    except Exception:
        return False
    return output.shape == plain.shape and bool((difference(output, plain) <= rounding(trial, condition)).all())


def _state(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides parameters and other modules."""
    own = {k: v for k, v in vars(module).items() if not k.startswith("_") or k not in vars(nn.Module())}
    held = {**own, **module._buffers}
    return {k: _kept(v) for k, v in held.items() if _is_data(v)}


def _is_data(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return all(_is_data(v) for v in (value.values() if isinstance(value, dict) else value))
    return value is None or (
        isinstance(value, (Tensor, int, float, str, torch.Size)) and not isinstance(value, nn.Parameter)
    )


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


def _changed(right: Mapping[str, Any], wrong: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(k for k in {**right, **wrong} if not _same(right.get(k), wrong.get(k)))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b


def _put(module: nn.Module, state: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        value = _kept(state.get(name))
        if name in module._buffers:
            module._buffers[name] = value
        else:
            vars(module)[name] = value


FAULT = Fault(
    name="stale-state",
    stage="outside",
    promises=("repeatable", "padding-inert"),
    severity="error",
    summary="A mask or a table of positions made for an earlier call of another length is used again.",
    symptom="An output depends on what ran before it: right in a fresh process, wrong after one long sequence, or an error of shapes.",
    why_silent="Tests call a fresh model once, or always with one length.",
    fix="Make what depends on the length anew when the length changes, or keep it for the largest length and cut it to size by positions.",
    bad="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    slopes = None

    def forward(self, q, k, v):
        if self.slopes is None or self.slopes.shape[-1] < k.shape[-2]:
            self.slopes = torch.arange(k.shape[-2]).to(q) / k.shape[-2]
        return (q @ k.mT / q.shape[-1] ** 0.5 + self.slopes[: k.shape[-2]]).softmax(-1) @ v

def build():
    return Target(Attention(), Intent(Mask.full()), features=8)
""",
    good="""
import torch
from torch import nn
from intently import Intent, Mask, Target

class Attention(nn.Module):
    slopes = None

    def forward(self, q, k, v):
        if self.slopes is None or self.slopes.shape[-1] != k.shape[-2]:
            self.slopes = torch.arange(k.shape[-2]).to(q) / k.shape[-2]
        return (q @ k.mT / q.shape[-1] ** 0.5 + self.slopes[: k.shape[-2]]).softmax(-1) @ v

def build():
    return Target(Attention(), Intent(Mask.full()), features=8)
""",
    sources=("huggingface/transformers#25306",),
    look=look,
)
