"""The encoder: a stack of blocks in which every real token may see every other."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from intently._typing import Bool, Float, Int
from intently.masks import Mask
from intently.mechanism.door import Bias
from intently.mechanism.layers.block import TransformerBlock
from intently.mechanism.positions import positions_from_padding


class Encoder(nn.Module):
    """Blocks one after the other, and a last norm where the model has one (pre-norm models do).

    Args:
        blocks: `TransformerBlock`s without cross-attention.
        norm: applied to the result.

    Source: Vaswani et al. 2017, section 3.1.

    >>> import torch
    >>> encoder = Encoder(TransformerBlock.classic(16, heads=4, hidden=32) for _ in range(2))
    >>> keep = torch.tensor([[True, True, True, False], [True, True, True, True]])
    >>> encoder(torch.randn(2, 4, 16), keep=keep).shape
    torch.Size([2, 4, 16])
    """

    def __init__(self, blocks: Iterable[TransformerBlock], *, norm: nn.Module | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def forward(
        self,
        states: Float[Tensor, "batch length model"],
        *,
        keep: Bool[Tensor, "batch length"] | None = None,
        mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
        bias: Bias | Float[Tensor, "*bias_axes"] | None = None,
        positions: Int[Tensor, "batch length"] | None = None,
    ) -> Float[Tensor, "batch length model"]:
        """Encode a batch of sequences.

        Args:
            states: embedded tokens, `[batch, length, model]`.
            keep: True for real tokens; pads are seen by none, and positions count real tokens only. What comes back
                at a pad means nothing.
            mask: hides further pairs.
            bias: added to the logits of every block.
            positions: for rotary positions; from `keep` when left out.
        """
        if keep is not None:
            positions = positions_from_padding(keep) if positions is None else positions
            kept = keep[
                :, None, None, :
            ]  # broadcast over heads and queries, where a Mask would be built for each block
            if isinstance(mask, Mask):
                mask = mask.matrix(states.shape[-2], device=states.device)
            mask = kept if mask is None else mask & kept
        for block in self.blocks:
            states = block(states, mask=mask, bias=bias, positions=positions)
        return states if self.norm is None else self.norm(states)
