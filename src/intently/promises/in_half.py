"""Half precision at a call: how far its output is from what its own half-precision queries, keys and values give in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from intently.mechanism import normalize
from intently.promises.normalized import deviation
from intently.promises.trial import Condition, Trial
from intently.sites import Site
from intently.targets.running import PLAIN

# Units (half the distance of two neighbouring numbers, at the size of the weighted sum of |values|) that rounding
# weights and output explains, with room for scores of ordinary size that are rounded, too.
EXPLAINED = 8.0
ROUNDED = 2.0**-6  # row sums of a softmax in half precision are nearer to 1 than this
HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Rounding:
    """One call in half precision. Errors are in units; `stage` is where most of the error comes from."""

    site: Site
    dtype: str
    units: float
    stage: str  # scores | softmax | sum
    weight_off: float  # largest error of a weight
    largest: float  # the largest logit that is seen


def precision_of(trial: Trial) -> str | None:
    """The half precision in which the model runs."""
    return next((name for name in HALVES if name in trial.in_precision), None)


def plain_condition(trial: Trial) -> Condition | None:
    return next(
        (c for c in trial.conditions if c.switch.name == PLAIN.name and c.layout.samples > 1 and not c.layout.padded),
        None,
    )


def roundings(trial: Trial) -> Iterator[Rounding]:
    """Every call of the plain run in half precision whose scale, bias and mask the float64 run shows."""
    name, condition = precision_of(trial), plain_condition(trial)
    if name is None or condition is None:
        return
    exact = {s.key_name: s for s in trial.sites(condition)}
    for site in trial.sites_in(name, condition):
        other = exact.get(site.key_name)
        found = measured(site, other) if other is not None and site.dtype == name else None
        if found is not None:
            yield found


def reference_logits(site: Site, exact: Site) -> Tensor | None:
    """Logits in float64 from the call's own queries and keys, with factor, bias and mask of the float64 run."""
    tensors, theirs = site.tensors, exact.tensors
    if tensors is None or theirs is None or tensors.query is None or tensors.key is None or site.scale is None:
        return None
    if theirs.scores is None or theirs.logits is None or exact.scale is None or exact.visible is None:
        return None
    if exact.scale.softcap or not exact.scale.exact or exact.sink or exact.partial or not exact.rows.are_tokens:
        return None
    query, key = tensors.query, tensors.key
    if (*query.shape[:2], query.shape[-1]) != (*key.shape[:2], key.shape[-1]):
        return None  # heads that are summed over in the product
    scores = query.double() @ key.double().mT
    if scores.shape != exact.visible.shape:
        return None
    slope = torch.tensor(exact.scale.factors, dtype=torch.float64)[None, :, None, None] / (exact.scale.inside or 1.0)
    added = theirs.fit.added
    return (slope * scores + torch.where(exact.visible, added, torch.zeros_like(added))).masked_fill(
        ~exact.visible, float("-inf")
    )


def measured(site: Site, exact: Site) -> Rounding | None:
    """How far one call's output is off, and the stage that is to blame; None where the reference does not apply."""
    if site.dropout or deviation(exact) > ROUNDED:
        return None  # dropped weights and those of another softmax are told as such
    tensors, logits = site.tensors, reference_logits(site, exact)
    if logits is None or tensors is None or tensors.value is None or tensors.restore is None or exact.visible is None:
        return None
    value = tensors.value.double()
    if value.shape[-2] != logits.shape[-1]:
        return None
    right = normalize(logits)
    blind = ~exact.visible.any(-1, keepdim=True)  # what a row gives that sees nothing is not defined
    size = tensors.restore((right @ value.abs()).masked_fill(blind, torch.inf)).reshape(tensors.output.shape)
    output = tensors.restore(right @ value).reshape(tensors.output.shape)
    unit = float(torch.finfo(getattr(torch, site.dtype)).eps) / 2 * size.amax(-1, keepdim=True).clamp_min(1e-30)
    units = float(torch.nan_to_num((tensors.output.double() - output).abs() / unit, nan=0.0).amax())
    weights = right if tensors.logits is None else torch.nan_to_num(tensors.weights.double())
    by_scores = 0.0
    if tensors.logits is not None and tensors.logits.shape == right.shape:
        by_scores = float(
            (normalize(tensors.logits.double().masked_fill(~exact.visible, float("-inf"))) - right).abs().amax()
        )
    off = float((weights - right).masked_fill(blind, 0.0).abs().amax()) if weights.shape == right.shape else 0.0
    stage = "scores" if by_scores > off / 2 > 0 else "softmax" if off > 2 * unit_of(site) else "sum"
    largest = float(logits.masked_fill(~exact.visible, 0.0).abs().amax())
    return Rounding(site, site.dtype, units, stage, max(off, by_scores), largest)


def unit_of(site: Site) -> float:
    return float(torch.finfo(getattr(torch, site.dtype)).eps) / 2
