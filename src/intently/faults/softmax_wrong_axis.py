"""Fault `softmax-wrong-axis`: the weights sum to 1 over queries, heads or samples instead of over keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from intently.edits import softmax_over_keys
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look
from intently.promises.normalized import TOLERANCE, deviation
from intently.report import Table, Witness


def look(seen: Examination) -> Iterator[Suspicion]:
    for each in seen.looks():
        site = each.site
        if (
            site.normalized_over in ("keys", "nothing")
            or not seen.breaks("normalized", each.condition)
            or deviation(site) <= TOLERANCE
        ):
            continue
        yield Suspicion(
            fault=FAULT,
            promise="normalized",
            site=site,
            message=f"the weights sum to 1 over {site.normalized_over}; over the keys a row sums to {range_of(site.row_sum)}",
            witness=witness(each),
            repair=lambda s, batch: softmax_over_keys()(s),
            condition=each.condition.name,
        )


def range_of(sums: torch.Tensor | None) -> str:
    """The smallest and the largest sum in words."""
    if sums is None:
        return "something else"
    return f"{float(sums.min()):.3g} to {float(sums.max()):.3g}"


def witness(each: Look) -> Witness:
    """The row sums of one head, and some of the weights that they sum."""
    tensors = each.site.tensors
    sums = each.site.row_sum
    assert sums is not None
    sentence = f"row sums over the keys of sample 0, head 0: {', '.join(f'{float(s):.3g}' for s in sums[0, 0][:5])}"
    if tensors is None:
        return Witness(sentence)
    weights = tensors.weights[0, 0][:4, :6].double()
    columns = (*(f"key {j}" for j in range(weights.shape[1])), "sum")
    rows = tuple(
        (f"query {i}", (*(round(float(w), 4) for w in row), round(float(sums[0, 0, i]), 4)))
        for i, row in enumerate(weights)
    )
    marked = tuple((i, len(columns) - 1) for i in range(len(rows)))
    return Witness(sentence, Table("sample 0, head 0", columns, rows, marked))


FAULT = Fault(
    name="softmax-wrong-axis",
    stage="normalize",
    promises=("normalized", "causal"),
    severity="error",
    summary="The softmax runs over queries, heads or samples instead of over keys.",
    symptom="Changing one query moves another query's output; outputs grow with the length.",
    why_silent="Shapes fit, gradients flow, and a diffusion model with it reached the same FID.",
    fix="softmax over the axis of the keys, which is the one that the product with the values sums over.",
    bad="""
from intently import Intent, Mask, Target

def attention(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-2) @ v

def build():
    return Target(attention, Intent(Mask.full()))
""",
    good="""
from intently import Intent, Mask, Target

def attention(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

def build():
    return Target(attention, Intent(Mask.full()))
""",
    sources=("labmlai/annotated_deep_learning_paper_implementations#146",),
    look=look,
)
