"""Phi3 with a sliding window under sdpa."""

import torch
from transformers import Phi3Config, Phi3ForCausalLM

from intently import Intent, Mask, Target


def build() -> Target:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=4,
        initializer_range=0.3,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return Target(Phi3ForCausalLM(config).eval(), Intent(Mask.parse("causal & window(4)")))
