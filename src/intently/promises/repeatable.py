"""Promise `repeatable`: the same eval call gives the same output, whatever the seed and whatever ran before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Trial, difference
from intently.report import Cell
from intently.targets.running import PLAIN, Runner
from intently.targets.signature import lengths_for

AFTER = "after other lengths"
INFERENCE = "inference mode"
OTHERS = (+5, -3)  # longer first: what it leaves is large enough to be cut to size by the call after it


@dataclass(frozen=True)
class Aftermath:
    """A copy of the model that ran other lengths first. `output` is None where the call after them raised, for `raised`."""

    runner: Runner
    lengths: tuple[int, ...]  # of the main stream, in the calls before
    output: Tensor | None
    raised: str = ""

    def gap(self, trial: Trial, condition: Condition) -> float:
        """How far the output is from that of a copy that ran no other length; infinite where it raised."""
        plain = trial.output(condition)
        if self.output is None or self.output.shape != plain.shape:
            return float("inf")
        rows = trial.real_rows(condition, plain.shape[1])
        return float(difference(self.output, plain)[rows].amax())


def rounding(trial: Trial, condition: Condition) -> float:
    """What counts as rounding here: a table that an earlier call left may have been made in the model's own float32."""
    output = trial.output(condition)
    return max(trial.threshold(output), cells.single_steps(trial, output))


def aftermath(trial: Trial, condition: Condition) -> Aftermath | None:
    """Run other lengths, then the condition's own, on a copy; None where every length is fixed or no other runs."""
    runner = trial.runner.fresh()
    ran = [lengths for lengths in _other_lengths(trial) if _runs(trial, runner, condition, lengths)]
    if not ran:
        return None
    before = tuple(lengths[trial.target.main.argument] for lengths in ran)
    try:
        return Aftermath(runner, before, runner.output(trial.batch(condition.layout), condition.switch))
    except Exception as error:
        said = str(error).splitlines()[0][:120] if str(error) else ""
        return Aftermath(runner, before, None, f"{type(error).__name__}: {said}".rstrip(": "))


def _other_lengths(trial: Trial) -> Iterator[Mapping[str, int]]:
    main = trial.target.main.argument
    for step in OTHERS:
        lengths = lengths_for(trial.target.streams, max(2, trial.lengths[main] + step))
        if lengths[main] != trial.lengths[main]:
            yield lengths


def _runs(trial: Trial, runner: Runner, condition: Condition, lengths: Mapping[str, int]) -> bool:
    batch = trial.target.batch(condition.layout.samples, lengths, seed=trial.seed, dtype=runner.dtype)
    trial.progress()
    try:
        runner.output(batch, condition.switch)
    except Exception:
        return False
    return True


def _history(trial: Trial, condition: Condition) -> Iterator[Cell]:
    """The call after calls of other lengths, and the same call in inference mode."""
    after = aftermath(trial, condition)
    if after is None:
        return
    noise = rounding(trial, condition)
    error = after.gap(trial, condition)
    note = f"raised {after.raised}" if after.raised else ""
    shown = None if after.raised else error
    yield Cell("repeatable", AFTER, "broken" if error > noise else "kept", shown, noise, note)
    if after.output is None:
        return
    try:
        with torch.inference_mode():
            output = after.runner.output(trial.batch(condition.layout), condition.switch)
    except Exception as error:
        yield Cell("repeatable", INFERENCE, "not-tried", note=f"raised {type(error).__name__}")
        return
    error = float(difference(output, after.output).amax())
    yield Cell("repeatable", INFERENCE, "broken" if error > noise else "kept", error, noise)


def try_on(trial: Trial) -> Iterable[Cell]:
    found: list[Cell] = []
    for condition in trial.conditions:
        if condition.layout.padded or cells.narrow(trial, condition):
            continue
        if same := cells.same_as(trial, condition):
            found.append(cells.inherited("repeatable", condition, same, found))
            continue
        first, second = trial.output(condition), trial.output(condition, seed=1)
        worst = float(difference(first, second).amax())
        noise = trial.threshold(first)
        found.append(cells.cell("repeatable", condition, worst, noise, broken=worst > noise))
    plain = next(
        (c for c in trial.conditions if c.switch.name == PLAIN.name and c.name in {f.condition for f in found}), None
    )
    if plain is not None and not trial.edits and not cells.ill(trial, plain):
        found += _history(trial, plain)
    return found


PROMISE = Promise(
    name="repeatable",
    statement="The same eval call gives the same output, whatever the seed and whatever ran before it.",
    applies_to="all, in eval",
    how="The same inputs are run under two seeds; by a copy of the model that ran a longer and a shorter sequence before; "
    "and in inference mode.",
    sources=(
        "pytorch/pytorch documentation of F.scaled_dot_product_attention: dropout_p is applied whatever the mode",
        "huggingface/transformers#25306: frequencies of a dynamic scaling that stay changed after a long sequence",
    ),
    try_on=try_on,
)
