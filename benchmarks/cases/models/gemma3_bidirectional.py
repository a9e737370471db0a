"""Gemma3's text model with `use_bidirectional_attention`, as an embedding model uses it."""

import torch
from transformers import Gemma3TextConfig, Gemma3TextModel

from intently import Intent, Mask, Target


def build() -> Target:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=64,
        initializer_range=0.3,
        use_bidirectional_attention=True,
        attn_implementation="sdpa",
    )
    return Target(Gemma3TextModel(config).eval(), Intent(Mask.full()))
