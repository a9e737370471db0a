"""GPT-2 with cross-attention: the mask of the encoder's states is thrown away."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from intently import Target


def build() -> Target:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        add_cross_attention=True,
        initializer_range=0.3,
    )
    return Target(GPT2LMHeadModel(config).eval())
