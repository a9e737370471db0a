"""RWKV takes an attention mask and does nothing with it: pads in front of a prompt change what follows.

Call: default settings, a batch padded on the left, as its tokenizer makes it, with the mask beside it.
Where: models/rwkv/modeling_rwkv.py, RwkvModel.forward: `attention_mask` is an argument and is read nowhere (the
documentation of the argument says so; the call does not).
"""

import sys

import torch
from transformers import RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
config = RwkvConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    attention_hidden_size=32,
    intermediate_size=64,
    initializer_range=0.3,
)
model = RwkvForCausalLM(config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
prompt = torch.randint(1, 50, (1, 6))
padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], 1)
with torch.no_grad():
    alone = model(prompt).logits
    behind = model(padded, attention_mask=padded.ne(0).long()).logits[:, 3:]
moved = float((alone - behind).abs().max())
print(f"three hidden pads in front move the logits of the prompt by {moved:.3g} (0 is right)")
sys.exit(moved > 1e-4)
