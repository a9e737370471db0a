"""The backend that compiles: torch's FlexAttention, with mask, softcap, bias and sink as small rules inside the kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from math import prod
from shutil import which
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from intently.masks import Mask, to_mask_mod
from intently.mechanism.backends.blocked import BUDGET
from intently.mechanism.door import Inputs, show, transformed

COMPILED = torch.float32, torch.float16, torch.bfloat16


def flex_obstacle(inputs: Inputs) -> str | None:
    """Why FlexAttention cannot compute this here; None where it can."""
    query, value = inputs.query, inputs.value
    kind = query.device.type
    if kind not in ("cpu", "cuda"):
        return f"FlexAttention was not tried on {kind}"
    if query.dtype not in COMPILED:
        return f"FlexAttention compiles for float32 and half precision; the query is {show(query)}"
    if 0 in query.shape or 0 in value.shape:
        return "an axis is empty, which FlexAttention does not handle"
    if inputs.dropout:
        return f"FlexAttention has no dropout, and it is {inputs.dropout}"
    if kind == "cpu" and inputs.differentiable():
        return "on a CPU FlexAttention has no backward pass, and a gradient may be asked for; call it under no_grad"
    if transformed(query, inputs.key, value):
        return "FlexAttention does not run under torch.vmap or torch.func"
    plane = inputs.queries * inputs.keys
    if callable(inputs.bias) and plane * 4 > BUDGET:
        return (
            f"a bias by rule may index tables as no kernel can, and written out for {inputs.queries} × {inputs.keys} "
            f"pairs it takes {plane * 4 >> 20} MiB a head"
        )
    if kind == "cpu" and which("g++") is None and which("clang++") is None:
        return "on a CPU FlexAttention needs a C++ compiler, and there is neither g++ nor clang++"
    if kind == "cuda" and find_spec("triton") is None:
        return "on a GPU FlexAttention needs triton, which is not installed"
    return None


def by_flex(inputs: Inputs) -> Tensor:
    """One compiled kernel. A sink is one more key and value of zeros, whose score is the sink's logit."""
    from torch.nn.attention.flex_attention import create_block_mask

    query, key, value = (each.reshape(-1, *each.shape[-3:]) for each in (inputs.query, inputs.key, inputs.value))
    if query.device.type == "cpu":  # its kernels do not compile for half precision with every compiler
        query, key, value = query.float(), key.float(), value.float()
    sink, keys = inputs.sink, inputs.keys
    if sink is not None:
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))

    may_see = _mask_rule(inputs)
    rules = None
    if may_see is not None:
        apart = _told_apart(inputs)
        rules = create_block_mask(
            may_see if sink is None else _or_last(may_see, keys),
            query.shape[0] if apart else None,
            query.shape[1] if apart else None,
            query.shape[-2],
            key.shape[-2],
            device=query.device,
        )
    output = _kernel()(
        query,
        key,
        value,
        score_mod=_score_rule(inputs),
        block_mask=rules,
        scale=inputs.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.reshape(*inputs.query.shape[:-1], value.shape[-1]).to(inputs.value.dtype)


@cache
def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # A whole graph or an error: pieces run without the compiler would build the plane of scores.
    return torch.compile(flex_attention, fullgraph=True)


def _told_apart(inputs: Inputs) -> bool:
    mask = inputs.mask
    if isinstance(mask, Mask):
        return mask.batch is not None or mask.heads is not None
    return mask is not None and prod(mask.shape[:-2]) > 1


def _mask_rule(inputs: Inputs) -> Callable[..., Tensor] | None:
    if inputs.mask is None:
        return None
    if isinstance(inputs.mask, Mask) and inputs.query.dim() <= 4:
        return to_mask_mod(inputs.mask, inputs.queries, inputs.keys, device=inputs.query.device)
    return _look_up(_flat(inputs.seen(), inputs), inputs.keys)


def _score_rule(inputs: Inputs) -> Callable[..., Tensor] | None:
    cap, sink, keys = inputs.softcap, inputs.sink, inputs.keys
    plane = inputs.added()
    bias = None if plane is None else _look_up(_flat(plane.float(), inputs), keys)
    if cap is None and sink is None and bias is None:
        return None
    logits = None if sink is None else sink.float()

    def score(raw: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        logit = raw if cap is None else cap * torch.tanh(raw / cap)
        if bias is not None:
            logit = logit + bias(sample, head, query, key)
        return logit if logits is None else torch.where(key == keys, logits[head], logit)

    return score


def _or_last(may_see: Callable[..., Tensor], keys: int) -> Callable[..., Tensor]:
    def rule(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key == keys) | may_see(sample, head, query, torch.clamp(key, max=keys - 1))

    return rule


def _flat(plane: Tensor | None, inputs: Inputs) -> Tensor:
    """A mask or bias as `[batch or 1, heads or 1, query or 1, key or 1]`."""
    assert plane is not None
    while plane.dim() < 4:
        plane = plane.unsqueeze(0)
    if inputs.query.dim() > 4 and prod(plane.shape[:-3]) > 1:
        plane = plane.expand(*inputs.query.shape[:-3], *plane.shape[-3:])
    return plane.reshape(-1, *plane.shape[-3:])


def _look_up(plane: Tensor, keys: int) -> Callable[..., Tensor]:
    samples, heads, queries, columns = (size > 1 for size in plane.shape)

    def rule(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # The sink's column lies past the end; what is read there is thrown away.
        key = torch.clamp(key, max=keys - 1)
        zero = torch.zeros_like(key)
        at = (
            sample if samples else zero,
            head if heads else zero,
            query if queries else zero,
            key if columns else zero,
        )
        return torch.ops.aten.index(plane, at)

    return rule
