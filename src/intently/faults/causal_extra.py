"""Fault `causal-extra`: a triangle hides later keys where attention is meant to see both ways, or more than the intent says."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from intently.edits import see
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look, triangle_missing
from intently.faults.mask_inverted import inverted_keys, inverted_order


def is_triangle(look: Look) -> bool:
    """Whether what is hidden beyond the intent is a triangle of later keys, in some head of some sample.

    Keys that the intent hides anyway count on either side, so that a strict triangle inside a causal mask is seen too.
    """
    assert look.site.visible is not None and look.wanted is not None
    later = torch.ones(look.site.queries, look.site.keys, dtype=torch.bool).triu(1 + look.site.keys - look.site.queries)
    hidden = ~look.site.visible & (look.wanted | later)  # earlier keys that the intent hides belong to no triangle
    for sample in range(look.missing.shape[0]):
        for head in range(look.missing.shape[1]):
            if not look.missing[sample, head].any():
                continue
            rows = look.rows[sample, 0, :, 0]
            keys = look.real_keys[sample, 0, 0]
            if triangle_missing(hidden[sample, head][rows][:, keys]):
                return True
    return False


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks():
        if not each.comparable or not each.missing.any() or not is_triangle(each):
            continue
        if inverted_keys(each) or inverted_order(each):
            continue
        pairs = each.missing
        yield Suspicion(
            fault=FAULT,
            promise="sees-all",
            site=each.site,
            heads=each.heads_where(pairs),
            message=f"a triangle hides {int(pairs.sum())} keys that are meant to be seen; the mask really used is: {each.site.mask}",
            witness=each.witness(pairs, "query {query} gives weight {weight} to key {key}, which it is meant to see"),
            repair=lambda site, batch: see(lambda s: seen.wanted(s, batch))(site),
            condition=each.condition.name,
        )


FAULT = Fault(
    name="causal-extra",
    stage="mask",
    promises=("sees-all", "windowed"),
    severity="error",
    summary="A triangle hides later keys where attention is meant to see both ways.",
    symptom="The first positions of an encoder or of cross-attention know almost nothing; quality is a little worse everywhere.",
    why_silent="A causal encoder trains. Often it happens only without a mask and at batch 1, where nobody tests.",
    fix="Pass is_causal=False (or no triangle) to encoder and cross-attention, whether a mask is given or not.",
    bad="""
import torch.nn.functional as F
from intently import Intent, Mask, Target

def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

def build():
    return Target(attention, Intent(Mask.full()))
""",
    good="""
import torch.nn.functional as F
from intently import Intent, Mask, Target

def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)

def build():
    return Target(attention, Intent(Mask.full()))
""",
    sources=("huggingface/transformers#48172", "UKPLab/sentence-transformers#3725"),
    look=look,
)
