"""Mllama's text model with the states of a picture and no mask for them."""

import torch
from transformers import MllamaForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from intently import Target


def build() -> Target:
    torch.manual_seed(0)
    config = MllamaTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        cross_attention_layers=[1],
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = MllamaForCausalLM(config).eval()
    for layer in model.modules():  # the gates of the cross-attention start at zero, and let nothing through
        for name, parameter in layer.named_parameters(recurse=False):
            if "gate" in name and parameter.numel() == 1:
                torch.nn.init.constant_(parameter, 0.7)
    return Target(model)
