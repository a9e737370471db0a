"""The decoder: a stack of blocks in which no token sees a later one, with caches to continue and a source to consult."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from intently._typing import Bool, Float, Int
from intently.masks import Mask
from intently.mechanism.door import Bias
from intently.mechanism.layers.block import TransformerBlock
from intently.mechanism.layers.cache import Cache
from intently.mechanism.layers.cross import CrossAttention, Source
from intently.mechanism.positions import positions_from_padding


class Decoder(nn.Module):
    """Blocks one after the other, each under a causal mask whether its own `attend` holds one or not.

    Args:
        blocks: `TransformerBlock`s, with cross-attention where there is a source to consult.
        norm: applied to the result.

    Source: Vaswani et al. 2017, section 3.1.

    >>> import torch
    >>> from intently.mechanism.layers import GrowingCache
    >>> decoder = Decoder(TransformerBlock.gated(16, heads=4, hidden=32) for _ in range(2))
    >>> states, caches = torch.randn(1, 5, 16), [GrowingCache() for _ in decoder.blocks]
    >>> prefill, step = decoder(states[:, :4], caches=caches), decoder(states[:, 4:], caches=caches)
    >>> torch.allclose(torch.cat([prefill, step], dim=1), decoder(states), atol=1e-5)
    True
    """

    def __init__(self, blocks: Iterable[TransformerBlock], *, norm: nn.Module | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def read(self, source: Float[Tensor, "batch key source_model"]) -> list[Source]:
        """Keys and values that each block makes of a source, to be passed as `source` in every step.

        Raises:
            ValueError: a block has no cross-attention to read with.
        """
        read = []
        for number, block in enumerate(self.blocks):
            cross = block.cross
            if not isinstance(cross, CrossAttention):
                raise ValueError(
                    f"Decoder: block {number} has no cross-attention, so there is nothing to read a source"
                )
            read.append(cross.read(source))
        return read

    def forward(
        self,
        states: Float[Tensor, "batch length model"],
        *,
        keep: Bool[Tensor, "batch total"] | None = None,
        mask: Mask | None = None,
        bias: Bias | None = None,
        positions: Int[Tensor, "batch length"] | None = None,
        caches: Sequence[Cache] | None = None,
        source: Float[Tensor, "batch key source_model"] | Sequence[Source] | None = None,
        source_keep: Bool[Tensor, "batch key"] | None = None,
    ) -> Float[Tensor, "batch length model"]:
        """Decode a batch of sequences, or continue them.

        Args:
            states: embedded tokens, `[batch, length, model]`; with caches the new ones only.
            keep: True for real tokens, of the whole sequence so far: cached ones and new ones.
            mask: hides further pairs, spoken of the whole sequence.
            bias: added to the logits of every block's self-attention, a function of positions in the whole sequence.
            positions: of the new tokens, for rotary positions; from `keep` when left out.
            caches: one for each block.
            source: what cross-attention reads: states, or what `read` made of them.
            source_keep: True for real source positions.

        Raises:
            ValueError: caches or a `keep` that do not fit.
        """
        if caches is not None and len(caches) != len(self.blocks):
            raise ValueError(f"Decoder: {len(caches)} caches for {len(self.blocks)} blocks; one each is needed")
        before = caches[0].length if caches else 0
        mask = Mask.causal() if mask is None else Mask.causal() & mask
        if keep is not None:
            total = before + states.shape[-2]
            if keep.shape[-1] != total:
                raise ValueError(
                    f"Decoder: keep speaks of {keep.shape[-1]} tokens; {before} cached and {states.shape[-2]} new ones "
                    f"make {total}. It grows with the sequence: append a column for every step"
                )
            mask &= Mask.padding(keep=keep)
            positions = positions_from_padding(keep, cached=before) if positions is None else positions
        source_mask = None if source_keep is None else source_keep[:, None, None, :]
        for number, block in enumerate(self.blocks):
            states = block(
                states,
                mask=mask,
                bias=bias,
                positions=positions,
                cache=None if caches is None else caches[number],
                source=source if source is None or isinstance(source, Tensor) else source[number],
                source_mask=source_mask,
            )
        return states if self.norm is None else self.norm(states)
