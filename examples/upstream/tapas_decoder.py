"""TAPAS takes `is_decoder=True`, and sees the tokens that follow.

Call: a model with `is_decoder=True` in its configuration (with `add_cross_attention=True` it even reads a memory).
Where: models/tapas/modeling_tapas.py, TapasModel.forward makes a mask both ways whatever the configuration says.
"""

import sys

import torch
from transformers import TapasConfig, TapasModel

torch.manual_seed(0)
config = TapasConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, is_decoder=True,
    initializer_range=0.3,
)  # fmt: skip
model = TapasModel(config).eval()
ids = torch.randint(1, 50, (1, 8))
changed = ids.clone()
changed[0, -1] = ids[0, -1] % 49 + 1

with torch.no_grad():
    a, b = (model(i).last_hidden_state for i in (ids, changed))
moved = float((a - b)[0, :-1].abs().max())
print(f"is_decoder=True: another last token moves earlier states by {moved:.3g} (0 is right)")
sys.exit(moved > 1e-5)
