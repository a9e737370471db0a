"""A decoder of x-transformers with flash attention, decoding through its cache."""

import torch
from torch import Tensor, nn
from x_transformers import Decoder, TransformerWrapper

from intently import Intent, Mask, Target


class Cached(nn.Module):
    """Logits for the tokens given, and the cache: with a cache, `input_ids` holds the new tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TransformerWrapper(
            num_tokens=64,
            max_seq_len=64,
            attn_layers=Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=True),
        )

    def forward(self, input_ids: Tensor, past: object = None) -> tuple[Tensor, object]:
        if past is None:
            logits, made = self.net(input_ids, return_intermediates=True)
            return logits, (input_ids, made)
        before, held = past
        whole = torch.cat([before, input_ids], 1)
        logits, made = self.net(whole, cache=held, return_intermediates=True)
        return logits[:, -input_ids.shape[1] :], (whole, made)


def build() -> Target:
    torch.manual_seed(0)
    return Target(Cached().eval(), Intent(Mask.causal()), tokens=64)
