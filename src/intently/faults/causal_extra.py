"""Fault `causal-extra`: a triangle hides later keys where attention is meant to see both ways, or more than the intent says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from intently.edits import see, see_uncut
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look, triangle_missing
from intently.faults.mask_inverted import inverted_keys, inverted_order
from intently.faults.mask_misrouted import misrouted
from intently.faults.wiring import replaced
from intently.sites import Site


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


def _own(look: Look) -> Tensor:
    """bool `[batch, heads, query, key]`: the query's own key."""
    own = torch.ones(look.site.queries, look.site.keys, dtype=torch.bool)
    return (
        own.tril(look.site.keys - look.site.queries).triu(look.site.keys - look.site.queries).expand(look.missing.shape)
    )


def _cut(site: Site) -> str:
    """What to say where a call over a source is handed the first of its keys alone; empty where it is handed all."""
    whole = site.tensors.uncut.get("key") if site.tensors is not None and site.role == "cross" else None
    return f", over the first {site.keys} of {whole.shape[-2]} keys" if whole is not None else ""


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks():
        if not each.comparable or not each.missing.any() or replaced(each.site):
            continue
        triangle = is_triangle(each)
        if not triangle and (seen.breaks("windowed", each.condition) or not seen.breaks("sees-all", each.condition)):
            continue  # a band too narrow has a name of its own; and what no output misses may be meant
        if inverted_keys(each) or inverted_order(each) or misrouted(each):
            continue
        pairs = each.missing
        own = bool(_own(each)[pairs].all())
        other = "a window hides" if "window(" in each.site.mask else "the mask hides"
        what = "queries do not see their own keys:" if own else "a triangle hides" if triangle else other
        # A query that sees nothing at all averages over everything, or is not a number.
        broken = [p for p in FAULT.promises if seen.breaks(p, each.condition)]
        yield Suspicion(
            fault=FAULT,
            promise=(broken or ["sees-all"])[0],
            site=each.site,
            heads=each.heads_where(pairs),
            message=f"{what} {int(pairs.sum())} {'pairs' if own else 'keys'} that are meant to be seen; the mask really used is: "
            f"{each.site.mask}{_cut(each.site)}",
            witness=each.witness(pairs, "query {query} gives weight {weight} to key {key}, which it is meant to see"),
            repair=lambda site, batch: (see_uncut if _cut(site) else see)(lambda s: seen.wanted(s, batch))(site),
            condition=each.condition.name,
        )


FAULT = Fault(
    name="causal-extra",
    stage="mask",
    promises=("sees-all", "causal", "padding-inert", "windowed"),
    severity="error",
    summary="A triangle hides later keys where attention is meant to see both ways, or the mask hides more than the intent says, as a "
    "window where none is meant.",
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
