"""What stays broken when every call at fault is repaired: something else carries it, or attention that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from intently.check.proof import Prover
from intently.faults import FAULTS, Examination, Suspicion
from intently.faults.side_channel import FOLLOWED
from intently.promises import Trial
from intently.promises.cells import same_as
from intently.report import Cell

# What a broken promise is called where attention itself carries it, in calls whose mask cannot be read.
_ATTENTIONS_OWN = {"causal": "causal-leak", "padding-inert": "padding-leak", "repeatable": "dropout-in-eval"}


def carried_elsewhere(
    cells: Sequence[Cell], suspicions: Sequence[Suspicion], prover: Prover, *, unseen: bool
) -> list[Suspicion]:
    """The modules that carry what no suspect call explains; `unseen`: no call of the model was seen at all."""
    broken = _told_apart(prover.trial, [c for c in cells if c.verdict == "broken" and c.promise in FOLLOWED])
    concerned = [s for s in suspicions if s.repair is not None and s.site is not None]
    left = prover.still_broken(broken, concerned) if concerned else broken
    if not left:
        return []
    repairs = [s for s in concerned if not s.undoes]
    trial = prover.repaired(repairs, prover.trial.everything) if repairs else prover.trial
    attending = {s.site.path for s in suspicions if s.site is not None}
    seen = Examination(trial, tuple(left))
    unread = {each.site.path.split("#")[0] for each in seen.looks() if not each.comparable}
    found: dict[tuple[str, str], Suspicion] = {}
    for suspicion in FAULTS["side-channel"].look(seen):
        if suspicion.place in attending or (suspicions and not suspicion.place):
            continue
        if suspicion.place in unread or (unseen and not _is_plain_layer(trial, suspicion.place)):
            suspicion = _attention_itself(suspicion)
        found.setdefault((suspicion.promise, suspicion.place), suspicion)
    return list(found.values())


def _is_plain_layer(trial: Trial, path: str) -> bool:
    """Whether a module is a layer of torch itself, a convolution for instance, which attends to nothing."""
    model = trial.runner.model
    held = dict(model.named_modules()).get(path) if isinstance(model, nn.Module) and path else None
    own = type(held).__module__.startswith("torch.nn.modules")
    return held is not None and own and not any(held.children())


def _attention_itself(suspicion: Suspicion) -> Suspicion:
    """The channel is a module that attends, in parts or unseen: then it is no side channel but attention's own fault."""
    name = _ATTENTIONS_OWN.get(suspicion.promise)
    if name is None:
        return suspicion
    message = f"the attention of {suspicion.place or 'the model'} brings it in; its mask could not be read (it runs in parts, or unseen)"
    return replace(suspicion, fault=FAULTS[name], message=message, severity=FAULTS[name].severity)


def _told_apart(trial: Trial, broken: Sequence[Cell]) -> list[Cell]:
    """Broken cells of a trial's own conditions, without those of outputs that an earlier condition gives, broken there as well."""
    names = {(c.promise, c.condition) for c in broken}
    same = {c.name: same_as(trial, c) for c in trial.conditions} | dict.fromkeys(c.name for c in trial.fed)
    kept = []
    for cell in broken:
        other = same.get(cell.condition)
        if cell.condition in same and (other is None or (cell.promise, other.name) not in names):
            kept.append(cell)
    return kept
