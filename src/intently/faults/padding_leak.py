"""Fault `padding-leak`: real queries see pads, and the key mask never reaches the call."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from intently.edits import see
from intently.faults.base import Fault, Suspicion
from intently.faults.cached import steps
from intently.faults.evidence import Examination, Look
from intently.faults.mask_inverted import inverted_keys


def pads_seen(look: Look) -> torch.Tensor:
    """bool `[batch, heads, query, key]`: pads that a real query sees."""
    assert look.structure is not None and look.site.visible is not None
    return look.site.visible & look.structure & look.rows & ~look.real_keys


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks():
        if not each.comparable or not each.condition.layout.padded:
            continue
        if not (seen.breaks("padding-inert", each.condition) or seen.unjudged("padding-inert", each.condition)):
            continue
        pairs = pads_seen(each)
        if not pairs.any() or each.mask_arrives or inverted_keys(each):
            continue
        argument = ", ".join(sorted(each.key_mask_arguments)) or "the key mask"
        yield Suspicion(
            fault=FAULT,
            promise="padding-inert",
            site=each.site,
            heads=each.heads_where(pairs),
            message=f"pads (keys {each.pads()} of sample 0) are seen by real queries; {argument} never reaches this call, "
            f"which uses the mask: {each.site.mask}",
            witness=each.witness(pairs, "query {query}, a real token, gives weight {weight} to key {key}, a pad"),
            repair=lambda site, batch: see(lambda s: seen.wanted(s, batch))(site),
            condition=each.condition.name,
        )
    for step in steps(seen):
        if bool(step.pads.any()) and torch.equal(step.pads, step.wrong):
            yield step.suspicion(FAULT, step.pads)


FAULT = Fault(
    name="padding-leak",
    stage="mask",
    promises=("padding-inert", "memory-respected", "cache-equal"),
    severity="error",
    summary="Real tokens see pads: the key mask does not reach the attention call.",
    symptom="A sample's output depends on how long its batch mates are; batched and single results differ.",
    why_silent="Pads are valid vectors, so the mixture is plausible; with one sample, or equal lengths, all is well.",
    fix="Pass the key mask on to every attention call and hide pads before the softmax.",
    bad="""
from intently import Intent, Mask, Target

def attention(q, k, v, attention_mask=None):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.full()), padding="attention_mask:keep")
""",
    good="""
from intently import Intent, Mask, Target

def attention(q, k, v, attention_mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask[:, None, None, :] == 0, float("-inf"))
    return scores.softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.full()), padding="attention_mask:keep")
""",
    sources=("huggingface/transformers#14521", "pytorch/pytorch#41508"),
    look=look,
)
