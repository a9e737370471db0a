"""Promise `finite`: no NaN or infinity in any real output, whatever is padded and in every precision."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Trial
from intently.report import Cell
from intently.targets.running import Runner


def bad_rows(trial: Trial, condition: Condition, output: torch.Tensor) -> torch.Tensor:
    """bool [batch, output]: real outputs that are not numbers."""
    rows = trial.real_rows(condition, output.shape[1])
    return ~torch.isfinite(output).all(-1) & rows


def try_on(trial: Trial) -> Iterable[Cell]:
    found = []
    for condition in trial.conditions:
        count = int(bad_rows(trial, condition, trial.output(condition)).sum())
        note = f"{count} real outputs are not finite" if count else ""
        found.append(cells.cell("finite", condition, float(count), 0.0, broken=count > 0, note=note))
    found += [_in_precision(trial, name, runner) for name, runner in trial.in_precision.items()]
    return found


def _in_precision(trial: Trial, name: str, runner: Runner) -> Cell:
    """All conditions of one precision in one cell: the worst of them speaks."""
    raised = ""
    for condition in trial.conditions:
        if condition.switch.looking:
            continue
        try:
            trial.progress()
            output = runner.output(trial.batch(condition.layout, dtype=runner.dtype), condition.switch)
        except Exception as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raised = raised or f"raised under {condition.name}: {said[:120]}"
            continue
        count = int(bad_rows(trial, condition, output).sum())
        if count:
            return Cell(
                "finite",
                name,
                "broken",
                float(count),
                0.0,
                f"{count} real outputs are not finite under {condition.name}",
            )
    return Cell("finite", name, "not-tried" if raised else "kept", None if raised else 0.0, 0.0, raised)


PROMISE = Promise(
    name="finite",
    statement="No real output is NaN or infinite: not in half precision, not beside rows with nothing to see.",
    applies_to="all",
    how="Every condition is run, in float64 and in the precisions that models are deployed in; only real positions count. "
    "`error` counts real outputs that are not finite.",
    sources=("pytorch/pytorch#41508: a fully masked row gives NaN",),
    try_on=try_on,
    error_means="outputs that are not finite:",
)
