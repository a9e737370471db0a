"""Fault `causal-leak`: a query sees keys that come after it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from intently.edits import see
from intently.faults.base import Fault, Suspicion
from intently.faults.cached import steps
from intently.faults.evidence import Examination, Look
from intently.faults.mask_ignored import weakly_masked
from intently.faults.mask_inverted import inverted_order


def later(look: Look) -> torch.Tensor:
    """bool `[batch, heads, query, key]`: seen, real, not meant to be, and later than the query."""
    assert look.structure is not None and look.site.visible is not None
    queries, keys = look.site.queries, look.site.keys
    after = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    together = look.trial.target.together
    if together is not None and together.shape == after.shape:
        after = after & together  # another document's keys are a fault of its own
    return look.site.visible & ~look.structure & look.rows & look.real_keys & after


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks():
        if not each.comparable or not (
            seen.breaks("causal", each.condition) or seen.unjudged("causal", each.condition)
        ):
            continue
        pairs = later(each)
        if not pairs.any() or inverted_order(each) or weakly_masked(each, pairs):
            continue
        count = int(pairs.sum())
        yield Suspicion(
            fault=FAULT,
            promise="causal",
            site=each.site,
            heads=each.heads_where(pairs),
            message=f"queries see {count} keys that come after them; the mask really used is: {each.site.mask}",
            witness=each.witness(pairs, "query {query} gives weight {weight} to key {key}, which comes after it"),
            repair=lambda site, batch: see(lambda s: seen.wanted(s, batch))(site),
            condition=each.condition.name,
        )
    for step in steps(seen):
        if bool(step.later.any()) and not (step.missing | step.extra & ~step.later & ~step.pads).any():
            yield step.suspicion(FAULT, step.later)


FAULT = Fault(
    name="causal-leak",
    stage="mask",
    promises=("causal", "windowed", "cache-equal"),
    severity="error",
    summary="A query sees keys that come after it, where the intent is causal.",
    symptom="The loss looks too good; generation falls apart, because the future that the model learned to copy is not there.",
    why_silent="Every shape fits, and the training metric improves.",
    fix="Hide keys j > i before the softmax: is_causal=True, or a mask built with tril, in every code path and also when no mask is given.",
    bad="""
from intently import Intent, Mask, Target

def attention(q, k, v):
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return weights @ v

def build():
    return Target(attention, Intent(Mask.causal()))
""",
    good="""
import torch
from intently import Intent, Mask, Target

def attention(q, k, v):
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.causal()))
""",
    sources=("huggingface/transformers#30652", "Vaswani et al. 2017, section 3.2.3"),
    look=look,
)
