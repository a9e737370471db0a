"""Gemma and Gemma 2 with `use_bidirectional_attention=True` stay causal, but for Gemma under sdpa where no mask is built.

Call: `use_bidirectional_attention=True`, documented as attention in both directions. Only `self_attn.is_causal` follows it
(models/gemma/modeling_gemma.py, line 228; models/gemma2/modeling_gemma2.py, line 223); the masks come from `create_causal_mask` all
the same, so that eager attention and every padded batch are causal.
"""

import sys

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GemmaConfig, GemmaForCausalLM

sizes = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "initializer_range": 0.2, "use_bidirectional_attention": True,
}  # fmt: skip
deaf = False
for config_class, model_class, backend in (
    (GemmaConfig, GemmaForCausalLM, "sdpa"),
    (GemmaConfig, GemmaForCausalLM, "eager"),
    (Gemma2Config, Gemma2ForCausalLM, "eager"),
):
    torch.manual_seed(0)
    model = model_class(config_class(**sizes, attn_implementation=backend)).eval()
    tokens = torch.randint(3, 50, (2, 8))
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] - 2) % 47 + 3
    padded = torch.ones(2, 8, dtype=torch.long)
    padded[1, :3] = 0
    for name, mask in (("no mask", None), ("a padded batch", padded)):
        with torch.no_grad():
            before, after = (model(t, attention_mask=mask).logits[0, :-1] for t in (tokens, changed))
        moved = float((before - after).abs().max())
        deaf |= moved == 0
        print(
            f"{model_class.__name__}, {backend}, {name}: the last token moves earlier logits by {moved:.3g} (meant: both ways)"
        )
sys.exit(deaf)
