"""Reformer's LSH attention drops the attention mask in cached steps: hidden pads are seen again.

Call: a cached step after a prompt with pads in front, with the whole mask passed as before.
Where: models/reformer/modeling_reformer.py, LSHSelfAttention.forward with past_buckets_states: the states kept there
are read without a mask (a single query is taken to need none).
"""

import sys

import torch
from transformers import ReformerConfig, ReformerModelWithLMHead

torch.manual_seed(0)
config = ReformerConfig(
    vocab_size=50, hidden_size=32, attn_layers=["local", "lsh"], num_attention_heads=2, attention_head_size=16, feed_forward_size=32,
    is_decoder=True, axial_pos_embds=False, max_position_embeddings=64, initializer_range=0.3, num_buckets=4,
    pad_token_id=0, eos_token_id=2,
)  # fmt: skip
model = ReformerModelWithLMHead(config).eval()
ids = torch.randint(3, 50, (1, 9))
mask = torch.ones_like(ids)
mask[0, :3] = 0


def step(first: torch.Tensor) -> torch.Tensor:
    """The logits of the last token, fed behind the others through the cache."""
    with torch.no_grad():
        kept = model(first[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        held = kept.past_buckets_states
        return model(first[:, -1:], attention_mask=mask, past_buckets_states=held, use_cache=True).logits


other = ids.clone()
other[0, :3] = (ids[0, :3] - 2) % 47 + 3
with torch.no_grad():
    whole = [
        float((model(ids, attention_mask=mask).logits - model(other, attention_mask=mask).logits)[0, -1].abs().max())
    ]
moved = float((step(ids) - step(other)).abs().max())
print(
    f"other hidden pads move the last logits by {whole[0]:.3g} in one forward, by {moved:.3g} in a cached step (0 is right)"
)
sys.exit(whole[0] < 1e-5 < moved)
