"""The ONNX operators `Attention` and `RotaryEmbedding` through the five stages, and a backend for ONNX's own test runner."""

from __future__ import annotations

from intently.mechanism.onnx.attention_operator import AttentionOutputs, attention_op
from intently.mechanism.onnx.backend import Backend, Prepared
from intently.mechanism.onnx.rotary_operator import rotary_embedding_op

__all__ = ["AttentionOutputs", "Backend", "Prepared", "attention_op", "rotary_embedding_op"]
