"""Promise `backends-agree`: every backend gives the same real outputs, and every site equals the float64 reference."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from intently.edits import split_heads
from intently.mechanism import aggregate, normalize
from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.in_half import EXPLAINED, precision_of, roundings
from intently.promises.padding_inert import PADS, pads_part
from intently.promises.trial import Condition, Trial, difference
from intently.report import Cell
from intently.sites import Site
from intently.targets.running import PLAIN


def replay(site: Site) -> float | None:
    """Largest relative difference between a site's output and the reference from its own logits and values; None if unknown."""
    tensors = site.tensors
    if tensors is not None and not site.rows.are_tokens:
        return _between_tokens(site)
    if tensors is not None and tensors.logits is None and site.repaired:
        return 0.0  # the reference itself stands in its place
    if tensors is None or tensors.logits is None or tensors.value is None or tensors.restore is None:
        return None
    if tensors.value.shape[-2] != tensors.logits.shape[-1] or site.deferred or site.partial or site.sink:
        return None
    logits = tensors.logits.double()
    if site.visible is not None and site.visible.shape == logits.shape:
        logits = logits.masked_fill(
            ~site.visible, float("-inf")
        )  # a mask multiplied in later and renormalised is as good
    plain = normalize(logits)
    if plain.shape != tensors.weights.shape or (plain - torch.nan_to_num(tensors.weights.double())).abs().amax() > 1e-4:
        return None  # weights of another making (a difference of two softmaxes, a gate): no reference is known
    empty = ~(torch.isfinite(logits) & (logits > -1e300)).any(-1)
    reference = aggregate(plain, tensors.value.double())
    output = tensors.restore(reference).reshape(tensors.output.shape)
    seen = tensors.restore((~empty)[..., None].expand(reference.shape).double()).reshape(tensors.output.shape) > 0
    if not seen.any():
        return None
    gap = (output - tensors.output.double()).abs()[seen]
    return float(torch.nan_to_num(gap, nan=0.0).amax() / output[seen].abs().nan_to_num().amax().clamp_min(1e-30))


def _between_tokens(site: Site) -> float | None:
    """The same for a call whose rows are no tokens: the reference is attention between tokens, from the same projections."""
    tensors = site.tensors
    change = split_heads(lambda _: None, None, site)(site)
    if tensors is None or change is None or change.output is None or tensors.restore is None:
        return None
    reference = tensors.restore(change.output).reshape(tensors.output.shape)
    return float((reference - tensors.output.double()).abs().amax() / reference.abs().amax().clamp_min(1e-30))


def try_on(trial: Trial) -> Iterable[Cell]:
    found = []
    for condition in trial.conditions:
        switch = condition.switch
        if switch.backend:
            mine, theirs = trial.output(condition), trial.output(Condition(PLAIN, condition.layout))
            if mine.shape != theirs.shape:
                found.append(
                    cells.untried(
                        "backends-agree", condition, f"output is {list(mine.shape)}, else {list(theirs.shape)}"
                    )
                )
                continue
            if cells.ill(trial, condition) or cells.ill(trial, Condition(PLAIN, condition.layout)):
                found.append(cells.untried("backends-agree", condition, "real outputs are not finite"))
                continue
            rows = trial.real_rows(condition, mine.shape[1])
            gap = difference(mine, theirs)[rows]
            worst = float(gap.amax())
            noise = 100 * trial.threshold(theirs)
            if worst > noise and cells.rounding_only(trial, condition, Condition(PLAIN, condition.layout), worst):
                noise = worst
            if worst > noise and pads_part(trial, condition):
                found.append(cells.untried("backends-agree", condition, PADS))
                continue
            note = "" if worst <= noise else f"{int((gap > noise).sum())} of {gap.numel()} real rows differ"
            found.append(cells.cell("backends-agree", condition, worst, noise, broken=worst > noise, note=note))
        elif not cells.narrow(trial, condition) and cells.same_as(trial, condition) is None:
            gaps = [g for g in map(replay, trial.sites(condition)) if g is not None]
            if gaps:
                eps = float(torch.finfo(trial.runner.dtype).eps)
                noise = max(1e4 * eps, 1e-6 if trial.runner.dtype == torch.float64 else 1e-4)
                note = f"{len(gaps)} {'site' if len(gaps) == 1 else 'sites'} replayed in float64"
                found.append(
                    cells.cell("backends-agree", condition, max(gaps), noise, broken=max(gaps) > noise, note=note)
                )
    return found + _in_half(trial)


def _in_half(trial: Trial) -> list[Cell]:
    """Each call in half precision against float64, from its own half-precision operands: in one cell, in units of rounding."""
    if trial.edits or (name := precision_of(trial)) is None:
        return []
    units = [r.units for r in roundings(trial)]
    if not units:
        return []
    note = f"{len(units)} {'site' if len(units) == 1 else 'sites'}, in units of the last place"
    return [Cell("backends-agree", name, "broken" if max(units) > EXPLAINED else "kept", max(units), EXPLAINED, note)]


PROMISE = Promise(
    name="backends-agree",
    statement="Every real row equals the float64 reference, under each backend.",
    applies_to="all",
    how="Outputs under each backend or flag are compared row by row; each site's output is compared with softmax and "
    "weighted sum in float64 from its own logits and values (relative error). In half precision each site is held against float64 "
    "from its own half-precision queries, keys and values, in units of the last place.",
    sources=("pytorch documentation of F.scaled_dot_product_attention: the equivalent code",),
    try_on=try_on,
    per_site=True,
)
