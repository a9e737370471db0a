"""Falcon under sdpa with output_attentions=True is not causal: its bool mask is added to the scores as 0 and 1.

Call: the default attention (sdpa) and `output_attentions=True`. FalconModel builds a bool mask for sdpa; FalconAttention takes its
explicit path when weights are asked for and computes `softmax(scores + attention_mask)` (models/falcon/modeling_falcon.py, line 352).
"""

import sys

import torch
from transformers import FalconConfig, FalconForCausalLM

torch.manual_seed(0)
config = FalconConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2)
model = FalconForCausalLM(config).eval()
tokens = torch.randint(50, (1, 8))
changed = tokens.clone()
changed[0, -1] = (tokens[0, -1] + 1) % 50

moved = {}
with torch.no_grad():
    for asked in (False, True):
        before, after = (model(t, output_attentions=asked).logits[0, :-1] for t in (tokens, changed))
        moved[asked] = float((before - after).abs().max())
        print(f"output_attentions={asked}: the last token moves earlier logits by {moved[asked]:.3g}")
    weights = model(tokens, output_attentions=True).attentions[0][0, 0]
print(f"weight of query 0 on key 7: {float(weights[0, 7]):.3g}")
sys.exit(moved[True] > 1e-3)
