"""Llama on two packed documents, positions that restart, and a mask of ones."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from intently import Intent, Mask, Target


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
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
        self.model = LlamaForCausalLM(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.cat([torch.arange(5), torch.arange(input_ids.shape[1] - 5)])[None]
        return self.model(input_ids, attention_mask=torch.ones_like(input_ids), position_ids=positions).logits


def build() -> Target:
    torch.manual_seed(0)
    return Target(Packed().eval(), Intent(Mask.parse("causal & documents(5, 7)")), tokens=64, length=12)
