"""Multi-head attention: project, route in every head, merge, project back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from intently._typing import Bool, Float, Int
from intently.masks import Mask
from intently.mechanism.aggregate import merge_heads
from intently.mechanism.door import Bias, show
from intently.mechanism.layers.attend import Attend
from intently.mechanism.layers.cache import Cache
from intently.mechanism.layers.state_dicts import from_multihead_attention
from intently.mechanism.project import split_heads

Layer = TypeVar("Layer", bound=nn.Module)

Position = Callable[[Tensor, Tensor], Tensor]
"""How positions enter queries and keys: `position(states [*batch, heads, length, width], positions)`, such as a `Rotary`."""


class MultiHeadAttention(nn.Module):
    """Self-attention with any number of kv heads: queries, keys and values all come from one stream.

    Four separate linear layers, `query`, `key`, `value` and `output`, so that the weights of any model can be put in
    place; exchange one of them where a model differs, as in `layer.output = nn.Linear(512, 512, bias=False)`. What
    the routing itself does (mask, scale, bias of positions, softcap, sink, dropout) is the affair of `attend`.

    Args:
        model: width of a representation.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `heads`; query head h reads kv head `h // group`.
        width: width of a query and a key in one head; `model / heads` when left out.
        value_width: width of a value in one head; `width` when left out.
        bias: whether the four linear layers have one.
        attend: the routing; a plain `Attend()` when left out.
        position: applied to queries and keys, after `qk_norm`: a `Rotary`, or any `position(states, positions)`.
        qk_norm: applied to queries and keys of every head: `qk_norm(query, key)` gives both back.

    Source: Vaswani et al. 2017, section 3.2.2; Ainslie et al. 2023, arXiv 2305.13245 (kv heads).

    >>> import torch
    >>> layer = MultiHeadAttention(16, heads=4, kv_heads=2, attend=Attend(mask=Mask.causal()))
    >>> layer(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        width: int | None = None,
        value_width: int | None = None,
        bias: bool = True,
        attend: Attend | None = None,
        position: Position | None = None,
        qk_norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ):
        super().__init__()
        self.heads, self.kv_heads, width = head_sizes("MultiHeadAttention", model, heads, kv_heads, width)
        value_width = width if value_width is None else value_width
        self.query = nn.Linear(model, self.heads * width, bias=bias)
        self.key = nn.Linear(model, self.kv_heads * width, bias=bias)
        self.value = nn.Linear(model, self.kv_heads * value_width, bias=bias)
        self.output = nn.Linear(self.heads * value_width, model, bias=bias)
        self.attend = Attend() if attend is None else attend
        self.position = position
        self.qk_norm = qk_norm

    @classmethod
    def from_torch(cls, theirs: nn.MultiheadAttention) -> MultiHeadAttention:
        """A layer with the weights, dropout and mode of torch's module, for self-attention.

        Its masks are the other way round: `from_mha` and `from_key_padding` read them. `add_zero_attn` becomes a sink of 0.

        Raises:
            ValueError: widths of other streams (that is `CrossAttention.from_torch`), or `add_bias_kv`.

        >>> import torch
        >>> theirs, states = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 4, 8)
        >>> torch.allclose(MultiHeadAttention.from_torch(theirs)(states), theirs(states, states, states)[0], atol=1e-6)
        True
        """
        model = theirs.embed_dim
        if (theirs.kdim, theirs.vdim) != (model, model):
            raise ValueError(
                f"MultiHeadAttention: theirs reads keys of width {theirs.kdim} and values of width {theirs.vdim} beside "
                f"queries of {model}, so it serves two streams; use CrossAttention.from_torch"
            )
        layer = cls(model, theirs.num_heads, bias=theirs.in_proj_bias is not None, attend=attend_of(theirs))
        return with_weights_of(theirs, layer)

    def forward(
        self,
        states: Float[Tensor, "*batch length model"],
        *,
        mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
        bias: Bias | Float[Tensor, "*bias_axes"] | None = None,
        positions: Int[Tensor, "*batch length"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "*batch length model"]:
        """Let every position read from all that it may see.

        Args:
            states: `[*batch, length, model]`; with a cache the new positions only.
            mask: hides pairs beyond the mask of `attend`; a `Mask` speaks of the whole sequence, cached part included.
            bias: added to the logits, a function of positions or a tensor.
            positions: where each state stands, for `position`; counted from the length of the cache when left out.
                With pads before the text, `positions_from_padding(keep)`.
            cache: keys and values of what came before; this call's are appended.
        """
        check_states("MultiHeadAttention", "states", states, self.query)
        before = cache.length if cache is not None else 0
        query = split_heads(self.query(states), self.heads)
        key = split_heads(self.key(states), self.kv_heads)
        value = split_heads(self.value(states), self.kv_heads)
        if self.qk_norm is not None:
            query, key = self.qk_norm(query, key)
        if self.position is not None:
            if positions is None:
                positions = torch.arange(before, before + states.shape[-2], device=states.device)
            query, key = self.position(query, positions), self.position(key, positions)
        if cache is not None:
            key, value = cache.append(key, value)
        first = before + states.shape[-2] - key.shape[-2]
        output = self.attend(query, key, value, mask=mask, bias=bias, query_start=before, key_start=first)
        return self.output(merge_heads(output))


def attend_of(theirs: nn.MultiheadAttention) -> Attend:
    """The routing of torch's module: its appended key and value of zeros is a logit of 0 that carries nothing."""
    return Attend(dropout=theirs.dropout, sink=0.0 if theirs.add_zero_attn else None)


def with_weights_of(theirs: nn.MultiheadAttention, layer: Layer) -> Layer:
    """The layer with the weights, device, dtype and mode of torch's module."""
    layer.load_state_dict(from_multihead_attention(theirs.state_dict()))
    return layer.to(theirs.out_proj.weight).train(theirs.training)


def head_sizes(who: str, model: int, heads: int, kv_heads: int | None, width: int | None) -> tuple[int, int, int]:
    """Heads, kv heads and width of a head, checked.

    Raises:
        ValueError: sizes that do not divide.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{who}: {heads} heads are no multiple of {kv_heads} kv heads; each kv head serves heads / kv_heads"
        )
    if width is None:
        if model % heads:
            raise ValueError(f"{who}: model {model} does not split into {heads} heads of equal width; give width=")
        width = model // heads
    return heads, kv_heads, width


def check_states(who: str, name: str, states: Tensor, linear: nn.Linear) -> None:
    """Raise where representations are not as wide as the layer reads."""
    if states.dim() < 2 or states.shape[-1] != linear.in_features:
        raise ValueError(f"{who}: {name} is {show(states)}; [*batch, length, {linear.in_features}] is needed")
