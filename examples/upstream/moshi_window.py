"""Moshi ignores `sliding_window`: every query sees all earlier keys, however far.

Call: default settings, a sequence longer than the window. MoshiModel.forward builds its mask with `create_causal_mask`
(models/moshi/modeling_moshi.py, line 778) and never reads the window; MoshiDecoderLayer only stores it (line 511). A cache
does know the window, so that steps differ from the whole forward beyond it.
"""

import sys

import torch
from transformers import DynamicCache, MoshiConfig, MoshiForCausalLM

torch.manual_seed(0)
config = MoshiConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, ffn_dim=64, sliding_window=4,
    initializer_range=0.2,
)  # fmt: skip
model = MoshiForCausalLM(config).eval()
tokens = torch.randint(50, (1, 12))
changed = tokens.clone()
changed[0, 0] = (tokens[0, 0] + 1) % 50

with torch.no_grad():
    whole = model(tokens).logits[0]
    moved = float((model(changed).logits[0, -1] - whole[-1]).abs().max())
    cache = DynamicCache(config=config)
    steps = torch.cat([model(tokens[:, i : i + 1], cache=cache, use_cache=True).logits[0] for i in range(12)])
print(f"one layer, window 4: the first of 12 tokens moves the last logits by {moved:.3g}")
print("steps through the cache against the whole forward:", [f"{float(g):.2g}" for g in (steps - whole).abs().amax(-1)])
sys.exit(moved > 1e-4)
