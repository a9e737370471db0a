"""LED's decoder sees padded tokens in every cached step: a single new token gets no mask at all.

Call: default settings; decoder_input_ids with pads on the left and their decoder_attention_mask, fed through the
cache (what `generate` does with such prompts). Where: models/led/modeling_led.py, LEDDecoder.forward: `if
input_shape[-1] > 1:  # only create a causal mask when we go over a single token`.
"""

import sys

import torch
from transformers import LEDConfig, LEDForConditionalGeneration

torch.manual_seed(0)
config = LEDConfig(
    vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=16, decoder_ffn_dim=16, attention_window=4, max_encoder_position_embeddings=64, init_std=0.3,
    max_decoder_position_embeddings=64, bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip
model = LEDForConditionalGeneration(config).eval()
source, target = torch.randint(5, 50, (1, 8)), torch.randint(5, 50, (1, 8))
kept = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])

with torch.no_grad():
    whole = model(source, decoder_input_ids=target, decoder_attention_mask=kept).logits[0, -1]
    first = model(source, decoder_input_ids=target[:, :-1], decoder_attention_mask=kept[:, :-1], use_cache=True)
    held = first.get("cache", None) or first.get("past_key_values")
    name = "cache" if "cache" in first else "past_key_values"
    step = model(source, decoder_input_ids=target[:, -1:], decoder_attention_mask=kept, **{name: held}).logits[0, -1]
gap = float((whole - step).abs().max())
print(
    f"the last token through the cache and in one forward: logits differ by {gap:.3g} (of {float(whole.abs().max()):.3g})"
)
sys.exit(gap > 1e-4)
