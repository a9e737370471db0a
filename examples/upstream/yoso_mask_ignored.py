"""YOSO sees its pads: a key mask of 0 and 1 is read as one of 0 and -10000, so that both become 1.

Call: default settings, any attention_mask with zeros. Where: models/yoso/modeling_yoso.py, YosoSelfAttention.forward:
`attention_mask = 1.0 + attention_mask / 10000.0`, then `.int()`, while YosoModel.forward hands the mask over as it came.
"""

import sys

import torch
from transformers import YosoConfig, YosoModel

torch.manual_seed(0)
config = YosoConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
    initializer_range=0.3, max_position_embeddings=40,
)  # fmt: skip
model = YosoModel(config).eval()
tokens = torch.randint(5, 50, (1, 8))
kept = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
changed = torch.where(kept == 1, tokens, (tokens - 4) % 45 + 5)

with torch.no_grad():
    a, b = (model(ids, attention_mask=kept).last_hidden_state[0, :5] for ids in (tokens, changed))
    bare = model(tokens).last_hidden_state[0, :5]
    short = model(tokens[:, :5]).last_hidden_state[0]
print(f"other tokens in the pads move real outputs by {float((a - b).abs().max()):.3g} (0 is right)")
print(
    f"with and without the mask: {float((a - bare).abs().max()):.3g}; padded and alone: {float((a - short).abs().max()):.3g}"
)
sys.exit(bool((a - b).abs().max() > 1e-4))
