"""Promise `scaled`: the logits are q·k times the factor that was meant."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Trial
from intently.report import Cell
from intently.sites import Site
from intently.targets.field import field_of


def intended(trial: Trial, site: Site) -> float | None:
    """The factor that was meant at a site; None where any is accepted, or nothing can be said."""
    scale = site.scale
    if scale is None or trial.intent.scale_is_free or scale.learned or site.head_dim == 0:
        return None
    if site.path in trial.intent.scales:
        return trial.intent.scales[site.path]
    if trial.intent.scale is not None:
        return trial.intent.scale
    if scale.normed:
        return None  # normed queries or keys: the norm does the work, and any temperature may be meant
    return 1 / math.sqrt(site.head_dim)


_STATED = re.compile(
    r"pre_attn_scal|attention_multiplier|attn_multiplier|(attention|attn|softmax|logit|qk|query)_?scal|temperature",
    re.I,
)
_CONFIGURATIONS = ("config", "cfg", "args", "hparams", "conf", "params")


def configurations(module: nn.Module) -> Iterator[Any]:
    """The configuration objects and dictionaries that a module keeps under a usual name."""
    for name in _CONFIGURATIONS:
        held = vars(module).get(name)
        if held is not None and not isinstance(held, (nn.Module, int, float, str)):
            yield held


def stated_factors(model: Any) -> tuple[float, ...]:
    """Factors that a model's configuration states under a name that speaks of scaling.

    Each as it stands, as its inverse and as its inverse root: `query_pre_attn_scalar` is a width, others are factors.
    """
    found: set[float] = set()
    for module in model.modules() if isinstance(model, nn.Module) else ():
        for held in configurations(module):
            names = held if isinstance(held, dict) else [n for n in dir(held) if not n.startswith("_")]
            for field in names:
                if not _STATED.search(str(field)):
                    continue
                value = field_of(held, field)
                if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                    found |= {float(value), 1 / value, value**-0.5}
    return tuple(found)


def off(trial: Trial, site: Site) -> dict[int, float]:
    """Heads whose factor is not the intended one, with it."""
    wanted = intended(trial, site)
    if wanted is None or site.scale is None:
        return {}
    if not site.scale.exact and not all(math.isfinite(f) for f in site.scale.factors):
        return {}
    tolerance = 2e-2 if site.scale.exact else 0.1
    # Where the intent says the factor itself, no field of a configuration may stand for it.
    said = trial.intent.scale is not None or site.path in trial.intent.scales
    meant = (wanted,) if said else (wanted, *stated_factors(trial.target.model))
    return {
        h: f
        for h, f in enumerate(site.scale.factors)
        if math.isfinite(f) and all(abs(f - m) > tolerance * abs(m) for m in meant)
    }


def try_on(trial: Trial) -> Iterable[Cell]:
    found = []
    for condition in trial.conditions:
        if cells.narrow(trial, condition) or condition.layout.padded or cells.same_as(trial, condition):
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
