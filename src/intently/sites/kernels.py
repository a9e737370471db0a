"""Why a call of F.scaled_dot_product_attention got no fused kernel: torch is asked again with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# torch names no public way to ask which kernel a call would take.
_choose: Callable[..., int] = getattr(torch, "_fused_sdp_choice")  # noqa: B009
_NAMES = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
Call = Mapping[str, Any]  # query, key, value, mask, dropout, causal, scale, enable_gqa


def kernel_of(call: Call) -> str:
    """The kernel that torch would take for a call: `flash`, `efficient`, `math`, …"""
    try:
        chosen = _choose(
            call["query"], call["key"], call["value"], call["mask"], call["dropout"], call["causal"],
            scale=call["scale"], enable_gqa=call["enable_gqa"],
        )  # fmt: skip
    except (RuntimeError, TypeError):
        return "math"
    return _NAMES.get(int(chosen), "math")


def refused_for(call: Call) -> frozenset[str]:
    """What a call would have to change to get a fused kernel: one thing where one is enough; empty where it has one.

    `{"unknown"}` where torch gives none even then.
    """
    if kernel_of(call) not in ("math", "error"):
        return frozenset()
    if call["query"].device.type == "cpu" and not torch.backends.cuda.flash_sdp_enabled():
        return frozenset({"switched off"})
    changed, needed = dict(call), []
    for name, change in _CHANGES.items():
        other = change(changed)
        if other is None:
            continue
        alone = change(dict(call))
        if alone is not None and kernel_of({**call, **alone}) not in ("math", "error"):
            return frozenset({name})
        changed.update(other)
        needed.append(name)
    return frozenset(needed) if kernel_of(changed) not in ("math", "error") else frozenset({"unknown"})


def _undropped(call: Call) -> dict[str, Any] | None:
    return {"dropout": 0.0} if call["dropout"] else None


def _detached(call: Call) -> dict[str, Any] | None:
    mask = call["mask"]
    return {"mask": mask.detach()} if isinstance(mask, Tensor) and mask.requires_grad else None


def _of_four_axes(call: Call) -> dict[str, Any] | None:
    if call["query"].dim() == 4:
        return None
    more: dict[str, Any] = {n: _four(call[n]) for n in ("query", "key", "value")}
    if isinstance(call["mask"], Tensor):
        more["mask"] = _four(call["mask"])
    return more


def _four(tensor: Tensor) -> Tensor:
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor.reshape(-1, *tensor.shape[-3:]) if tensor.dim() > 4 else tensor


def _mask_of_four_axes(call: Call) -> dict[str, Any] | None:
    mask = call["mask"]
    return {"mask": _four(mask)} if isinstance(mask, Tensor) and mask.dim() == 3 else None


def _as_wide(call: Call) -> dict[str, Any] | None:
    query, value = call["query"], call["value"]
    if query.shape[-1] == value.shape[-1]:
        return None
    return {"value": value.new_zeros(*value.shape[:-1], query.shape[-1])}


def _of_one_dtype(call: Call) -> dict[str, Any] | None:
    query = call["query"]
    alike = {n: call[n].to(query.dtype) for n in ("key", "value")}
    return alike if any(call[n].dtype != query.dtype for n in alike) else None


def _with_all_heads(call: Call) -> dict[str, Any] | None:
    """Heads of keys and values that broadcast, as if they were expanded."""
    query = call["query"]
    if query.dim() != 4 or call["enable_gqa"] or call["key"].shape[:2] == call["value"].shape[:2] == query.shape[:2]:
        return None
    return {n: call[n].expand(*query.shape[:2], *call[n].shape[-2:]) for n in ("key", "value")}


def _in_order(call: Call) -> dict[str, Any] | None:
    strided = [n for n in ("query", "key", "value", "mask") if isinstance(call[n], Tensor) and call[n].stride(-1) != 1]
    return {n: call[n].contiguous() for n in strided} or None


_CHANGES: Mapping[str, Callable[[Call], dict[str, Any] | None]] = {
    "dropout": _undropped,
    "mask gradient": _detached,
    "axes": _of_four_axes,
    "mask axes": _mask_of_four_axes,
    "value width": _as_wide,
    "dtype": _of_one_dtype,
    "broadcast heads": _with_all_heads,
    "memory order": _in_order,
}
