"""Fault `not-normalized`: the weights of a row sum to 1 over no axis."""

from __future__ import annotations

from collections.abc import Iterator

from intently.edits import softmax_over_keys
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look
from intently.faults.softmax_wrong_axis import range_of, witness
from intently.promises.normalized import TOLERANCE, deviation
from intently.report import Severity


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks(seen.broken("normalized")):
        site = each.site
        if site.normalized_over not in ("keys", "nothing") or deviation(site) <= TOLERANCE:
            continue
        yield Suspicion(
            fault=FAULT,
            promise="normalized",
            site=site,
            message=f"the weights of a row sum to {range_of(site.row_sum)}{_made(each)}; the output grows and shrinks with that sum",
            witness=witness(each),
            repair=lambda s, batch: softmax_over_keys()(s),
            severity=_severity(seen, each),
            condition=each.condition.name,
        )


def _made(look: Look) -> str:
    """Where the sums come from, as far as the call tells."""
    if look.site.made_by.endswith("unused"):
        return ": they are the logits themselves, the softmax of them is made and not used"
    if look.site.made_by.startswith("softmax"):
        return ": something changes them after the softmax"
    return f": they are made by {look.site.made_by}, and nothing divides them by their sum"


def _severity(seen: Examination, look: Look) -> Severity | None:
    """A sigmoid may be meant; a released architecture (scans, linear attention) was trained with the weights it has."""
    if seen.trial.target.known:
        return "note"
    return "warning" if look.site.made_by.startswith("sigmoid") else None


FAULT = Fault(
    name="not-normalized",
    stage="normalize",
    promises=("normalized", "padding-inert"),
    severity="error",
    summary="The weights of a row sum to 1 over no axis: not divided by their sum, or changed after the softmax.",
    symptom="Outputs grow with the length, or shrink where much is hidden; a model trained at one length is off at another.",
    why_silent="Shapes fit and a norm behind the layer hides the size of its output.",
    fix="Let a softmax over the keys be the last thing that happens to the weights; scale the logits before it, not the weights after it. "
    "Where sums other than 1 are meant (a sigmoid), waive the promise: Intent(waived={'normalized': 'why'}).",
    bad="""
from intently import Intent, Mask, Target

def attention(q, k, v):
    return (q @ k.mT).softmax(-1) / q.shape[-1] ** 0.5 @ v

def build():
    return Target(attention, Intent(Mask.full(), scale_is_free=True))
""",
    good="""
from intently import Intent, Mask, Target

def attention(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.full(), scale_is_free=True))
""",
    sources=("Vaswani et al. 2017, section 3.2.1: arXiv:1706.03762",),
    look=look,
)
