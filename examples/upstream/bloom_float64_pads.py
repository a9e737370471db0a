"""In float64 a left-padded row is NaN everywhere under eager attention: two lowest numbers are added, which gives -inf.

Call: `attn_implementation="eager"` (the default of gemma2, vaultgemma, granite_swa, bloom and mpt) in float64, pads on the left. The mask
holds `torch.finfo(dtype).min` in whole rows of pads (masking_utils.py, eager_mask); an ALiBi or a cap of Bloom, MPT and Gemma 2, or
scores below 0, take it to -inf, a row of -inf is NaN after the softmax, and NaN times a weight of 0 reaches the real rows in the
next layer. float32 is spared by rounding.
"""

import sys

import torch
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

llama = LlamaConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
    initializer_range=0.2, attn_implementation="eager",
)  # fmt: skip
bloom = BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2)
shown = False
for config, model_class in ((bloom, BloomForCausalLM), (llama, LlamaForCausalLM)):
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = model_class(config).eval().to(dtype)
        tokens, mask = torch.randint(3, 50, (1, 8)), torch.ones(1, 8, dtype=torch.long)
        mask[0, :3] = 0
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask, use_cache=False).logits[0, 3:]
        bad = int((~torch.isfinite(logits)).any(-1).sum())
        shown |= bad > 0
        print(f"{model_class.__name__}, {dtype}: {bad} of 5 real rows are not finite")
sys.exit(shown)
