"""Cross-attention: one stream asks, another answers; the two are named, so that they cannot be mistaken."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from intently._typing import Float
from intently.mechanism.forms.multi_head import Projections, attend_between
from intently.mechanism.options import Options


def cross_attention(
    *,
    receiving: Float[Tensor, "*batch query model"] | None = None,
    source: Float[Tensor, "*batch key source_model"] | None = None,
    projections: Projections,
    heads: int,
    kv_heads: int | None = None,
    **options: Unpack[Options],
) -> Float[Tensor, "*batch query model"]:
    """Every position of the receiving stream asks the positions of the source stream, and receives what they carry.

        q_h = receiving · W^Q_hᵀ        k_h, v_h = source · W^K_hᵀ, source · W^V_hᵀ
        output = [attention(q_1, k_1, v_1), ...] · W^Oᵀ

    Feeding a decoder its own states in place of the memory raises nothing where lengths permit; the model then ignores
    what it was to be conditioned on. Hence the names, and the refusal of one tensor in both places.

    Args:
        receiving: who asks (decoder states, image latents), `[*batch, query, model]`.
        source: who answers (encoder states, the prompt), `[*batch, key, source_model]`; another width and length is fine.
        projections: `query` is applied to the receiving stream, `key` and `value` to the source.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `heads`; as many as `heads` when left out.
        options: `mask` (`[..., query, key]`, usually the padding of the source), `bias`, `scale`, `softcap`, `sink`,
            `dropout`, `backend`, as in `attention`.

    Returns:
        `[*batch, query, model]`.

    Raises:
        TypeError: a stream is missing.
        ValueError: both streams are one tensor, a width does not fit its projection, or as in `attention`.

    Symbols: `receiving` is the previous decoder layer, `source` the memory, "the output of the encoder".

    Equals / differs:
        torch `scaled_dot_product_attention`: the middle, without the projections; it cannot know which stream is which.
        `nn.MultiheadAttention`: `module(receiving, source, source)`, with `kdim` and `vdim` where widths differ.
        ONNX `Attention`: the middle.
        FlexAttention: the middle.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.3, first item ("encoder-decoder attention").

    Two positions receive from a source of four. Scores are 0; the last two tokens of the source are padding, so each
    receives (1 + 10) / 2, whatever the receiving stream holds:

    >>> import torch
    >>> decoder, encoder = torch.tensor([[[7.0], [8.0]]]), torch.tensor([[[1.0], [10.0], [100.0], [1000.0]]])
    >>> nothing, same = torch.zeros(1, 1), torch.ones(1, 1)
    >>> cross_attention(receiving=decoder, source=encoder, projections=Projections(nothing, nothing, same, same),
    ...                 heads=1, mask=torch.tensor([True, True, False, False])).flatten()
    tensor([5.5000, 5.5000])
    """
    receiving, source = _two_streams(receiving, source)
    for stream, width, weight in (
        ("receiving", receiving.shape[-1], projections.query),
        ("source", source.shape[-1], projections.key),
        ("source", source.shape[-1], projections.value),
    ):
        if weight.shape[-1] != width:
            raise ValueError(
                f"cross_attention: the {stream} stream has width {width}, its projection takes {weight.shape[-1]}. "
                "Streams exchanged? The query's weight reads `receiving`, those of key and value read `source`"
            )
    return attend_between(receiving, source, projections, heads=heads, kv_heads=kv_heads, **options)


def _two_streams(receiving: Any, source: Any) -> tuple[Tensor, Tensor]:
    for name, stream, role in (("receiving", receiving, "asks"), ("source", source, "answers")):
        if stream is None:
            raise TypeError(
                f"cross_attention: `{name}`, the stream that {role}, is missing; two streams are needed. "
                "For one stream that asks itself take multi_head_attention"
            )
    if receiving is source:
        raise ValueError(
            "cross_attention: receiving and source are the same tensor, so a stream would ask itself. Usually the "
            "memory was meant for source. Take multi_head_attention for self-attention; if the streams agree by "
            "chance, pass source.clone()"
        )
    return receiving, source
