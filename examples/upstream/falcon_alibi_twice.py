"""Falcon with ALiBi adds the slopes twice wherever it computes the scores itself.

Call: `alibi=True`, eager attention; also sdpa with `output_attentions=True`.
Where: models/falcon/modeling_falcon.py: FalconModel.forward adds alibi / √width to the mask for every backend, and
FalconAttention adds alibi to the scores once more before the same mask.
"""

import sys

import torch
from transformers import FalconConfig, FalconForCausalLM

torch.manual_seed(0)
config = FalconConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, alibi=True, initializer_range=0.3
)
model = FalconForCausalLM(config).eval()
attention = model.transformer.h[0].self_attention
with torch.no_grad():
    attention.query_key_value.weight[:32] = 0  # no queries: the slopes alone are left of the logits
ids = torch.randint(1, 50, (1, 6))

with torch.no_grad():
    plain, asked = (model(ids, output_attentions=asking) for asking in (False, True))
weights = asked.attentions[0][0]
found = torch.log(weights[:, -1, 1] / weights[:, -1, 0])  # one step of distance
meant = torch.tensor([2.0**-4, 2.0**-8]) / attention.head_dim**0.5
for head, (a, b) in enumerate(zip(found.tolist(), meant.tolist(), strict=True)):
    print(f"head {head}: a slope of {a:.4g}, where {b:.4g} is meant")
print(f"logits with and without output_attentions differ by {float((plain.logits - asked.logits).abs().max()):.3g}")
sys.exit(torch.allclose(found, 2 * meant, rtol=1e-3))
