"""Fault `mask-ignored`: a mask reaches the call and hides nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from intently.edits import see
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look
from intently.faults.mask_inverted import inverted_keys, inverted_order
from intently.mechanism import normalize


def after_softmax(look: Look) -> Tensor | None:
    """bool `[batch, heads, query, key]`: weights set to 0 after a softmax that gave them a share, rows left short of 1."""
    site = look.site
    if (
        site.tensors is None
        or site.tensors.logits is None
        or site.dropout > 0
        or site.normalized_over == "keys"
        or site.sink
    ):
        return None
    made = normalize(site.tensors.logits.double())
    if made.shape != site.tensors.weights.shape:
        return None
    zeroed = (site.tensors.weights == 0) & (made > 1e-12)
    kept = ~zeroed & (made > 1e-12)
    # The weights that were not zeroed are still those of the softmax: nothing was renormalised.
    untouched = (site.tensors.weights.double() - made).abs() <= 1e-6 * made.abs()
    return zeroed if zeroed.any() and bool(untouched[kept].all()) else None


def weakly_masked(look: Look, pairs: Tensor) -> bool:
    """Whether pairs that should be hidden carry a mark that seen pairs do not: a fill or an addend too weak to hide them."""
    tensors, scale = look.site.tensors, look.site.scale
    if tensors is None or tensors.scores is None or tensors.logits is None or scale is None or look.wanted is None:
        return False
    plain = look.site.visible & look.wanted.expand(pairs.shape) & look.rows if look.site.visible is not None else None
    if plain is None or not plain.any() or scale.softcap:
        return False
    slope = torch.tensor([f / (scale.inside or 1.0) for f in scale.factors], dtype=torch.float64)[None, :, None, None]
    added = tensors.logits.double() - slope * tensors.scores.double()
    centre = torch.where(plain, added, torch.full_like(added, float("nan"))).nanmedian(-1, keepdim=True).values
    added = torch.nan_to_num(added - centre)
    spread = float(added[plain].abs().amax())
    marks, constant = added[pairs], tensors.logits[pairs].double()
    size = float(tensors.logits[plain].double().abs().amax().clamp_min(1e-9))
    filled = int(pairs.sum()) > 3 and float((constant - constant.median()).abs().amax()) <= 1e-9 * size
    return bool((marks.abs() > 10 * spread + 1e-9 * size).double().mean() > 0.9) or filled


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks():
        if not each.comparable:
            continue
        for promise, pairs, what in _ineffective(seen, each):
            yield Suspicion(
                fault=FAULT,
                promise=promise,
                site=each.site,
                heads=each.heads_where(pairs),
                message=f"a mask is applied here, but {what}; keys really seen: {each.site.mask}",
                witness=each.witness(pairs, "query {query} is meant not to see key {key}; its weight is {weight}"),
                repair=lambda site, batch: see(lambda s: seen.wanted(s, batch), clean=True)(site),
                condition=each.condition.name,
            )
            break


def _ineffective(seen: Examination, each: Look) -> Iterator[tuple[str, Tensor, str]]:
    assert each.structure is not None and each.site.visible is not None
    condition = each.condition
    late = after_softmax(each)
    padded = bool(condition.layout.padded) and (
        seen.breaks("padding-inert", condition) or seen.unjudged("padding-inert", condition)
    )
    ordered = seen.breaks("causal", condition) or seen.unjudged("causal", condition)
    windowed, apart = seen.breaks("windowed", condition), seen.breaks("documents-isolated", condition)
    broken = "causal" if ordered else "windowed" if windowed else "documents-isolated" if apart else ""
    if late is not None and (padded or broken or seen.breaks("normalized", condition)):
        promise = "padding-inert" if padded and each.mask_arrives else broken or "normalized"
        yield promise, late, "only after the softmax, so that hidden keys still take their share of the sum"
    pads = each.site.visible & each.structure & each.rows & ~each.real_keys
    if padded and pads.any() and each.mask_arrives and not inverted_keys(each):
        yield "padding-inert", pads, "pads keep their weight: what it adds or fills in does not hide them"
    pairs = each.site.visible & ~each.structure & each.rows & each.real_keys
    if broken and pairs.any() and weakly_masked(each, pairs) and not inverted_order(each):
        yield broken, pairs, "what it adds or fills in is too weak to hide them"


FAULT = Fault(
    name="mask-ignored",
    stage="mask",
    promises=("padding-inert", "causal", "windowed", "documents-isolated", "normalized", "memory-respected"),
    severity="error",
    summary="A mask reaches the attention call and hides nothing.",
    symptom="Flipping entries of the mask changes little or nothing.",
    why_silent="The argument is accepted, and a mask of ones, the usual test, gives the right answer.",
    fix="Hide before the softmax with -inf or the lowest number of the dtype: masked_fill, or an additive mask made from the "
    "0/1 mask (a float mask of 0 and 1 adds 0 and 1 to the scores).",
    bad="""
from intently import Intent, Mask, Target

def attention(q, k, v, attention_mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if attention_mask is not None:
        scores = scores + attention_mask[:, None, None, :].to(scores.dtype)
    return scores.softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.full()), padding="attention_mask:keep")
""",
    good="""
import torch
from intently import Intent, Mask, Target

def attention(q, k, v, attention_mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if attention_mask is not None:
        added = (1 - attention_mask[:, None, None, :].to(scores.dtype)) * torch.finfo(scores.dtype).min
        scores = scores + added
    return scores.softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.full()), padding="attention_mask:keep")
""",
    sources=(
        "huggingface/pytorch-image-models#2236",
        "PyTorch documentation of F.scaled_dot_product_attention, attn_mask",
    ),
    look=look,
)
