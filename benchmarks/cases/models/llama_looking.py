"""Llama under sdpa: asked for its weights without a mask, it takes the eager path and adds no triangle."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from intently import Target


def build() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    return Target(LlamaForCausalLM(config).eval())
