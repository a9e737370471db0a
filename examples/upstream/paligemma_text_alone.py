"""PaliGemma on text without token_type_ids sees both ways or only the past, by backend and by whether anything in the batch is padded.

Call: default settings, `input_ids` alone, or with an `attention_mask`. The text model has `use_bidirectional_attention=True`, so that
its calls are not causal where no mask is built (sdpa, nothing padded); where one is, `create_masks_for_generate` makes a causal one
(models/paligemma/modeling_paligemma.py, create_masks_for_generate; models/gemma/modeling_gemma.py, line 228).
"""

import sys

import torch
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

text = {
    "model_type": "gemma", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "initializer_range": 0.2,
}  # fmt: skip
vision = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
outputs = {}
for backend in ("sdpa", "eager"):
    torch.manual_seed(0)
    config = PaliGemmaConfig(
        text_config=text, vision_config=vision, projection_dim=32, image_token_index=49, attn_implementation=backend
    )
    model = PaliGemmaForConditionalGeneration(config).eval()
    tokens, mask = torch.randint(3, 48, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0  # the second sample is shorter, so that the first has a padded mate
    with torch.no_grad():
        outputs[backend, "alone"] = model(tokens[:1], attention_mask=mask[:1]).logits[0]
        outputs[backend, "in a padded batch"] = model(tokens, attention_mask=mask).logits[0]
reference = outputs["sdpa", "alone"]
gaps = {k: float((v - reference).abs().max()) for k, v in outputs.items()}
for (backend, where), gap in gaps.items():
    print(f"{backend}, {where}: the logits of the same 8 tokens differ from sdpa alone by {gap:.3g}")
sys.exit(max(gaps.values()) > 1e-3)
