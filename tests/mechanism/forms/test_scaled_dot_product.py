"""Scaled dot-product attention against plain numpy."""

from __future__ import annotations

import numpy as np
import torch
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check

from intently import Mask
from intently.mechanism import attention
from intently.mechanism.forms.scaled_dot_product import scaled_dot_product


def tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "query": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width),
        "key": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.width),
        "value": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.value_width),
    }


def options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    return {
        "plain": {},
        "causal": {"mask": Mask.causal()},
        "mask per head": {"mask": draw.seen(sizes.heads, sizes.queries, sizes.keys)},
        "a row that sees nothing": {"mask": draw.blind(sizes.queries, sizes.keys)},
    }


def in_numpy(query, key, value, mask=None):
    """Per head, with the group written out: heads 0 and 1 read kv head 0."""
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    group = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        keys, values = key[:, head // group], value[:, head // group]
        logits = query[:, head] @ keys.transpose(0, 2, 1) / np.sqrt(query.shape[-1])
        shares = np.exp(logits)
        if mask is not None:
            shares = shares * np.broadcast_to(mask, (query.shape[1], *shares.shape[1:]))[head]
        total = shares.sum(-1, keepdims=True)
        output[:, head] = (shares / np.where(total == 0, 1, total)) @ values
    return output


def slip(*, tiled=False, scale=None, inverted=False):
    def call(query, key, value, mask=None):
        if tiled:
            key, value = (each.repeat(1, query.shape[1] // each.shape[1], 1, 1) for each in (key, value))
        if inverted and isinstance(mask, torch.Tensor):
            mask = ~mask
        return attention(query, key, value, mask=mask, scale=scale)

    return call


test_scaled_dot_product = every_check(
    Form(
        "scaled dot product",
        scaled_dot_product,
        in_numpy,
        tensors,
        wrong={"no scale": slip(scale=1.0), "tiled heads": slip(tiled=True), "mask inverted": slip(inverted=True)},
        options=options,
        stages=lambda query, key, value, mask=None: attention(query, key, value, mask=mask, backend="stages"),
        blind="a row that sees nothing",
    )
)
