"""A transformer block: attention, perhaps cross-attention, and feed-forward, each beside a residual path with a norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from intently._typing import Bool, Float, Int
from intently.masks import Mask
from intently.mechanism.door import Bias
from intently.mechanism.layers.attend import Attend
from intently.mechanism.layers.cache import Cache
from intently.mechanism.layers.cross import CrossAttention, Source
from intently.mechanism.layers.feed_forward import FeedForward, GatedFeedForward
from intently.mechanism.layers.multi_head import MultiHeadAttention, Position


class TransformerBlock(nn.Module):
    """Modules in a fixed order: attention, cross-attention where there is one, feed-forward.

    Args:
        attention: self-attention; any module that is called as `MultiHeadAttention` is.
        feed_forward: what each position computes by itself.
        norms: one for each of the parts, in their order: `nn.LayerNorm`, `nn.RMSNorm`.
        cross: cross-attention to a source, for decoders.
        placement: `"pre"` is `x + part(norm(x))`, `"post"` is `norm(x + part(x))`.
        dropout: probability of dropping a feature of a part's result, in training mode only.

    Raises:
        ValueError: the number of norms is not the number of parts, or the placement is unknown.

    Source: Vaswani et al. 2017, section 3.1 (post); Xiong et al. 2020, arXiv 2002.04745 (pre).

    >>> import torch
    >>> block = TransformerBlock.gated(16, heads=4, kv_heads=2, hidden=32, attend=Attend(mask=Mask.causal()))
    >>> block(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        *,
        norms: Sequence[nn.Module],
        cross: CrossAttention | None = None,
        placement: Literal["pre", "post"] = "pre",
        dropout: float = 0.0,
    ):
        super().__init__()
        parts = 2 if cross is None else 3
        if len(norms) != parts:
            raise ValueError(
                f"TransformerBlock: {len(norms)} norms for {parts} parts; one each is needed, in their order"
            )
        if placement not in ("pre", "post"):
            raise ValueError(f'TransformerBlock: placement is {placement!r}; "pre" or "post" is needed')
        self.attention = attention
        self.attention_norm = norms[0]
        self.cross = cross
        self.cross_norm = None if cross is None else norms[1]
        self.feed_forward = feed_forward
        self.feed_forward_norm = norms[-1]
        self.placement = placement
        self.dropout = nn.Dropout(dropout)

    @classmethod
    def classic(
        cls,
        model: int,
        heads: int,
        hidden: int,
        *,
        attend: Attend | None = None,
        cross: CrossAttention | None = None,
        activation: Callable[[Tensor], Tensor] = F.relu,
        placement: Literal["pre", "post"] = "post",
        dropout: float = 0.0,
    ) -> TransformerBlock:
        """The block of 2017: LayerNorm after the residual, a plain feed-forward with ReLU, biases everywhere."""
        return cls(
            MultiHeadAttention(model, heads, attend=attend),
            FeedForward(model, hidden, activation, dropout=dropout),
            norms=[nn.LayerNorm(model) for _ in range(2 if cross is None else 3)],
            cross=cross,
            placement=placement,
            dropout=dropout,
        )

    @classmethod
    def gated(
        cls,
        model: int,
        heads: int,
        hidden: int,
        *,
        kv_heads: int | None = None,
        attend: Attend | None = None,
        position: Position | None = None,
        eps: float = 1e-6,
    ) -> TransformerBlock:
        """The block of Llama: RMSNorm before each part, SwiGLU, kv heads, rotary positions, no biases."""
        return cls(
            MultiHeadAttention(model, heads, kv_heads=kv_heads, bias=False, attend=attend, position=position),
            GatedFeedForward(model, hidden),
            norms=[nn.RMSNorm(model, eps=eps), nn.RMSNorm(model, eps=eps)],
        )

    def forward(
        self,
        states: Float[Tensor, "*batch length model"],
        *,
        mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
        bias: Bias | Float[Tensor, "*bias_axes"] | None = None,
        positions: Int[Tensor, "*batch length"] | None = None,
        cache: Cache | None = None,
        source: Float[Tensor, "*batch key source_model"] | Source | None = None,
        source_mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
    ) -> Float[Tensor, "*batch length model"]:
        """One round: positions exchange, read from the source where there is one, and digest.

        Args:
            states: `[*batch, length, model]`; with a cache the new positions only.
            mask, bias, positions, cache: as in `MultiHeadAttention`.
            source: what `cross` reads, or what `cross.read` made of it.
            source_mask: which position may see which source position.

        Raises:
            ValueError: a source without cross-attention, or cross-attention without a source.
        """
        if (source is None) != (self.cross is None):
            raise ValueError(
                "TransformerBlock: this block has cross-attention, so it needs source="
                if source is None
                else "TransformerBlock: a source is given, but this block has no cross-attention and would ignore it"
            )
        before = cache.length if cache is not None else 0

        def exchange(states: Tensor) -> Tensor:
            return self.attention(states, mask=mask, bias=bias, positions=positions, cache=cache)

        states = self._beside(states, exchange, self.attention_norm)
        cross, cross_norm = self.cross, self.cross_norm
        if cross is not None and cross_norm is not None and source is not None:

            def consult(states: Tensor) -> Tensor:
                return cross(receiving=states, source=source, mask=source_mask, query_start=before)

            states = self._beside(states, consult, cross_norm)
        return self._beside(states, self.feed_forward, self.feed_forward_norm)

    def _beside(self, states: Tensor, part: Callable[[Tensor], Tensor], norm: nn.Module) -> Tensor:
        if self.placement == "pre":
            return states + self.dropout(part(norm(states)))
        return norm(states + self.dropout(part(states)))
