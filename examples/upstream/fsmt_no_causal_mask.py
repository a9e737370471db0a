"""FSMT's decoder sees the tokens that follow: the causal mask is made only when no cache is used.

Call: default settings (use_cache=True), the whole decoder_input_ids at once, as in scoring or after a prompt.
Where: models/fsmt/modeling_fsmt.py, FSMTModel.forward: `if not use_cache and input_ids is not None: … else:
decoder_padding_mask, causal_mask = None, None`. The decoder's attention_mask is dropped there, too.
"""

import sys

import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration

torch.manual_seed(0)
config = FSMTConfig(
    langs=["en", "de"], src_vocab_size=50, tgt_vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1,
    encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, init_std=0.3,
)  # fmt: skip
model = FSMTForConditionalGeneration(config).eval()
source, target = torch.randint(5, 50, (1, 6)), torch.randint(5, 50, (1, 8))
changed = target.clone()
changed[0, -1] = (target[0, -1] - 4) % 45 + 5

shows = False
for use_cache in (None, False):
    with torch.no_grad():
        a, b = (model(source, decoder_input_ids=ids, use_cache=use_cache).logits for ids in (target, changed))
    moved = float((a - b)[0, :-1].abs().max())
    print(f"use_cache={use_cache}: another last token moves earlier logits by {moved:.3g} (0 is right)")
    shows |= moved > 1e-5
sys.exit(shows)
