"""Gemma 3 with pictures stays causal where its text model is told to see both ways.

Call: `Gemma3ForConditionalGeneration` with `use_bidirectional_attention=True` in its text configuration, text alone,
eager attention or any batch with pads (under sdpa a batch without pads gets no mask, and sees both ways).
Where: models/gemma3/modeling_gemma3.py: `Gemma3TextModel` heeds the flag where it makes its own masks; the model around
it makes them by `create_causal_mask` and hands them over. The text model alone sees both ways.
"""

import sys

import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

torch.manual_seed(0)
text = Gemma3TextConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=64, initializer_range=0.2, use_bidirectional_attention=True,
)  # fmt: skip
vision = SiglipVisionConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
model = Gemma3ForConditionalGeneration(config).eval()
model.set_attn_implementation("eager")
tokens = torch.randint(5, 45, (1, 8))
changed = tokens.clone()
changed[0, -1] = (tokens[0, -1] - 4) % 40 + 5

found = {}
for name, part in (("text model alone", model.model.language_model), ("with pictures", model.model)):
    with torch.no_grad():
        before, after = (part(input_ids=t).last_hidden_state[0, :-1] for t in (tokens, changed))
    found[name] = float((before - after).abs().max())
    print(f"{name}: the last token moves earlier states by {found[name]:.3g} (meant: both ways)")
sys.exit(found["text model alone"] > 0 and found["with pictures"] == 0)
