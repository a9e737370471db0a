"""AIMv2's text model is causal when it is given a mask, and sees both ways when it is given none.

Call: default settings, a batch without pads, once with no attention_mask and once with one of ones (which sdpa drops:
there it sees both ways as well, and is causal as soon as one sample of the batch is padded).
Where: models/aimv2/modeling_aimv2.py, Aimv2TextModel.forward: `if attention_mask is not None: create_causal_mask(…)`,
with `is_causal = False` in its attention.
"""

import sys

import torch
from transformers import Aimv2TextConfig, Aimv2TextModel

torch.manual_seed(0)
config = Aimv2TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32, eos_token_id=63,
)  # fmt: skip
config._attn_implementation = "eager"
model = Aimv2TextModel(config).eval()

ids = torch.randint(1, 60, (1, 8))
later = ids.clone()
later[0, -1] = 61
ones = torch.ones_like(ids)


def moved(**given: torch.Tensor) -> float:
    """How far the first output moves when the last token is another."""
    with torch.no_grad():
        a, b = (model(input_ids=i, **given).last_hidden_state for i in (ids, later))
    return float((a - b)[0, 0].abs().max())


without, with_ones = moved(), moved(attention_mask=ones)
print(f"another last token moves the first output by {without:.3g} without a mask, by {with_ones:.3g} with one of ones")
sys.exit(without > 1e-6 and with_ones < 1e-6)
