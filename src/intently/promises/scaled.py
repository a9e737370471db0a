"""Promise `scaled`: the logits are q·k times the factor that was meant."""

from __future__ import annotations

import math
from collections.abc import Iterable

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Trial
from intently.report import Cell
from intently.sites import Site


def intended(trial: Trial, site: Site) -> float | None:
    """The factor that was meant at a site; None where any is accepted, or nothing can be said."""
    scale = site.scale
    if scale is None or trial.intent.scale_is_free or scale.learned or site.head_dim == 0:
        return None
    if trial.intent.scale is not None:
        return trial.intent.scale
    if scale.normed:
        return None  # normed queries or keys: the norm does the work, and any temperature may be meant
    return 1 / math.sqrt(site.head_dim)


def off(trial: Trial, site: Site) -> dict[int, float]:
    """Heads whose factor is not the intended one, with it."""
    wanted = intended(trial, site)
    if wanted is None or site.scale is None:
        return {}
    if not site.scale.exact and not all(math.isfinite(f) for f in site.scale.factors):
        return {}
    tolerance = 2e-2 if site.scale.exact else 0.1
    return {
        h: f for h, f in enumerate(site.scale.factors) if math.isfinite(f) and abs(f - wanted) > tolerance * abs(wanted)
    }


def try_on(trial: Trial) -> Iterable[Cell]:
    found = []
    for condition in trial.conditions:
        if condition.layout.samples < 2 or condition.layout.padded or cells.same_as(trial, condition):
            continue
        if cells.ill(trial, condition):
            found.append(cells.untried("scaled", condition, "real outputs are not finite"))
            continue
        judged = [s for s in trial.sites(condition) if intended(trial, s) is not None]
        if not judged:
            found.append(Cell("scaled", condition.name, "not-applicable", note="no factor is stated for any site"))
            continue
        wrong = [
            max(abs(f / (intended(trial, s) or 1) - 1) for f in heads.values())
            for s in judged
            if (heads := off(trial, s))
        ]
        note = f"{len(wrong)} of {len(judged)} sites" if wrong else ""
        found.append(cells.cell("scaled", condition, max(wrong, default=0.0), 2e-2, broken=bool(wrong), note=note))
    return found


PROMISE = Promise(
    name="scaled",
    statement="The logits are q·k times the intended factor, 1/√width of the head unless something else is stated.",
    applies_to="each site with queries and keys",
    how="At each site of a traced run the slope of logit against q·k is measured per head, with factors on q and on k "
    "counted in. `error` is the relative deviation.",
    sources=("Vaswani et al. 2017, section 3.2.1: arXiv:1706.03762",),
    try_on=try_on,
    error_means="a factor is off, relatively, by",
    per_site=True,
)
