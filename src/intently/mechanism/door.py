"""The door of the mechanism: what `attention` and its oracles accept, and what they say when they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from intently._typing import Bool, Float
from intently.masks import Mask

Bias = Callable[[Tensor, Tensor], Tensor]
"""A bias by rule: int64 `query [query, 1]` and `key [key]`, to float broadcastable to `[*batch, heads, query, key]`."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Checked arguments in one form: a head axis everywhere, scale a number, a sink per head; nothing is built yet."""

    query: Float[Tensor, "*batch heads query width"]
    key: Float[Tensor, "*batch kv_heads key width"]
    value: Float[Tensor, "*batch kv_heads key value_width"]
    mask: Mask | Bool[Tensor, "*mask_axes"] | None
    causal: bool  # the mask is a triangle from the top left and nothing else, which kernels know by name
    bias: Float[Tensor, "*bias_axes"] | Callable[[range, range], Tensor] | None
    scale: float
    softcap: float | None
    sink: Float[Tensor, " heads"] | None
    dropout: float
    headless: bool  # the caller passed no head axis, so results lose theirs

    @property
    def queries(self) -> int:
        return self.query.shape[-2]

    @property
    def keys(self) -> int:
        return self.key.shape[-2]

    def seen(self, rows: range | None = None, columns: range | None = None) -> Bool[Tensor, "*mask_axes"] | None:
        """The mask as a tensor, or that block of it; None where every query sees every key."""
        rows = range(self.queries) if rows is None else rows
        columns = range(self.keys) if columns is None else columns
        if isinstance(self.mask, Mask):
            return self.mask.tile(rows, columns, self.queries, self.keys, self.query.device)
        return None if self.mask is None else cut(self.mask, rows, columns)

    def added(self, rows: range | None = None, columns: range | None = None) -> Float[Tensor, "*bias_axes"] | None:
        """The bias as a tensor, or that block of it."""
        rows = range(self.queries) if rows is None else rows
        columns = range(self.keys) if columns is None else columns
        if self.bias is None or isinstance(self.bias, Tensor):
            return None if self.bias is None else cut(self.bias, rows, columns)
        return self.bias(rows, columns)

    def sample_of_bias(self) -> Tensor | None:
        """A bias that stands for all of it where only dtype and gradient matter."""
        return self.added(range(self.queries)[:1], range(self.keys)[:1]) if callable(self.bias) else self.added()

    def differentiable(self) -> bool:
        """Whether a gradient will be asked for."""
        tensors = self.query, self.key, self.value, self.sink, self.sample_of_bias()
        return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)

    def block(self, rows: range, columns: range) -> Inputs:
        """The same question for some queries and some keys, with mask and bias built."""
        return replace(
            self,
            query=self.query[..., rows.start : rows.stop, :],
            key=self.key[..., columns.start : columns.stop, :],
            value=self.value[..., columns.start : columns.stop, :],
            mask=self.seen(rows, columns),
            causal=False,
            bias=self.added(rows, columns),
        )

    def leave(self, result: Tensor) -> Tensor:
        """Give a result the axes of the caller's query."""
        return result.squeeze(-3) if self.headless else result


def own_precision(query: Any) -> AbstractContextManager:
    """Keeps `torch.autocast` from rounding, inside, what the caller passed in with more digits."""
    kind = query.device.type if isinstance(query, Tensor) else "cpu"
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def admit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
) -> Inputs:
    """Check every argument of `attention` and bring them into one form.

    Raises:
        TypeError: a dtype or type that the contract does not know.
        ValueError: shapes, devices or numbers that do not fit together.
    """
    _check_content(query, key, value)
    headless = query.dim() < 4
    if headless:
        query, key, value = query.unsqueeze(-3), key.unsqueeze(-3), value.unsqueeze(-3)
    _check_shapes(query, key, value, headless)
    target = (*query.shape[:-1], key.shape[-2])
    return Inputs(
        query=query,
        key=key,
        value=value,
        mask=_admit_mask(mask, target, headless, query.device),
        causal=_is_causal(mask, target),
        bias=_admit_bias(bias, target, headless, query.device),
        scale=_admit_scale(scale, query.shape[-1]),
        softcap=_admit_softcap(softcap),
        sink=_admit_sink(sink, query),
        dropout=_admit_dropout(dropout),
        headless=headless,
    )


def transformed(*tensors: Tensor) -> bool:
    """Whether `torch.vmap` or `torch.func` is at work on one of them, so that no number of theirs can be looked at."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return not torch.compiler.is_compiling() and any(map(wrapped, tensors))


def cut(plane: Tensor, rows: range, columns: range) -> Tensor:
    """That block of a mask or bias; an axis of size 1 stands for every row or column."""
    if plane.dim() >= 1 and plane.shape[-1] > 1:
        plane = plane[..., columns.start : columns.stop]
    if plane.dim() >= 2 and plane.shape[-2] > 1:
        plane = plane[..., rows.start : rows.stop, :]
    return plane


def show(tensor: Tensor) -> str:
    """A tensor as `float32[2, 4, 3, 8]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _check_content(query: Any, key: Any, value: Any) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"attention: {name} is {type(tensor).__name__}; a torch.Tensor is needed")
        if not tensor.is_floating_point():
            raise TypeError(
                f"attention: {name} is {show(tensor)}; real floating point is needed. "
                "Token ids passed in place of embeddings? Embed them, or convert with .float()"
            )
        if tensor.dim() < 2:
            raise ValueError(
                f"attention: {name} is {show(tensor)}; "
                "[*batch, heads, length, width] or [*batch, length, width] is needed"
            )
    together = f"query {show(query)}, key {show(key)}, value {show(value)}"
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"attention: dtypes differ: {together}. Usually a cache or a memory kept in another precision; "
            f"convert with .to(torch.{str(query.dtype).removeprefix('torch.')})"
        )
    if not query.device == key.device == value.device:
        raise ValueError(f"attention: devices differ: query {query.device}, key {key.device}, value {value.device}")
    if not query.dim() == key.dim() == value.dim():
        raise ValueError(
            f"attention: ranks differ: {together}. Usually a missing head axis on one of them; "
            "add it with .unsqueeze(-3), or split the heads with split_heads"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, headless: bool) -> None:
    together = f"query {show(query)}, key {show(key)}, value {show(value)}"
    if headless:
        together += " (the head axis of 1 was added: fewer than 4 axes mean a single head)"
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"attention: query width {query.shape[-1]} and key width {key.shape[-1]} differ: {together}. "
            "They are matched by a dot product; only the value may have a width of its own. "
            "Key and value swapped, or heads not yet split?"
        )
    if query.shape[-1] == 0:
        raise ValueError(f"attention: width 0: {together}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"attention: {key.shape[-2]} keys but {value.shape[-2]} values: {together}. "
            "Key j advertises value j, so their lengths must agree. Keys and values from two streams, or a cache "
            "that grew only one of them?"
        )
    if key.shape[-3] != value.shape[-3]:
        raise ValueError(f"attention: {key.shape[-3]} key heads but {value.shape[-3]} value heads: {together}")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"attention: batch axes differ: {together}. Nothing is broadcast here; if one key serves the whole batch, "
            "expand it with .expand(...)"
        )
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"attention: {heads} query heads are no multiple of {kv_heads} kv heads: {together}. "
            "Query head h reads kv head h // (heads / kv_heads). Axes in the order [batch, length, heads, width]? "
            "Then transpose(1, 2) all three"
        )


def _is_causal(mask: Any, target: tuple[int, ...]) -> bool:
    """Whether the mask is the one triangle that kernels know by name, and need no matrix for."""
    if not isinstance(mask, Mask):
        return False
    return mask == Mask.causal() or (target[-2] == target[-1] and mask == Mask.causal().bottom_right())


def _admit_mask(mask: Any, target: tuple[int, ...], headless: bool, device: torch.device) -> Mask | Tensor | None:
    if mask is None:
        return None
    if isinstance(mask, Mask):
        queries, keys = target[-2:]
        mask.expression.require(0, queries, keys)
        batch, heads = mask.batch, mask.heads
        if batch is not None or heads is not None:
            _check_fit(
                "mask",
                f"bool[{batch or 1}, {heads or 1}, {queries}, {keys}]",
                (batch or 1, heads or 1, queries, keys),
                target,
                headless,
            )
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention: mask is {type(mask).__name__}; an intently.Mask or a bool tensor (True = may see) is needed"
        )
    if mask.dtype != torch.bool:
        if mask.is_floating_point():
            advice = (
                "A float that is added to the logits belongs in `bias`; a float mask of 0 and 1 becomes one with "
                ".bool(), if 1 means `may see`"
            )
        else:
            advice = "If 1 means `may see` pass mask.bool(), if 1 means `hidden` pass ~mask.bool()"
        raise TypeError(
            f"attention: mask is {show(mask)}; bool is needed, True where the query may see the key. {advice}"
        )
    return _admit_plane("mask", mask, target, headless, device)


def _admit_bias(bias: Any, target: tuple[int, ...], headless: bool, device: torch.device) -> Any:
    if bias is None or (isinstance(bias, Tensor) and bias.is_floating_point()):
        return None if bias is None else _admit_plane("bias", bias, target, headless, device)
    if isinstance(bias, Tensor) or not callable(bias):
        what = show(bias) if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(
            f"attention: bias is {what}; a float tensor to add to the logits is needed, or a callable "
            "bias(query_index, key_index) that returns one. "
            "A bool or integer tensor that says who may see whom belongs in `mask`"
        )

    def tile(rows: range, columns: range) -> Tensor:
        query = torch.arange(rows.start, rows.stop, device=device)[:, None]
        plane = bias(query, torch.arange(columns.start, columns.stop, device=device))
        asked = f"bias(query_index int64[{len(rows)}, 1], key_index int64[{len(columns)}])"
        if not isinstance(plane, Tensor) or not plane.is_floating_point():
            what = show(plane) if isinstance(plane, Tensor) else type(plane).__name__
            raise TypeError(f"attention: {asked} returned {what}; a float tensor to add to the logits is needed")
        return _admit_plane(f"the result of {asked},", plane, (*target[:-2], len(rows), len(columns)), headless, device)

    tile(range(target[-2])[:1], range(target[-1])[:1])  # refuse here, not in the middle of a backend
    return tile


def _admit_plane(name: str, plane: Tensor, target: tuple[int, ...], headless: bool, device: torch.device) -> Tensor:
    """A mask or bias, with a head axis where the caller had none, broadcastable to the scores."""
    lifted = _check_fit(name, show(plane), tuple(plane.shape), target, headless)
    if plane.device != device:
        raise ValueError(f"attention: {name} is on {plane.device}, the query on {device}")
    return plane.reshape(lifted) if lifted != tuple(plane.shape) else plane


def _check_fit(
    name: str, shown: str, given: tuple[int, ...], target: tuple[int, ...], headless: bool
) -> tuple[int, ...]:
    """The shape of a mask or bias with a head axis where the caller had none; refuses one that does not broadcast."""
    shape = (*given[:-2], 1, *given[-2:]) if headless and 3 <= len(given) < len(target) else given
    if len(shape) > len(target) or any(
        size not in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    ):
        axes = "[batch, query, key]" if headless else "[*batch, heads, query, key]"
        wanted = [*target[:-3], *target[-2:]] if headless else list(target)
        raise ValueError(
            f"attention: {name} {shown} does not broadcast to {axes} = {wanted}. "
            + _likely_cause(given, target, headless)
        )
    return shape


def _likely_cause(shape: tuple[int, ...], target: tuple[int, ...], headless: bool) -> str:
    batch, queries, keys = target[0], target[-2], target[-1]
    middle = "[:, None, :]" if headless else "[:, None, None, :]"
    if shape == (batch, keys):
        return f"It looks like one entry per sample and key; give it the axes between: {middle}"
    if shape == (batch, queries, keys) and not headless:
        return "It looks like [batch, query, key]; give it a head axis: [:, None]"
    if shape[-2:] == (keys, queries):
        return "Its last two axes are [key, query]; transpose them: .mT"
    return "Axes align from the right; the last is the key, the one before it the query"


def _admit_scale(scale: Any, width: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(width)
    if isinstance(scale, Tensor):
        raise TypeError(
            f"attention: scale is {show(scale)}; a number is needed. Multiply a learned scale into the query"
        )
    if not math.isfinite(scale):
        raise ValueError(f"attention: scale is {scale}; a finite number is needed")
    return scale


def _admit_softcap(softcap: Any) -> float | None:
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"attention: softcap is {softcap}; a finite number above 0 is needed, or None for no cap")
    return softcap


def _admit_sink(sink: Any, query: Tensor) -> Tensor | None:
    if sink is None:
        return None
    heads = query.shape[-3]
    if not isinstance(sink, Tensor):
        sink = torch.tensor(float(sink), device=query.device, dtype=torch.promote_types(query.dtype, torch.float32))
    if not sink.is_floating_point():
        raise TypeError(f"attention: sink is {show(sink)}; floating point is needed, one logit per head")
    if tuple(sink.shape) not in ((), (1,), (heads,)):
        raise ValueError(f"attention: sink {show(sink)} is not one logit per head; {heads} heads need [{heads}]")
    if sink.device != query.device:
        raise ValueError(f"attention: sink is on {sink.device}, the query on {query.device}")
    return sink.expand(heads)


def _admit_dropout(dropout: float) -> float:
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"attention: dropout is {dropout}; a probability in [0, 1) is needed")
    return dropout
