"""Attention itself: five stages, each a pure function, their composition, and the oracles that hold it to account."""

from __future__ import annotations

from intently.mechanism.aggregate import aggregate, merge_heads
from intently.mechanism.attention import Choice, Stages, attention, choose_backend, stages
from intently.mechanism.mask_scale import mask_scale
from intently.mechanism.normalize import normalize
from intently.mechanism.oracle import reference, torch_math
from intently.mechanism.project import project, split_heads
from intently.mechanism.score import score

__all__ = [
    "Choice",
    "Stages",
    "aggregate",
    "attention",
    "choose_backend",
    "mask_scale",
    "merge_heads",
    "normalize",
    "project",
    "reference",
    "score",
    "split_heads",
    "stages",
    "torch_math",
]
