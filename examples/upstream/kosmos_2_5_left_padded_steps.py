"""Kosmos-2.5 generates from left-padded prompts with positions that jump by the number of pads.

Call: `generate` with cache, the default, on a batch whose shorter prompt has pads in front.
Where: models/kosmos2_5/modeling_kosmos2_5.py, Kosmos2_5TextSinusoidalPositionalEmbedding: the prompt's positions are
counted over tokens other than the pad, those of a step from the length of the cache, which holds the pads as well.
"""

import sys

import torch
from transformers import Kosmos2_5TextConfig
from transformers.models.kosmos2_5.modeling_kosmos2_5 import Kosmos2_5TextForCausalLM

torch.manual_seed(0)
config = Kosmos2_5TextConfig(
    vocab_size=60, max_position_embeddings=64, embed_dim=32, layers=2, ffn_dim=64, attention_heads=4,
    pad_token_id=1, bos_token_id=0, eos_token_id=2, init_std=0.3,
)  # fmt: skip
model = Kosmos2_5TextForCausalLM(config).eval()
prompt = torch.randint(3, 60, (1, 5))
padded = torch.cat([torch.ones(1, 3, dtype=torch.long), prompt], 1)
given = {
    "max_new_tokens": 4,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
    "pad_token_id": 1,
    "eos_token_id": None,
}


def logits(ids: torch.Tensor, **more) -> torch.Tensor:
    """What each new token is chosen by; the first two see the same tokens before them."""
    with torch.no_grad():
        return torch.stack(model.generate(ids, attention_mask=ids.ne(1).long(), **given, **more).logits, 1)


shows = False
for use_cache in (True, False):
    alone, behind = logits(prompt, use_cache=use_cache), logits(padded, use_cache=use_cache)
    moved = (alone - behind)[0].abs().amax(-1).tolist()
    print(
        f"use_cache={use_cache}: three pads in front move the logits of the new tokens by "
        + ", ".join(f"{m:.2g}" for m in moved)
    )
    shows |= use_cache and moved[0] < 1e-4 < moved[1]
sys.exit(shows)
