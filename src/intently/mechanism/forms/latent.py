"""Multi-head latent attention: keys and values of all heads are unpacked from one small vector per token."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from intently._typing import Float
from intently.mechanism.attention import attention
from intently.mechanism.door import show
from intently.mechanism.options import Options
from intently.mechanism.project import project


def latent_attention(
    query: Float[Tensor, "*batch heads query both_widths"],
    latent: Float[Tensor, "*batch key rank"],
    rotary_key: Float[Tensor, "*batch key rotary_width"],
    *,
    key_weight: Float[Tensor, "key_features rank"],
    value_weight: Float[Tensor, "value_features rank"],
    absorbed: bool = False,
    **options: Unpack[Options],
) -> Float[Tensor, "*batch heads query value_width"]:
    """Attention whose cache is one latent vector and one rotated key per token, whatever the number of heads.

        k_h = [W^UK_h c ; k^R]        v_h = W^UV_h c        head h, latent c, k^R shared by all heads
        output_h = attention([q^C_h ; q^R_h], k_h, v_h)

    The score is (q^C)ᵀ W^UK c + (q^R)ᵀ k^R, so W^UK may as well be multiplied into the query, and W^UV into the output:
    `absorbed=True` scores the latents themselves, as one shared key and value head, and never unpacks them. Positions
    go into a key of their own because a rotation between the two would forbid that. Both ways give the same numbers;
    unpacking suits long inputs read at once, absorbing suits steps over a long cache.

    Args:
        query: `[*batch, heads, query, content_width + rotary_width]`: first the content, then the part already rotated.
        latent: compressed keys and values, `[*batch, key, rank]`, after their norm if the model has one.
        rotary_key: already rotated, `[*batch, key, rotary_width]`, shared by all heads.
        key_weight: `[heads * content_width, rank]`, head 0 first, as in `torch.nn.Linear`.
        value_weight: `[heads * value_width, rank]` likewise.
        absorbed: score the latents instead of unpacked keys.
        options: `mask`, `bias`, `scale` (1 / √(content_width + rotary_width) when left out), `softcap`, `sink`,
            `dropout`, `backend`, as in `attention`.

    Returns:
        `[*batch, heads, query, value_width]`.

    Raises:
        TypeError, ValueError: widths or ranks that do not fit, or as in `attention`.

    Symbols: `query` is [q^C; q^R], `latent` c^KV, `rotary_key` k^R, `key_weight` W^UK, `value_weight` W^UV, `heads` n_h,
    `content_width` d_h, `rotary_width` d_h^R, `rank` d_c.

    Equals / differs:
        torch `scaled_dot_product_attention`: the middle of either way; the absorbed one with `enable_gqa=True`, the
            latent as value, and `scale` given (its default would take the width of the absorbed query).
        `nn.MultiheadAttention`: cannot; it has no second, shared part of the key.
        ONNX `Attention`: the middle, with `kv_num_heads=1` when absorbed.
        FlexAttention: the middle, with `enable_gqa=True` when absorbed.

    Source: DeepSeek-AI 2024, *DeepSeek-V2*, arXiv 2405.04434, sections 2.1.2 and 2.1.3, equations 9 to 19.

    Four tokens, rank 1, content and rotary width 1. The latent holds the value and the content score is made 0; the
    rotary key of token 2 scores √2 · ln 3 / √2 = ln 3, so it has 3 shares against 1 each, either way:

    >>> latent, rotary_key = torch.tensor([[[1.0], [10.0], [100.0], [1000.0]]]), torch.tensor([[[0.0], [0], [1], [0]]])
    >>> query = torch.tensor([[[[0.0, 2**0.5 * torch.tensor(3.0).log()]]]])
    >>> one = torch.ones(1, 1)
    >>> latent_attention(query, latent, rotary_key, key_weight=one, value_weight=one)    # (1 + 10 + 3 · 100 + 1000) / 6
    tensor([[[[218.5000]]]])
    >>> latent_attention(query, latent, rotary_key, key_weight=one, value_weight=one, absorbed=True)
    tensor([[[[218.5000]]]])
    """
    _check(query, latent, rotary_key, key_weight, value_weight)
    heads, width = query.shape[-3], query.shape[-1]
    options.setdefault("scale", width**-0.5)
    # Under autocast a product comes in another precision than what it is joined with, hence the `to`s.
    if not absorbed:
        content = project(latent, key_weight, heads=heads).to(query.dtype)
        shared = rotary_key.unsqueeze(-3).expand(*content.shape[:-1], -1)
        value = project(latent, value_weight, heads=heads).to(query.dtype)
        return attention(query, torch.cat([content, shared], dim=-1), value, **options)
    unpack_key, unpack_value = key_weight.unflatten(0, (heads, -1)), value_weight.unflatten(0, (heads, -1))
    content, rotary = query.split([width - rotary_key.shape[-1], rotary_key.shape[-1]], dim=-1)
    query = torch.cat([(content @ unpack_key).to(query.dtype), rotary], dim=-1)
    key = torch.cat([latent, rotary_key], dim=-1)
    mixed = attention(query, key.unsqueeze(-3), latent.unsqueeze(-3), **options)
    return mixed @ unpack_value.mT


def _check(query: Tensor, latent: Tensor, rotary_key: Tensor, key_weight: Tensor, value_weight: Tensor) -> None:
    if query.dim() < 4:
        raise ValueError(
            f"latent_attention: query is {show(query)}; [*batch, heads, query, width] with at least one batch axis is "
            "needed. One sequence alone? Add the axis with query[None], latent[None], rotary_key[None]"
        )
    lead = (*query.shape[:-3], latent.shape[-2])
    if latent.shape[:-1] != lead or rotary_key.shape[:-1] != lead:
        raise ValueError(
            f"latent_attention: latent {show(latent)} and rotary_key {show(rotary_key)} do not belong to query "
            f"{show(query)}; [*batch, key, rank] and [*batch, key, rotary_width] are needed, without an axis of heads, "
            "for all heads share them. A cache that grew only one of them?"
        )
    heads, rank = query.shape[-3], latent.shape[-1]
    content = query.shape[-1] - rotary_key.shape[-1]
    if content < 1 or tuple(key_weight.shape) != (heads * content, rank):
        raise ValueError(
            f"latent_attention: key_weight {show(key_weight)} does not unpack latent {show(latent)} for query "
            f"{show(query)} and rotary_key {show(rotary_key)}; the content is {query.shape[-1]} - "
            f"{rotary_key.shape[-1]} = {content} wide, so [{heads} * {content}, {rank}] is needed. Fused with the "
            "value's weight (kv_b_proj)? Split it per head first"
        )
    if value_weight.shape[-1] != rank or value_weight.shape[0] % heads:
        raise ValueError(
            f"latent_attention: value_weight {show(value_weight)} does not unpack latent {show(latent)} into {heads} "
            f"heads; [{heads} * value_width, {rank}] is needed"
        )
