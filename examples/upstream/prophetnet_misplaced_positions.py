"""ProphetNet's predicting stream adds position biases made from other tokens, later ones too: two axes are swapped.

Call: default settings; the logits of any forward of two tokens or more (one token alone, as in cached steps, is not
affected, so that generation and scoring disagree). Where: models/prophetnet/modeling_prophetnet.py,
ProphetNetNgramSelfAttention.get_predict_relative_pos_embeddings: `rel_pos_embeddings.permute(0, 2, 1, 4, 3)` puts
tokens before n-grams, and the result is read as [batch, ngram, heads, token].
"""

import sys

import torch
from transformers import ProphetNetConfig, ProphetNetForConditionalGeneration

torch.manual_seed(0)
config = ProphetNetConfig(
    vocab_size=50, hidden_size=16, num_encoder_layers=1, num_decoder_layers=2, num_encoder_attention_heads=2,
    num_decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, init_std=0.3,
)  # fmt: skip
model = ProphetNetForConditionalGeneration(config).eval()
source, target = torch.randint(5, 50, (1, 6)), torch.randint(5, 50, (1, 8))
changed = target.clone()
changed[0, 2] = (target[0, 2] - 4) % 45 + 5

with torch.no_grad():
    a, b = (model(source, decoder_input_ids=ids, use_cache=False).logits for ids in (target, changed))
    short = model(source, decoder_input_ids=target[:, :1], use_cache=False).logits
moved = float((a - b)[0, :2].abs().max())
print(f"another third token moves the logits of the first two by {moved:.3g} (0 is right)")
print(f"the first logits alone and followed by 7 tokens differ by {float((a[:, :1] - short).abs().max()):.3g}")
sys.exit(moved > 1e-5)
