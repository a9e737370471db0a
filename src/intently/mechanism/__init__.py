"""Attention itself: five stages, each a pure function, their composition, the oracles that hold it to account, and layers.

Forms, positions, steadying and the ONNX backend have packages of their own beside these names.
"""

from __future__ import annotations

from intently.mechanism.aggregate import aggregate, merge_heads
from intently.mechanism.attention import attention, choose_backend, explain_backends, stages
from intently.mechanism.backends.choice import Choice, Verdict
from intently.mechanism.backends.stages import Stages
from intently.mechanism.layers import (
    AdditiveAttention,
    Attend,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    GraphAttention,
    GrowingCache,
    MultiHeadAttention,
    NeighborhoodAttention,
    PreallocatedCache,
    SlidingCache,
    TransformerBlock,
    look,
)
from intently.mechanism.mask_scale import mask_scale
from intently.mechanism.normalize import normalize
from intently.mechanism.oracle import reference, torch_math
from intently.mechanism.project import project, split_heads
from intently.mechanism.score import score

__all__ = [
    "AdditiveAttention",
    "Attend",
    "Choice",
    "CrossAttention",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "GraphAttention",
    "GrowingCache",
    "MultiHeadAttention",
    "NeighborhoodAttention",
    "PreallocatedCache",
    "SlidingCache",
    "Stages",
    "TransformerBlock",
    "Verdict",
    "aggregate",
    "attention",
    "choose_backend",
    "explain_backends",
    "look",
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
