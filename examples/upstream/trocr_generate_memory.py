"""A decoder generates from its own keys mixed with an encoder's: generate hands it one cache for self- and cross-attention.

Call: `generate(input_ids, encoder_hidden_states=...)` of a bare decoder, whose configuration says `is_encoder_decoder=False`: generate
makes a DynamicCache for it (generation/utils.py, `_prepare_cache_for_generation`), and the decoder's cross-attention stores its keys
in the same layers as self-attention wherever the cache is no EncoderDecoderCache (models/trocr/modeling_trocr.py, TrOCRAttention). Also: bart and the decoders
copied from it; BERT's raises an AttributeError.
"""

import sys

import torch
from transformers import BartConfig, BartForCausalLM, TrOCRConfig, TrOCRForCausalLM

sizes = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "init_std": 0.2,
    "eos_token_id": 2,
}
models = (
    TrOCRForCausalLM(TrOCRConfig(vocab_size=50, cross_attention_hidden_size=32, **sizes)),
    BartForCausalLM(BartConfig(vocab_size=50, is_decoder=True, is_encoder_decoder=False, **sizes)),
)
shown = False
for model in models:
    torch.manual_seed(0)
    model.eval()
    tokens, memory = torch.randint(3, 50, (1, 6)), torch.randn(1, 9, 32)
    with torch.no_grad():
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), encoder_hidden_states=memory, max_new_tokens=3, min_new_tokens=3,
            do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        whole = model(made.sequences[:, :-1], encoder_hidden_states=memory, use_cache=False).logits[0, -3:]
    gaps = (torch.cat(made.logits) - whole).abs().amax(-1)
    shown |= float(gaps.max()) > 1e-3
    print(f"{type(model).__name__}: logits of 3 new tokens against one forward", [f"{float(g):.2g}" for g in gaps])
sys.exit(shown)
