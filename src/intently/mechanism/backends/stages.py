"""The backend that keeps every stage: five pure functions composed, with the whole plane of scores in memory."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from intently._typing import Float
from intently.mechanism.aggregate import aggregate
from intently.mechanism.door import Inputs
from intently.mechanism.mask_scale import mask_scale
from intently.mechanism.normalize import normalize
from intently.mechanism.score import score


class Stages(NamedTuple):
    """What each stage hands on: all but `output` are `[*batch, heads, query, key]`."""

    scores: Float[Tensor, "*lead query key"]  # q·k, not scaled
    logits: Float[Tensor, "*lead query key"]  # after scale, softcap, bias and mask; -inf where hidden
    weights: Float[Tensor, "*lead query key"]  # after softmax, before dropout
    output: Float[Tensor, "*lead query value_width"]


def every_stage(inputs: Inputs) -> Stages:
    """All that the five stages hand on."""
    scores = score(inputs.query, inputs.key)
    logits = mask_scale(scores, scale=inputs.scale, softcap=inputs.softcap, bias=inputs.added(), mask=inputs.seen())
    weights = normalize(logits, inputs.sink)
    return Stages(scores, logits, weights, aggregate(weights, inputs.value, dropout=inputs.dropout))


def by_stages(inputs: Inputs) -> Tensor:
    """The output of the last stage."""
    return every_stage(inputs).output
