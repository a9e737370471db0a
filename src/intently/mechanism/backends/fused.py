"""The backend that is one call of torch's `scaled_dot_product_attention`, shielded from rows that see nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from intently.mechanism.door import Inputs, show, transformed


def fused_obstacle(inputs: Inputs) -> str | None:
    """Why torch's call cannot compute this; None where it can."""
    if inputs.softcap is not None:
        return "torch's fused call has no softcap"
    if inputs.sink is not None:
        return "torch's fused call has no sink"
    if 0 in inputs.query.shape or 0 in inputs.value.shape:
        return "an axis is empty, which torch's kernels do not promise to handle"
    bias, dtype = inputs.sample_of_bias(), inputs.query.dtype
    if bias is not None and dtype in (torch.float16, torch.bfloat16) and bias.dtype != dtype:
        # Rounded to float16 a bias of -1e9 becomes -inf, and a row that saw its keys would see nothing.
        return f"the bias is {show(bias)}, and rounding it to the query's {dtype} may turn a number into -inf"
    return None


def widened(inputs: Inputs) -> bool:
    """Whether query and key, or value, are padded with zeros to one width.

    On a CPU torch's flash kernel wants equal widths and takes about a third of the math path's time; padding at most
    doubles its work. Dropout and a bias with a gradient keep torch from that kernel anyway.
    """
    apart = inputs.query.shape[-1] != inputs.value.shape[-1]
    if not apart or inputs.query.device.type != "cpu" or inputs.dropout:
        return False
    bias = inputs.sample_of_bias()
    return bias is None or not (bias.requires_grad and torch.is_grad_enabled())


def by_fused(inputs: Inputs) -> Tensor:
    """torch's kernel; what it returns for a row that sees nothing varies between versions and paths, so none gets there."""
    query, key, value = (_one_batch_axis(each) for each in (inputs.query, inputs.key, inputs.value))
    width = value.shape[-1]
    if widened(inputs):
        widest = max(width, query.shape[-1])
        query, key, value = (F.pad(each, (0, widest - each.shape[-1])) for each in (query, key, value))
    plane, blind = _shield(inputs)
    if plane is not None:
        plane = _plane_for_torch(plane, inputs)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=plane,
        dropout_p=inputs.dropout,
        is_causal=inputs.causal and plane is None,
        scale=inputs.scale,
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    output = output[..., :width].reshape(*inputs.query.shape[:-1], width)
    return output if blind is None else output.masked_fill(blind, 0.0)


def _one_batch_axis(states: Tensor) -> Tensor:
    states = states if states.dim() == 4 else states.reshape(-1, *states.shape[-3:])
    # A last axis with gaps sends torch down the math path; closing them costs a copy of the states, not of the scores.
    return states if states.stride(-1) == 1 or states.shape[-1] == 1 else states.contiguous()


def _plane_for_torch(plane: Tensor, inputs: Inputs) -> Tensor:
    """Mask or bias with the axes of the flattened states; it is copied only where it tells several batch axes apart."""
    plane = plane.expand(*plane.shape[:-2], inputs.queries, inputs.keys)
    if plane.dim() <= 3:
        return plane if plane.dim() == 2 else plane.unsqueeze(0)
    if inputs.query.dim() > 4:
        return plane.expand(*inputs.query.shape[:-3], *plane.shape[-3:]).reshape(-1, *plane.shape[-3:])
    return plane


def _shield(inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias as the one tensor torch takes, with blind rows opened, and which rows are blind (None: none)."""
    if inputs.causal and inputs.bias is None:
        return None, None  # torch's is_causal aligns top-left, as this mask does, so no row is blind
    mask, bias = inputs.seen(), inputs.added()
    if bias is None:
        if mask is None:
            return None, None
        # As bytes the maximum of a row runs fifty times as fast as `any` on a CPU.
        blind = ~mask.view(torch.uint8).amax(dim=-1, keepdim=True).bool()
        return (mask | blind, blind) if _maybe(blind) else (mask, None)
    bias = bias.to(inputs.query.dtype)
    if mask is not None:
        bias = torch.where(mask, bias, float("-inf"))
    blind = bias.detach().amax(dim=-1, keepdim=True) == float("-inf")
    return (bias.masked_fill(blind, 0.0), blind) if _maybe(blind) else (bias, None)


def _maybe(flags: Tensor) -> bool:
    """False only where looking is cheap and finds nothing: not in a graph, under vmap, or on another device."""
    dear = torch.compiler.is_compiling() or transformed(flags) or flags.device.type != "cpu"
    return dear or bool(flags.any())
