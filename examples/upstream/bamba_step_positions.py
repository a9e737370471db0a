"""Bamba counts the positions of a cached step from 0: without position_ids every new token stands at the first place.

Call: default settings, `model(new_tokens, cache=...)` without `position_ids` (generate passes them). BambaModel.forward makes
`position_ids = torch.arange(length)` and does not ask the cache how much it holds (models/bamba/modeling_bamba.py, line 973), as
other decoders do.
"""

import sys

import torch
from transformers import BambaConfig, BambaForCausalLM

torch.manual_seed(0)
config = BambaConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, attn_layer_indices=[0, 1], num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, initializer_range=0.2,
)  # fmt: skip
model = BambaForCausalLM(config).eval()
tokens = torch.randint(3, 50, (1, 8))
with torch.no_grad():
    whole = model(tokens).logits[0, -1]
    gaps = {}
    for name, place in (("without position_ids", None), ("with position_ids", torch.tensor([[7]]))):
        first = model(tokens[:, :-1], use_cache=True)
        step = model(tokens[:, -1:], cache=first.cache, use_cache=True, position_ids=place).logits[0, -1]
        gaps[name] = float((step - whole).abs().max())
        print(f"last token as a step {name}: {gaps[name]:.3g} from the whole forward")
sys.exit(gaps["without position_ids"] > 1e-3)
