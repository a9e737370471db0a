"""Fault `documents-leak`: a query sees keys of another document packed into the same row."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from intently.edits import see
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look
from intently.report import Witness
from intently.sites import Site
from intently.targets.packing import stated_documents
from intently.targets.stream import Batch


def strangers(look: Look) -> Tensor | None:
    """bool `[batch, heads, query, key]`: real keys of another document that a query sees; None where a call runs otherwise."""
    together, seen = look.trial.target.together, look.site.visible
    if together is None or seen is None or seen.shape[-2:] != together.shape or look.site.partial:
        return None
    if look.samples != look.batch.samples or not look.site.rows.are_tokens:
        return None
    return seen & ~together & look.rows & look.real_keys


def look(seen: Examination) -> Iterator[Suspicion]:
    target = seen.trial.target
    conditions = [c for c in seen.distinct if seen.breaks("documents-isolated", c)]
    if left_to_the_caller(seen):
        for condition in conditions[:1]:
            yield _switched_off(seen, condition)
        return
    ways = ", ".join(t.argument for t in target.tellings)
    for each in seen.looks(conditions):
        pairs = strangers(each)
        if pairs is None or not pairs.any():
            continue
        said = f"documents are told by {ways}" if ways else "nothing tells this model where a document ends"
        yield Suspicion(
            fault=FAULT,
            promise="documents-isolated",
            site=each.site,
            heads=each.heads_where(pairs),
            severity="warning" if target.known and not stated(seen) else None,
            message=f"queries see {int(pairs.sum())} keys of other documents; {said}; the mask really used is: {each.site.mask}",
            witness=each.witness(
                pairs, "query {query} gives weight {weight} to key {key}, which is in another document"
            ),
            repair=lambda site, batch: see(lambda s: _apart(seen, s, batch))(site),
            condition=each.condition.name,
        )


def stated(seen: Examination) -> bool:
    """Whether the target's own intent names documents."""
    return stated_documents(seen.trial.target) is not None


def left_to_the_caller(seen: Examination) -> bool:
    """Whether nobody claims that documents are kept apart: a mask, say, may then end packing."""
    return not stated(seen) and not any(t.promises for t in seen.trial.target.tellings)


def _apart(seen: Examination, site: Site, batch: Batch) -> Tensor | None:
    """What the call saw, less the keys of other documents."""
    together = seen.trial.target.together
    if site.visible is None or together is None:
        return seen.wanted(site, batch)
    return site.visible & together


def _switched_off(seen: Examination, condition) -> Suspicion:
    argument = ", ".join(t.argument for t in seen.trial.target.tellings)
    cell = seen.cell("documents-isolated", condition)
    moved = cell.error if cell is not None and cell.error is not None else 0.0
    said = cell.note if cell is not None else ""
    return Suspicion(
        fault=FAULT,
        promise="documents-isolated",
        site=None,
        severity="warning",
        message=f"{argument} that start again keep packed documents apart, but not under {condition.name!r}",
        witness=Witness(f"{said} by {moved:.3g}", None, {"moved": moved}),
        condition=condition.name,
        proven_by="the same rows without the mask keep their documents apart",
    )


FAULT = Fault(
    name="documents-leak",
    stage="mask",
    promises=("documents-isolated",),
    severity="error",
    summary="Documents packed into one row see each other.",
    symptom="Training on packed rows teaches the model to copy from strangers; results depend on what was packed with what.",
    why_silent="Packed rows train well, and positions that start again look as if they were enough. A mask of ones, passed "
    "out of habit, switches the detection of packing off in some libraries.",
    fix="Hide keys of other documents (same document number, besides the triangle) in every call, also where a key mask is given; "
    "where packing is detected from positions, pass no mask.",
    bad="""
from intently import Intent, Mask, Target

def attention(q, k, v, document_ids):
    seen = (q.new_ones(q.shape[-2], k.shape[-2]).tril() > 0)[None, None]
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -1e9)
    return scores.softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.causal()))
""",
    good="""
from intently import Intent, Mask, Target

def attention(q, k, v, document_ids):
    seen = (q.new_ones(q.shape[-2], k.shape[-2]).tril() > 0)[None, None]
    seen = seen & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -1e9)
    return scores.softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.causal()))
""",
    sources=(
        "huggingface/transformers#46634",
        "Krell et al. 2021, packing without cross-contamination: arXiv:2107.02027",
    ),
    look=look,
)
