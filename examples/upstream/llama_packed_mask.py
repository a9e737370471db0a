"""Packed documents see each other as soon as an attention mask of ones is passed beside position_ids that start again.

Call: `position_ids` that restart, and an `attention_mask` of ones, which most collators and tokenizers add. Packing is looked for
only where `attention_mask is None` (masking_utils.py, find_packed_sequence_indices in _preprocess_mask_arguments). Every decoder that
builds its mask with create_causal_mask.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
    initializer_range=0.2,
)  # fmt: skip
model = LlamaForCausalLM(config).eval()
tokens, places = torch.randint(3, 50, (1, 9)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
changed = tokens.clone()
changed[0, 0] = (tokens[0, 0] - 2) % 47 + 3
moved = {}
with torch.no_grad():
    for name, mask in (("no mask", None), ("a mask of ones", torch.ones_like(tokens))):
        before, after = (
            model(t, attention_mask=mask, position_ids=places, use_cache=False).logits for t in (tokens, changed)
        )
        moved[name] = float((before - after)[0, 4:].abs().max())
        print(f"{name}: the first document moves the second by {moved[name]:.3g}")
sys.exit(moved["a mask of ones"] > 1e-3)
