"""Small helpers that promises share: which pairs an intent allows, and cells of the grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from intently.masks import Mask
from intently.promises.trial import Condition, Influence, Trial, difference
from intently.report import Cell
from intently.targets.signature import dtype_of
from intently.targets.stream import Stream


def reach(seen: Tensor) -> Tensor:
    """Which positions reach which through any number of layers that all use the mask `seen` (bool [query, key])."""
    path = seen | torch.eye(seen.shape[0], seen.shape[1], dtype=torch.bool)
    while True:
        longer = (path.double() @ path.double()) > 0
        if torch.equal(longer, path):
            return path
        path = longer


def reach_through(masks: Sequence[Mask], positions: int) -> Tensor:
    """bool [output, input]: what reaches an output through layers with these masks, in order, each beside its residual."""
    path = torch.eye(positions, dtype=torch.bool)
    for mask in masks:
        seen = mask.matrix(positions)
        step = (seen.flatten(0, -3).any(0) if seen.dim() > 2 else seen) | torch.eye(positions, dtype=torch.bool)
        path = (step.double() @ path.double()) > 0
    return path


def has_positions(trial: Trial, influence: Influence) -> bool:
    """Whether outputs stand at the positions of the main stream (a pooled output does not)."""
    main = trial.target.main
    return influence.base.shape[1] == main.positions(trial.lengths[main.argument]) and influence.base.shape[1] > 1


def real_positions(trial: Trial, condition: Condition, stream: str, positions: Tensor) -> Tensor:
    """bool per tested position of sample 0: it is not a pad."""
    kept = trial.kept(condition.layout).get(stream)
    return torch.ones(len(positions), dtype=torch.bool) if kept is None else kept[0][positions]


def same_as(trial: Trial, condition: Condition) -> Condition | None:
    """An earlier condition that gives the same real outputs: then the same promises are kept or broken under both.

    A switch is held against the run without it; a mask of ones, or one sample alone, against the plain batch.
    """
    for other in trial.conditions:
        if other == condition:
            return None
        alike = condition.layout.padded == other.layout.padded and all(
            condition.layout.pads.get(s) == other.layout.pads.get(s) for s in condition.layout.padded
        )
        if alike and _agree(trial, condition, other):
            return other
    return None


def _agree(trial: Trial, condition: Condition, other: Condition) -> bool:
    mine, theirs = trial.output(condition), trial.output(other)
    samples = min(mine.shape[0], theirs.shape[0])
    if mine.shape[1:] != theirs.shape[1:]:
        return False
    rows = trial.real_rows(condition, mine.shape[1])[:samples]
    # Another number of samples means other roundings.
    wider = 1 if condition.layout.samples == other.layout.samples else 20
    return bool((difference(mine[:samples], theirs[:samples])[rows] <= wider * trial.threshold(theirs)).all())


def repeats(trial: Trial, condition: Condition) -> bool:
    """Whether two runs under different random seeds agree."""
    first, second = trial.output(condition), trial.output(condition, seed=1)
    return bool((difference(first, second) <= trial.threshold(first)).all())


def is_chosen_from(trial: Trial, condition: Condition, stream: Stream, positions: Tensor) -> bool:
    """Whether what moves nothing at these positions does so because outputs follow them through a choice (the index of the
    largest value, the nearest code): a small change then mostly chooses the same, and shows nothing.

    A slope where nothing moves tells a choice that lends its slope to gradients; outputs that other content moves, though
    there is no slope anywhere, one that does not.
    """
    batch = trial.batch(condition.layout)
    content = batch.arguments[stream.argument]
    if not content.is_floating_point():
        return False
    slope = trial.runner.gradients(batch, [content], condition.switch, judged=True)[0]
    if slope is not None and bool(slope.any()):
        return all(bool(slope[stream.place(0, position)].any()) for position in positions.tolist())
    other = trial.batch(condition.layout, seed=trial.seed + 1).arguments[stream.argument]
    changed = replace(batch, arguments={**batch.arguments, stream.argument: other})
    moved = difference(trial.run(changed, condition.switch), trial.output(condition))
    return bool((moved > trial.threshold(trial.output(condition))).any())


def narrow(trial: Trial, condition: Condition) -> bool:
    """Whether a condition has one sample where the model takes more."""
    return condition.layout.samples < 2 and trial.target.samples != 1


def inherited(promise: str, condition: Condition, other: Condition, found: Sequence[Cell]) -> Cell:
    """The verdict of a condition with the same outputs."""
    earlier = next((c for c in found if c.condition == other.name), None)
    if earlier is None:
        return untried(promise, condition, f"not tried under {other.name} either")
    return replace(earlier, condition=condition.name, note=f"the same outputs as under {other.name}")


def rounding_only(trial: Trial, condition: Condition, other: Condition, gap: float) -> bool:
    """Whether two ways of running differ by the rounding of a float32 step inside a float64 model.

    A gap of that size is settled in float32: there the two must agree to its own rounding.
    """
    deployed = trial.in_precision.get("float32")
    scale = float(torch.nan_to_num(trial.output(other)).abs().amax())
    if deployed is None or gap > 1e-5 * scale:
        return False
    batch = trial.batch(condition.layout, dtype=deployed.dtype)
    mine, theirs = (trial.run(batch, c.switch, precision="float32") for c in (condition, other))
    rows = trial.real_rows(condition, mine.shape[1])
    return bool((difference(mine, theirs)[rows] <= 1e-4 * theirs.abs().amax()).all())


def single_steps(trial: Trial, output: Tensor) -> float:
    """Rounding of float32 in output units, where the model may well hold float32 steps: it runs in float32 as it is."""
    model = trial.target.model
    holds = isinstance(model, nn.Module) and dtype_of(model) != torch.float64
    return 2e-6 * float(output.nan_to_num().abs().amax()) if holds else 0.0


def cell(promise: str, condition: Condition, error: float, noise: float, *, broken: bool, note: str = "") -> Cell:
    return Cell(promise, condition.name, "broken" if broken else "kept", error, noise, note)


def inapplicable(promise: str, trial: Trial, why: str) -> list[Cell]:
    return [Cell(promise, c.name, "not-applicable", note=why) for c in trial.conditions]


def untried(promise: str, condition: Condition, why: str) -> Cell:
    return Cell(promise, condition.name, "not-tried", note=why)


def ill(trial: Trial, condition: Condition) -> bool:
    """Whether real outputs are not numbers here, so that nothing can be said of what moves them."""
    output = trial.output(condition)
    return not bool(torch.isfinite(output[trial.real_rows(condition, output.shape[1])]).all())
