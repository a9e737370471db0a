"""BLT lets pads on the left into real outputs: its patcher and its global transformer never get the attention mask.

Call: default settings, a left-padded row with its `attention_mask`. BltModel.forward calls the patcher without a mask and builds the
global mask with `attention_mask=None` (models/blt/modeling_blt.py, BltModel.forward), and patches mix pads with tokens, so that
what stands in the pads moves where patches begin and what they hold.
"""

import sys

import torch
from transformers import BltConfig, BltForCausalLM

torch.manual_seed(0)
part = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 64, "initializer_range": 0.2, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
config = BltConfig(
    vocab_size=50, initializer_range=0.2, encoder_hash_byte_group_size=[3],
    encoder_hash_byte_group_vocab=50, encoder_hash_byte_group_nb_functions=1, cross_attn_k=1, max_position_embeddings=64,
    patcher_config=part, encoder_config={**part, "cross_attn_k": 1, "hidden_size_global": 32},
    decoder_config={**part, "cross_attn_k": 1, "hidden_size_global": 32}, global_config=part, tie_word_embeddings=False,
)  # fmt: skip
model = BltForCausalLM(config).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
tokens, mask = torch.randint(3, 50, (1, 10)), torch.ones(1, 10, dtype=torch.long)
mask[0, :4] = 0
changed = tokens.clone()
changed[0, :4] = (tokens[0, :4] + 7) % 47 + 3
with torch.no_grad():
    before, after = (model(t, attention_mask=mask, use_cache=False).logits[0, -1] for t in (tokens, changed))
moved = float((before - after).abs().max())
print(
    f"overwriting 4 hidden pads on the left moves the logits of the sixth real byte by {moved:.3g}, at logits up to {float(before.abs().max()):.3g}"
)
sys.exit(moved > 1e-3)
