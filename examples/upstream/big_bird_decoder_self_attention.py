"""BigBird's decoder attends to the encoder where it should attend to itself: no token sees another one, and no mask is used.

Call: `is_decoder=True, add_cross_attention=True`, any forward with `encoder_hidden_states`. BigBirdLayer.forward hands these to its
self-attention, too (models/big_bird/modeling_big_bird.py, line 1228), which takes keys and values from them; and it hands
`encoder_attention_mask` to its cross-attention as `attention_mask` (line 1248), which is not read there, so that pads of the encoder
are seen.
"""

import sys

import torch
from transformers import BigBirdConfig, BigBirdForCausalLM

torch.manual_seed(0)
config = BigBirdConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, initializer_range=0.2,
    attention_type="original_full", is_decoder=True, add_cross_attention=True, sep_token_id=2,
)  # fmt: skip
model = BigBirdForCausalLM(config).eval()
tokens, memory = torch.randint(3, 50, (1, 8)), torch.randn(1, 5, 32)
other = tokens.clone()
other[0, 0] = 3 + (other[0, 0] - 2) % 47
kept = torch.tensor([[1, 1, 1, 0, 0]])
padded = memory.clone()
padded[0, 3:] = torch.randn(2, 32)
with torch.no_grad():
    alone = float((model(other).logits - model(tokens).logits)[0, 1:].abs().max())
    first, second = (model(t, encoder_hidden_states=memory).logits for t in (tokens, other))
    beside = float((second - first)[0, 1:].abs().max())
    one, two = (model(tokens, encoder_hidden_states=m, encoder_attention_mask=kept).logits for m in (memory, padded))
    pads = float((two - one).abs().max())
print(f"changing the first token moves later outputs by {alone:.3g} without an encoder, by {beside:.3g} with one")
print(f"changing masked states of the encoder moves outputs by {pads:.3g}")
sys.exit(beside == 0 or pads > 1e-3)
