"""Mllama's cross-attention without a mask is causal under sdpa: text token i sees only the first i + 1 places of the picture.

Call: `cross_attention_states` (or `pixel_values`) without `cross_attention_mask`, the default attention (sdpa). MllamaTextCrossAttention
does not say `is_causal=False`, so `sdpa_attention_forward` takes its own default, True, wherever no mask is given
(models/mllama/modeling_mllama.py, MllamaTextCrossAttention; integrations/sdpa_attention.py).
"""

import sys

import torch
from transformers.models.mllama import MllamaForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

outputs, moved = {}, {}
for backend in ("sdpa", "eager"):
    torch.manual_seed(0)
    config = MllamaTextConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        cross_attention_layers=[1], initializer_range=0.2, pad_token_id=0, attn_implementation=backend,
    )  # fmt: skip
    model = MllamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("gate"):
            torch.nn.init.ones_(parameter)
    tokens, states = torch.randint(3, 50, (1, 6)), torch.randn(1, 9, 32)
    changed = states.clone()
    changed[0, -1] += 1
    with torch.no_grad():
        outputs[backend] = model(tokens, cross_attention_states=states).logits
        moved[backend] = float((model(tokens, cross_attention_states=changed).logits - outputs[backend]).abs().max())
    print(f"{backend}: the last of 9 places moves the logits of 6 tokens by {moved[backend]:.3g}")
print(f"sdpa against eager: {float((outputs['sdpa'] - outputs['eager']).abs().max()):.3g}")
sys.exit(moved["sdpa"] == 0)
