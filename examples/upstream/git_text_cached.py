"""GIT on text alone with a key mask fails or goes wrong in cached steps: the mask is widened by picture tokens that are not there.

Call: `GitForCausalLM` without `pixel_values`, with `attention_mask`, in a step through the cache (as `generate` makes it). GitModel.forward
puts `image_patch_tokens` ones before the mask whenever a cache is not empty (models/git/modeling_git.py, lines 840 to 848).
"""

import sys

import torch
from transformers import GitConfig, GitForCausalLM

torch.manual_seed(0)
vision = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
config = GitConfig(
    vision_config=vision, vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    initializer_range=0.2,
)  # fmt: skip
model = GitForCausalLM(config).eval()
tokens, mask = torch.randint(3, 50, (1, 8)), torch.ones(1, 8, dtype=torch.long)
mask[0, :3] = 0  # pads on the left, as generate wants them

with torch.no_grad():
    whole = model(tokens, attention_mask=mask).logits[:, -1]
    first = model(tokens[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
    try:
        step = model(tokens[:, -1:], attention_mask=mask, cache=first.cache, use_cache=True).logits[:, -1]
    except Exception as error:
        print(f"the step raises {type(error).__name__}: {error}")
        sys.exit(1)
gap = float((step - whole).abs().max())
print(f"step through the cache against the whole forward: {gap:.3g} at logits up to {float(whole.abs().max()):.3g}")
sys.exit(gap > 1e-3)
