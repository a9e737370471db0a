"""Attention itself: five stages, each a pure function, their composition, and the oracles that hold it to account."""

from __future__ import annotations

from intently.mechanism.aggregate import aggregate, merge_heads
from intently.mechanism.attention import attention, choose_backend, explain_backends, stages
from intently.mechanism.backends.choice import Choice, Verdict
from intently.mechanism.backends.stages import Stages
from intently.mechanism.mask_scale import mask_scale
from intently.mechanism.normalize import normalize
from intently.mechanism.oracle import reference, torch_math
from intently.mechanism.project import project, split_heads
from intently.mechanism.score import score

__all__ = [
    "Choice",
    "Stages",
    "Verdict",
    "aggregate",
    "attention",
    "choose_backend",
    "explain_backends",
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
