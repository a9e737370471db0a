"""Fault `not-finite`: a row with nothing to see, or a fill too large for the dtype, becomes NaN and spreads to real tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from intently.edits import safe_rows
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look
from intently.promises import Condition
from intently.report import Severity, Witness
from intently.sites import Replacement, Site
from intently.targets.stream import Batch


def look(seen: Examination) -> Iterator[Suspicion]:
    for condition in seen.broken("finite"):
        for each in _makers(seen, condition):
            yield Suspicion(
                fault=FAULT,
                promise="finite",
                site=each.site,
                message=_message(each),
                witness=_witness(each),
                repair=_repair,
                severity=_severity(seen),
                condition=condition.name,
            )


def _makers(seen: Examination, condition: Condition) -> list[Look]:
    """Calls that turn finite inputs into NaN, all of them in one run: each is mended on the spot, so that the next gets numbers."""
    found: list[Look] = []

    def watch(site: Site, batch: Batch) -> Replacement | None:
        each = Look(seen.trial, condition, site, batch)
        if not _makes_nan(each):
            return None
        found.append(each)
        return _repair(site, batch)

    calls = {s.key_name for s in seen.trial.sites(condition)}
    mended = seen.trial.repaired(dict.fromkeys(calls, watch), [condition]).sites(condition)
    names = {s.key_name: s for s in mended}
    return [replace(each, site=replace(each.site, path=names[each.site.key_name].path)) for each in found]


def _repair(site: Site, batch: Batch) -> Replacement | None:
    return safe_rows()(site)


def _makes_nan(look: Look) -> bool:
    """Whether the call's output is not finite. Calls before it are mended, so it is this call, or how its queries and keys are made."""
    tensors = look.site.tensors
    if tensors is None or bool(torch.isfinite(tensors.output).all()):
        return False
    return tensors.value is None or bool(torch.isfinite(tensors.value).all())


def _blind(look: Look) -> torch.Tensor:
    tensors = look.site.tensors
    assert tensors is not None
    if tensors.logits is None:
        return torch.zeros(tensors.weights.shape[:3], dtype=torch.bool)
    return (torch.isneginf(tensors.logits) | torch.isnan(tensors.logits)).all(-1)


def _message(look: Look) -> str:
    blind = int(_blind(look).any(1).sum())
    if blind:
        return (
            f"{blind} rows see no key at all; their softmax is 0/0, and the NaN reaches real tokens at the next layer"
        )
    return "finite queries, keys and values give an output that is not finite"


def _witness(look: Look) -> Witness:
    blind = _blind(look)
    if blind.any():
        sample, head, query = (int(i) for i in blind.nonzero()[0])
        return Witness(
            f"sample {sample}, query {query}: every key is hidden, so the row is NaN",
            None,
            {"sample": sample, "query": query, "head": head},
        )
    return Witness("the call's output holds NaN or infinity")


def _severity(seen: Examination) -> Severity | None:
    """A fault seen only in float64 is a warning: nobody deploys it."""
    deployed = [c for c in seen.cells if c.promise == "finite" and c.condition.startswith("float32")]
    if seen.trial.runner.dtype == torch.float64 and deployed and all(c.verdict != "broken" for c in deployed):
        return "warning"
    return None


FAULT = Fault(
    name="not-finite",
    stage="normalize",
    promises=("finite",),
    severity="error",
    summary="A row with nothing to see, or a fill beyond the dtype, gives NaN, which spreads.",
    symptom="NaN for padded batches only, often from the second layer on, or only in half precision.",
    why_silent="Unpadded batches are fine, and a loss that ignores pads hides the first layer's NaN.",
    fix="Fill with torch.finfo(dtype).min once (not twice, and not -inf) or set rows that see nothing to zero.",
    bad="""
from intently import Intent, Mask, Target

def attention(q, k, v, attention_mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask[:, None, None, :] == 0, float("-inf"))
        scores = scores.masked_fill(attention_mask[:, None, None, :].roll(1, -1) == 0, float("-inf"))
        scores = scores - scores.max(-1, keepdim=True).values + (scores * 0).sum(-2, keepdim=True)
    return scores.softmax(-1) @ v

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
    sources=("pytorch/pytorch#41508",),
    look=look,
)
