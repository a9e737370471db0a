"""Fault `observer-effect`: asking for the weights (or the cache) changes the output."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from intently.edits import as_in
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises import Condition
from intently.report import Witness
from intently.sites import Site
from intently.targets.running import PLAIN


def look(seen: Examination) -> Iterator[Suspicion]:
    for condition in seen.broken("observer-neutral"):
        if not condition.switch.looking:
            continue
        plain = Condition(PLAIN, condition.layout)
        cell = seen.cell("observer-neutral", condition)
        moved = cell.error if cell is not None and cell.error is not None else 0.0
        witness = Witness(f"with {condition.switch.name} an output moves by {moved:.3g}", None, {"difference": moved})
        before = {s.key_name: s for s in seen.trial.sites(plain)}
        changed = [
            (s, before[s.key_name])
            for s in seen.trial.sites(condition)
            if s.key_name in before and differs(s, before[s.key_name])
        ]
        for site, other in changed:
            yield Suspicion(
                fault=FAULT,
                promise="observer-neutral",
                site=site,
                message=f"with {condition.switch.name} this call runs otherwise: {difference_in_words(site, other)}",
                witness=witness,
                repair=lambda s, batch, o=other: as_in(o)(s),
                condition=condition.name,
            )
        if not changed:
            yield Suspicion(
                fault=FAULT,
                promise="observer-neutral",
                site=None,
                message=f"{condition.switch.name} changes the output, though every attention call found runs alike",
                witness=witness,
                condition=condition.name,
                unprovable="no call differs, so there is nothing to repair at a site",
            )


def differs(site: Site, other: Site) -> bool:
    """Whether a call ran with another mask, factor, normalisation or dropout."""
    return difference_in_words(site, other) != ""


def difference_in_words(site: Site, other: Site) -> str:
    parts = []
    if site.visible is not None and other.visible is not None and not torch.equal(site.visible, other.visible):
        parts.append(f"mask {site.mask}, else {other.mask}")
    if site.scale and other.scale and any(
        abs(a - b) > 1e-3 * max(abs(b), 1e-9) for a, b in zip(site.scale.factors, other.scale.factors, strict=False)
    ):  # fmt: skip
        parts.append(f"factor {site.scale.factors[0]:.4g}, else {other.scale.factors[0]:.4g}")
    if site.normalized_over != other.normalized_over:
        parts.append(f"weights sum to 1 over {site.normalized_over}, else over {other.normalized_over}")
    if site.dropout != other.dropout:
        parts.append(f"dropout {site.dropout:g}, else {other.dropout:g}")
    if site.bias != other.bias:
        parts.append(f"bias {site.bias}, else {other.bias}")
    return "; ".join(parts)


FAULT = Fault(
    name="observer-effect",
    stage="outside",
    promises=("observer-neutral",),
    severity="error",
    summary="Asking for weights changes the output: another code path runs.",
    symptom="A heat map is drawn from a model that is not the one deployed.",
    why_silent="Nobody compares the outputs with and without weights.",
    fix="Build mask and scale once, before the choice of the path.",
    bad="""
import torch.nn.functional as F
from intently import Intent, Mask, Target

def attention(q, k, v, need_weights=False):
    if need_weights:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return weights @ v, weights
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

def build():
    return Target(attention, Intent(Mask.causal()))
""",
    good="""
import torch
import torch.nn.functional as F
from intently import Intent, Mask, Target

def attention(q, k, v, need_weights=False):
    if need_weights:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf")).softmax(-1)
        return weights @ v, weights
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

def build():
    return Target(attention, Intent(Mask.causal()))
""",
    sources=("huggingface/transformers#30652",),
    look=look,
)
