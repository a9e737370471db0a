"""RoBERTa's `generate` counts positions from 0, where the model itself counts from the pad's id plus 1.

Call: `RobertaForCausalLM` with `is_decoder=True`, default `generate`, no pads anywhere.
Where: generation hands over `position_ids` made of the attention mask, from 0 on; models/roberta/modeling_roberta.py,
RobertaEmbeddings, makes them itself only where none are given, from `padding_idx + 1` on, as in training. The first
tokens then stand at the places of a pad. CamemBERT, XLM-RoBERTa (XL), X-MOD, Data2VecText and RoBERTa-PreLayerNorm alike.
"""

import sys

import torch
from transformers import RobertaConfig, RobertaForCausalLM

torch.manual_seed(0)
config = RobertaConfig(
    vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, is_decoder=True,
    max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=2, initializer_range=0.3,
)  # fmt: skip
model = RobertaForCausalLM(config).eval()
prompt = torch.randint(3, 60, (1, 5))

with torch.no_grad():
    forward = model(prompt).logits[:, -1]
    from_zero = model(prompt, position_ids=torch.arange(5)[None]).logits[:, -1]
    made = model.generate(
        prompt, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None
    ).logits[0]
apart, same = (float((made - other).abs().max()) for other in (forward, from_zero))
print(
    f"logits of generate differ from those of a forward by {apart:.3g} (0 is right), with positions from 0 on by {same:.3g}"
)
sys.exit(apart > 1e-3 and same < 1e-4)
