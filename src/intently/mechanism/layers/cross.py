"""Cross-attention: one stream asks, another answers, and the two are named so that they cannot be swapped unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from intently._typing import Bool, Float
from intently.masks import Mask
from intently.mechanism.aggregate import merge_heads
from intently.mechanism.door import Bias
from intently.mechanism.layers.attend import Attend
from intently.mechanism.layers.multi_head import attend_of, check_states, head_sizes, with_weights_of
from intently.mechanism.project import split_heads


class Source(NamedTuple):
    """A source that has been read once: its keys and values, for any number of receiving steps."""

    key: Float[Tensor, "*batch kv_heads key width"]
    value: Float[Tensor, "*batch kv_heads key value_width"]


class CrossAttention(nn.Module):
    """Queries come from the `receiving` stream, keys and values from the `source`.

    Both are given by name: where lengths and widths permit, a decoder fed with its own states in place of the
    source runs without complaint and ignores what it was to be conditioned on.

    Args:
        model: width of the receiving representations, and of the result.
        heads: number of query heads.
        source_model: width of the source's representations; `model` when left out.
        kv_heads, width, value_width, bias, attend, qk_norm: as in `MultiHeadAttention`.

    Source: Vaswani et al. 2017, section 3.2.3 ("encoder-decoder attention").

    >>> import torch
    >>> layer = CrossAttention(16, heads=4, source_model=24)
    >>> image, words = torch.randn(2, 9, 16), torch.randn(2, 5, 24)
    >>> layer(receiving=image, source=words).shape
    torch.Size([2, 9, 16])
    >>> read_once = layer.read(words)                                        # in a decoder: once a text, not once a token
    >>> torch.equal(layer(receiving=image, source=read_once), layer(receiving=image, source=words))
    True
    """

    def __init__(
        self,
        model: int,
        heads: int,
        *,
        source_model: int | None = None,
        kv_heads: int | None = None,
        width: int | None = None,
        value_width: int | None = None,
        bias: bool = True,
        attend: Attend | None = None,
        qk_norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ):
        super().__init__()
        self.heads, self.kv_heads, width = head_sizes("CrossAttention", model, heads, kv_heads, width)
        value_width = width if value_width is None else value_width
        source_model = model if source_model is None else source_model
        self.query = nn.Linear(model, self.heads * width, bias=bias)
        self.key = nn.Linear(source_model, self.kv_heads * width, bias=bias)
        self.value = nn.Linear(source_model, self.kv_heads * value_width, bias=bias)
        self.output = nn.Linear(self.heads * value_width, model, bias=bias)
        self.attend = Attend() if attend is None else attend
        self.qk_norm = qk_norm

    @classmethod
    def from_torch(cls, theirs: nn.MultiheadAttention) -> CrossAttention:
        """A layer with the weights, dropout and mode of torch's module, called there as `theirs(receiving, source, source)`.

        Raises:
            ValueError: keys and values of different widths, which cannot come from one source, or `add_bias_kv`.
        """
        if theirs.kdim != theirs.vdim:
            raise ValueError(
                f"CrossAttention: theirs reads keys of width {theirs.kdim} and values of width {theirs.vdim}; here both "
                "come from one source. Call the stages yourself: project each stream, then attention(...)"
            )
        layer = cls(
            theirs.embed_dim,
            theirs.num_heads,
            source_model=theirs.kdim,
            bias=theirs.in_proj_bias is not None,
            attend=attend_of(theirs),
        )
        return with_weights_of(theirs, layer)

    def read(self, source: Float[Tensor, "*batch key source_model"]) -> Source:
        """Keys and values of a source, for the calls to come."""
        check_states("CrossAttention", "source", source, self.key)
        return Source(split_heads(self.key(source), self.kv_heads), split_heads(self.value(source), self.kv_heads))

    def forward(
        self,
        *,
        receiving: Float[Tensor, "*batch query model"],
        source: Float[Tensor, "*batch key source_model"] | Source,
        mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
        bias: Bias | Float[Tensor, "*bias_axes"] | None = None,
        query_start: int = 0,
    ) -> Float[Tensor, "*batch query model"]:
        """Let every receiving position read from the source.

        Args:
            receiving: `[*batch, query, model]`.
            source: `[*batch, key, source_model]`, or what `read` made of it.
            mask: which receiving position (rows) may see which source position (columns).
            bias: added to the logits, a function of positions or a tensor.
            query_start: position of the first receiving state in its own stream, where a mask or bias asks.

        Raises:
            ValueError: one tensor in both places, or states of another width than the layer reads.
        """
        if receiving is source:
            raise ValueError(
                "CrossAttention: receiving and source are the same tensor, so a stream would ask itself. Usually the "
                "memory was meant for source; for self-attention take MultiHeadAttention"
            )
        check_states("CrossAttention", "receiving", receiving, self.query)
        key, value = source if isinstance(source, Source) else self.read(source)
        query = split_heads(self.query(receiving), self.heads)
        if self.qk_norm is not None:
            query, key = self.qk_norm(query, key)
        output = self.attend(query, key, value, mask=mask, bias=bias, query_start=query_start)
        return self.output(merge_heads(output))
