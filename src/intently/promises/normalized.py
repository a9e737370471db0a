"""Promise `normalized`: each row's weights sum to 1 over the keys."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Trial
from intently.report import Cell
from intently.sites import Site

TOLERANCE = 1e-3  # a row sum this far from 1 is not 1


def deviation(site: Site) -> float:
    """How far the row sums of the weights are from 1 (rows that see nothing may sum to 0); sums below 1 are a sink's."""
    if site.row_sum is None:
        return 0.0
    sums = site.row_sum.double()
    sums = sums[torch.isfinite(sums)]
    if site.dropout > 0 or site.partial or not sums.numel():
        return 0.0
    empty = sums == 0
    over = (sums - 1).clamp_min(0).amax()
    under = torch.where(empty, torch.zeros_like(sums), 1 - sums).clamp_min(0).amax()
    return float(over if has_sink(site) else torch.maximum(over, under))


def has_sink(site: Site) -> bool:
    """A sink takes part of every row's weight: no sum is above 1, and none of another axis is 1."""
    return (
        site.sink
        and site.row_sum is not None
        and bool((site.row_sum < 1 + 1e-6).all())
        and site.normalized_over == "nothing"
    )


def try_on(trial: Trial) -> Iterable[Cell]:
    found = []
    for condition in trial.conditions:
        if cells.narrow(trial, condition) or condition.layout.padded or cells.same_as(trial, condition):
            continue
        sites = trial.sites(condition)
        if not sites:
            found.append(Cell("normalized", condition.name, "not-applicable", note="no attention call was seen"))
            continue
        worst = max(deviation(s) for s in sites)
        found.append(cells.cell("normalized", condition, worst, TOLERANCE, broken=worst > TOLERANCE))
    return found


PROMISE = Promise(
    name="normalized",
    statement="Each row's weights sum to 1 over the keys, less with a declared sink.",
    applies_to="each site",
    how="At each site of a traced run the weights that multiply the values are summed over the keys. `error` is the "
    "largest distance of a row sum from 1.",
    sources=("Bahdanau et al. 2014: arXiv:1409.0473", "labmlai/annotated_deep_learning_paper_implementations#146"),
    try_on=try_on,
    error_means="a row sum is off by",
    per_site=True,
)
