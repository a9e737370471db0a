"""MRA's attention is silently zero where its CUDA kernel is not loaded: no token sees any other.

Call: default settings on any machine without the compiled kernel (CPU, or no compiler); no error is raised. Where:
models/mra/modeling_mra.py, mra2_attention: `if mra_cuda_kernel is None: return torch.zeros_like(query)`.
"""

import sys

import torch
from transformers import MraConfig, MraModel

torch.manual_seed(0)
config = MraConfig(
    vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=64, initializer_range=0.3,
)  # fmt: skip
model = MraModel(config).eval()
tokens = torch.randint(5, 50, (1, 64))
changed = tokens.clone()
changed[0, 1:] = torch.randint(5, 50, (63,))

with torch.no_grad():
    a, b = (model(ids).last_hidden_state for ids in (tokens, changed))
moved = float((a - b)[0, 0].abs().max())
print(f"63 other tokens move the output of the first by {moved:.3g} (not 0 is right)")
sys.exit(moved == 0)
