"""Jamba forgets its state when more than one token follows a cache.

Call: a prompt in two chunks through one cache, as chunked prefill and assisted generation do; default settings.
Where: models/jamba/modeling_jamba.py, JambaMambaMixer: the convolution's and the recurrence's states are read only
where `seq_len == 1`; a longer chunk starts from zeros, and overwrites what was kept.
"""

import sys

import torch
from transformers import JambaConfig, JambaForCausalLM

torch.manual_seed(0)
config = JambaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2,
    mamba_d_state=8, mamba_dt_rank=4, initializer_range=0.3, pad_token_id=0,
)  # fmt: skip
model = JambaForCausalLM(config).eval()
ids = torch.randint(1, 50, (1, 9))

shows = False
for sizes in ((9,), (3, 6), (8, 1)):
    cache, found = None, []
    with torch.no_grad():
        whole = model(ids).logits
        for piece in ids.split(sizes, 1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
    moved = float((torch.cat(found, 1) - whole).abs().max())
    print(f"in pieces of {sizes}: logits differ from one forward by {moved:.3g} (0 is right)")
    shows |= sizes == (3, 6) and moved > 1e-3
sys.exit(shows)
