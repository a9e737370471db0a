"""Encoder and decoder together: one sequence is read whole, another is written from left to right while consulting it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from intently._typing import Bool, Float
from intently.mechanism.layers.cache import Cache
from intently.mechanism.layers.decoder import Decoder
from intently.mechanism.layers.encoder import Encoder


class EncoderDecoder(nn.Module):
    """`decoder(target, source=encoder(source))`, with the padding of both.

    To write token by token, encode once and let `decoder.read` keep what each block makes of it:
    `memory = model.decoder.read(model.encoder(source, keep=source_keep))`, then
    `model.decoder(step, source=memory, source_keep=source_keep, caches=caches)`.

    Source: Vaswani et al. 2017, figure 1.

    >>> import torch
    >>> from intently.mechanism.layers import CrossAttention, TransformerBlock
    >>> model = EncoderDecoder(
    ...     Encoder([TransformerBlock.classic(16, heads=4, hidden=32)]),
    ...     Decoder([TransformerBlock.classic(16, heads=4, hidden=32, cross=CrossAttention(16, heads=4))]),
    ... )
    >>> model(source=torch.randn(2, 7, 16), target=torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, encoder: Encoder, decoder: Decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(
        self,
        *,
        source: Float[Tensor, "batch source_length model"],
        target: Float[Tensor, "batch length model"],
        source_keep: Bool[Tensor, "batch source_length"] | None = None,
        target_keep: Bool[Tensor, "batch length"] | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Float[Tensor, "batch length model"]:
        """Decode the target in view of the source; both are embedded, and given by name.

        Args:
            source: `[batch, source_length, model]`.
            target: `[batch, length, model]`.
            source_keep, target_keep: True for real tokens.
            caches: of the decoder, one for each of its blocks.
        """
        memory = self.encoder(source, keep=source_keep)
        return self.decoder(target, keep=target_keep, source=memory, source_keep=source_keep, caches=caches)
