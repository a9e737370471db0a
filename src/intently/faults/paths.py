"""What faults of the second code path share: the calls that run otherwise when a switch is thrown, and how they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from intently.edits import as_in
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.faults.side_channel import Pair, search
from intently.promises import Condition
from intently.promises.knobs import shown
from intently.report import Witness
from intently.sites import Site
from intently.targets.running import PLAIN


def changed(seen: Examination, condition: Condition) -> list[tuple[Site, Site]]:
    """Calls that run otherwise under a condition than without its switch, each with the run without it."""
    before = {s.key_name: s for s in seen.trial.sites(Condition(PLAIN, condition.layout))}
    pairs = [(s, before[s.key_name]) for s in seen.trial.sites(condition) if s.key_name in before]
    return [(s, o) for s, o in pairs if differs(s, o)]


def otherwise(
    seen: Examination,
    fault: Callable[[], Fault],
    promise: str,
    conditions: Iterable[Condition],
    *,
    besides: Callable[[Site, Site], bool] = lambda site, other: False,
) -> Iterator[Suspicion]:
    """Calls whose mask, factor, sums or dropout differ from those of the run without the switch; (root) where none does.

    `besides` tells the pairs that have another name.
    """
    for condition in conditions:
        witness = seen.gap(condition)
        found = changed(seen, condition)
        for site, other in found:
            if besides(site, other):
                continue
            yield Suspicion(
                fault=fault(),
                promise=promise,
                site=site,
                message=f"with {condition.switch.name} this call runs otherwise: {difference_in_words(site, other)}",
                witness=witness,
                repair=lambda s, batch, o=other: as_in(o)(s),
                condition=condition.name,
                undoes=True,
            )
        if not found:
            yield from _elsewhere(seen, fault(), promise, condition, witness)


def _elsewhere(
    seen: Examination, fault: Fault, promise: str, condition: Condition, witness: Witness
) -> Iterator[Suspicion]:
    """No call differs: the module whose inputs agree and whose output does not, or the model as a whole."""
    batch = seen.trial.batch(condition.layout)
    main = seen.trial.target.main
    everywhere = torch.ones(batch.samples, main.positions(seen.trial.lengths[main.argument]), dtype=torch.bool)
    pair = Pair(batch, batch, everywhere, witness.statement, without=Condition(PLAIN, condition.layout))
    channels, cured = search(seen.trial, condition, pair)
    for channel in channels:
        yield Suspicion(
            fault=fault,
            promise=promise,
            site=None,
            place=channel.path,
            message=f"with {condition.switch.name} {channel.path} gives another output for the same input, though every attention "
            "call found runs alike",
            witness=witness,
            condition=condition.name,
            proven_by="with its output held as without the switch, the outputs agree" if cured else "",
            unprovable="" if cured else "holding its output was not enough",
        )
    if not channels:
        yield Suspicion(
            fault=fault,
            promise=promise,
            site=None,
            message=f"{condition.switch.name} changes the output, though every attention call found runs alike",
            witness=witness,
            condition=condition.name,
            unprovable="no call and no module differs alone, so there is nothing to repair",
        )


def differs(site: Site, other: Site) -> bool:
    """Whether a call ran with another mask, factor, normalisation or dropout."""
    return difference_in_words(site, other) != ""


def lost(site: Site, other: Site) -> tuple[str, bool]:
    """What only one of two runs of a call adds to the logits, in words, and whether it is the first that lacks it.

    Nothing where they differ in more than that, or where both add something.
    """
    mine, theirs = shown(site), shown(other)
    if mine is None or theirs is None or site.visible is None or other.visible is None:
        return "", False
    if not torch.equal(site.visible, other.visible) or site.normalized_over != other.normalized_over:
        return "", False
    for trait in ("softcap", "sink", "bias"):
        if bool(mine[trait]) != bool(theirs[trait]):
            size = max(mine[trait], theirs[trait])
            words = {"softcap": f"the cap of {size:.4g}", "sink": "the sink", "bias": f"a bias of up to {size:.3g}"}
            return words[trait], not mine[trait]
    return "", False


def difference_in_words(site: Site, other: Site) -> str:
    parts = []
    if site.visible is not None and other.visible is not None and not torch.equal(site.visible, other.visible):
        parts.append(f"mask {site.mask}, else {other.mask}")
    if site.scale and other.scale and site.scale.exact and other.scale.exact and any(
        abs(a - b) > 1e-3 * max(abs(b), 1e-9) for a, b in zip(site.scale.factors, other.scale.factors, strict=False)
    ):  # fmt: skip
        parts.append(f"factor {site.scale.factors[0]:.4g}, else {other.scale.factors[0]:.4g}")
    if site.normalized_over != other.normalized_over:
        parts.append(f"weights sum to 1 over {site.normalized_over}, else over {other.normalized_over}")
    if site.dropout != other.dropout:
        parts.append(f"dropout {site.dropout:g}, else {other.dropout:g}")
    if not parts and (gap := _bias_gap(site, other)) > 1e-6:
        parts.append(f"what is added to the logits differs by up to {gap:.3g}")
    if site.sink != other.sink:
        parts.append("a sink" if site.sink else "no sink")
    cap, theirs = (s.scale.softcap if s.scale else None for s in (site, other))
    if cap != theirs:
        parts.append(f"softcap {cap}, else {theirs}")
    return "; ".join(parts)


def _bias_gap(site: Site, other: Site) -> float:
    """Largest difference of what the two calls add to their scaled scores, on pairs that both see, row constants aside."""
    addends = []
    for each in (site, other):
        tensors = each.tensors
        if tensors is None or tensors.scores is None or tensors.logits is None or each.visible is None:
            return 0.0
        addends.append(tensors.fit.added)
    if addends[0].shape != addends[1].shape or site.visible is None or other.visible is None:
        return 0.0
    both = site.visible & other.visible
    gap = torch.where(both, addends[0] - addends[1], torch.full_like(addends[0], float("nan")))
    gap = gap - gap.nanmedian(-1, keepdim=True).values
    return float(torch.nan_to_num(gap).abs().amax())
