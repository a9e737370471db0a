"""Fault `mask-inverted`: the call sees exactly what it should not, and does not see what it should."""

from __future__ import annotations

from collections.abc import Iterator

from intently.edits import see
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look, complement


def inverted_keys(look: Look) -> bool:
    """The key mask the wrong way round, in some head: kept keys hidden, pads seen."""
    if look.structure is None or look.site.visible is None or not look.mask_arrives:
        return False
    seen = look.site.visible
    base = look.structure & look.rows
    own = look.real_keys.expand_as(base)
    padded = (~look.real_keys).any(-1).flatten()
    if not padded.any():
        return complement_all(look)
    return any(
        complement(seen[padded][:, h], ~seen[padded][:, h], (base & own)[padded][:, 0], (base & ~own)[padded][:, 0])
        for h in range(seen.shape[1])
    )


def complement_all(look: Look) -> bool:
    """Without any pad: everything hidden."""
    assert look.site.visible is not None
    return not bool(look.site.visible.any())


def inverted_order(look: Look) -> bool:
    """The triangle the wrong way round, in some head: later keys seen, earlier ones hidden."""
    if look.structure is None or look.site.visible is None or bool(look.structure.all()):
        return False
    real = look.rows & look.real_keys
    seen = look.site.visible
    off = ~_diagonal(look)
    for head in range(seen.shape[1]):
        allowed = (look.structure & real & off)[:, 0]
        forbidden = (~look.structure & real)[:, 0]
        if forbidden.any() and complement(seen[:, head], ~seen[:, head], allowed, forbidden):
            return True
    return False


def _diagonal(look: Look):
    import torch

    queries, keys = look.site.queries, look.site.keys
    eye = torch.zeros(queries, keys, dtype=torch.bool)
    eye.diagonal(keys - queries if keys >= queries else 0).fill_(True)
    return eye


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks():
        if not each.comparable:
            continue
        order = inverted_order(each)
        keys = bool(each.condition.layout.pads) and inverted_keys(each)
        if not order and not keys:
            continue
        pairs = each.extra if each.extra.any() else each.missing
        if not pairs.any():
            continue
        shown = "key {key} is meant to be hidden" if pairs is each.extra else "key {key} is meant to be seen"
        documents = order and seen.breaks("documents-isolated", each.condition)
        documents = documents and not seen.breaks("causal", each.condition)
        promise = (
            "documents-isolated"
            if documents
            else "causal"
            if order
            else "padding-inert"
            if seen.breaks("padding-inert", each.condition)
            else "sees-all"
        )
        if (
            promise == "sees-all"
            and not seen.breaks("sees-all", each.condition)
            and seen.breaks("finite", each.condition)
        ):
            promise = "finite"
        which = "the mask of documents" if documents else "the order of the keys" if order else "the key mask"
        yield Suspicion(
            fault=FAULT,
            promise=promise,
            site=each.site,
            heads=each.heads_where(each.extra | each.missing),
            message=f"{which} is the wrong way round: {int(each.missing.sum())} keys that are meant to be seen are hidden, "
            f"{int(each.extra.sum())} that are meant to be hidden are seen; the mask really used is: {each.site.mask}",
            witness=each.witness(pairs, "query {query}: " + shown + ", its weight is {weight}"),
            repair=lambda site, batch: see(lambda s: seen.wanted(s, batch))(site),
            condition=each.condition.name,
        )


FAULT = Fault(
    name="mask-inverted",
    stage="mask",
    promises=("padding-inert", "causal", "sees-all", "windowed", "documents-isolated", "memory-respected"),
    severity="error",
    summary="The mask is the exact complement of the one meant: True was taken for the other meaning.",
    symptom="Real tokens have no effect and pads do, or queries see the future only.",
    why_silent="F.scaled_dot_product_attention takes True for 'take part', nn.MultiheadAttention for 'hide'; shapes and dtypes agree.",
    fix="Negate the boolean mask where it crosses from one convention to the other.",
    bad="""
from intently import Intent, Mask, Target

def attention(q, k, v, key_padding_mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if key_padding_mask is not None:
        scores = scores.masked_fill(~key_padding_mask[:, None, None, :], -1e9)
    return scores.softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.full()), padding="key_padding_mask:hide")
""",
    good="""
from intently import Intent, Mask, Target

def attention(q, k, v, key_padding_mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], -1e9)
    return scores.softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.full()), padding="key_padding_mask:hide")
""",
    sources=("PyTorch documentation of F.scaled_dot_product_attention, note on attn_mask", "torchTextClassifiers#92"),
    look=look,
)
