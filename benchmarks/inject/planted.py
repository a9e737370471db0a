"""A module that runs as released, but for one change of the attention calls that it makes itself."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.inject.changes import HIDDEN, Change, lowest, spread
from intently.report import SiteRecord

_PRODUCTS = ("matmul", "bmm", "baddbmm", "__matmul__")


def plant(module: nn.Module, change: Change, site: SiteRecord) -> None:
    """Turn a module into one of a class of its own, whose forward runs with the change."""
    released = type(module)

    @functools.wraps(released.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if change.swap:
            args, kwargs = _own_stream(args, kwargs)
        with Planted(change, site):
            return released.forward(self, *args, **kwargs)

    module.__class__ = type(f"Planted{released.__name__}", (released,), {"forward": forward, "__module__": "planted"})


def _own_stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a cross-attention with its own states in the memory's place, and no mask made for the memory."""
    own = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
    named = dict(kwargs)
    for name in ("key_value_states", "encoder_hidden_states"):
        if isinstance(named.get(name), Tensor):
            named[name] = own
    made = ("attention_mask", "mask", "encoder_attention_mask", "position_bias", "past_key_values", "past_key_value")
    named.update({name: None for name in made if name in named})
    return args, named


class Planted(TorchFunctionMode):
    """Changes the products, softmaxes and fused calls that run inside one forward of one module."""

    def __init__(self, change: Change, site: SiteRecord) -> None:
        super().__init__()
        self.change, self.site = change, site
        self.scores: Tensor | None = None  # q·k of the call under way

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._fused(func, args, kwargs)
        if name in _PRODUCTS:
            if "batch1" in kwargs:
                args, kwargs = (*args, kwargs["batch1"], kwargs["batch2"]), _without(kwargs, "batch1", "batch2")
            return self._product(func, args, kwargs, 1 if name == "baddbmm" else 0)
        if name == "softmax" and self.scores is not None and args[0].shape[-2:] == self.scores.shape[-2:]:
            return self._softmax(func, args, kwargs)
        if name == "tanh" and self.change.uncapped and self.scores is not None:
            return args[0]
        return func(*args, **kwargs)

    def _concerns(self, queries: int, keys: int) -> bool:
        return queries >= self.change.least and not (self.change.stepping and queries >= keys)

    def _product(self, func: Any, args: Any, kwargs: Any, first: int) -> Any:
        """Of queries and keys, or of weights and values; products with parameters are left alone."""
        left, right = args[first], args[first + 1]
        if left.dim() < 3 or right.dim() < 3 or isinstance(right, nn.Parameter):
            return func(*args, **kwargs)
        aggregating = self.scores is not None and left.shape[-2:] == self.scores.shape[-2:]
        if self.change.tiled:
            right = self._tiled(right)
        if not aggregating and self.change.ratio is not None:
            left = left * self.change.ratio(self.site)
        result = func(*args[:first], left, right, *args[first + 2 :], **kwargs)
        self.scores = None if aggregating else result
        return result

    def _tiled(self, operand: Tensor) -> Tensor:
        """Keys or values, repeated by heads already, in the order that repeating whole blocks would give."""
        heads, own = self.site.heads, self.site.kv_heads
        if operand.dim() != 4 or operand.shape[1] != heads:
            return operand
        order = [(h % own) * (heads // own) for h in range(heads)]
        return operand[:, order]

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        logits, scores = args[0], self.scores
        assert scores is not None
        if not self._concerns(*logits.shape[-2:]):
            return func(*args, **kwargs)
        if self.change.sees is not None:
            visible = logits > HIDDEN
            slope = self._slope(scores, logits, visible)
            plain = torch.where(visible, logits, slope * scores.reshape(logits.shape))
            logits = plain.masked_fill(~self.change.sees(visible), lowest(logits.dtype))
        given = dict(kwargs)
        rest = list(args[1:])
        if self.change.axis != -1:
            if rest:
                rest[0] = self.change.axis
            else:
                given["dim"] = self.change.axis
        weights = func(logits, *rest, **given)
        return F.dropout(weights, self.change.drop, training=True) if self.change.drop else weights

    def _slope(self, scores: Tensor, logits: Tensor, visible: Tensor) -> float:
        """The factor between a call's scores and its logits: the call's own, or 1 where it was put in before."""
        s, g = scores.reshape(logits.shape)[visible].double(), logits[visible].double()
        s, g = s - s.mean(), g - g.mean()
        fitted = float((s * g).sum() / (s * s).sum().clamp_min(1e-30))
        own = self.site.scale
        return fitted if own is None else min(1.0, own, key=lambda f: abs(f - fitted))

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        heads = self.site.heads
        if given["query"].shape[1] < heads == math.prod(given["query"].shape[1:3]):
            return self._unpacked(func, given)
        query, key, value = given["query"], given["key"], given["value"]
        queries, keys = query.shape[-2], key.shape[-2]
        if not self._concerns(queries, keys):
            return func(*args, **kwargs)
        if self.change.ratio is not None:
            given["query"] = query * self.change.ratio(self.site)
        if self.change.tiled:
            repeated = [
                t if t.shape[1] == self.site.heads else t.repeat_interleave(self.site.heads // t.shape[1], 1)
                for t in (key, value)
            ]
            given["key"], given["value"] = (self._tiled(t) for t in repeated)
            given.pop("enable_gqa", None)
        if self.change.drop:
            given["dropout_p"] = self.change.drop
        visible, bias = spread(given.get("attn_mask"), bool(given.get("is_causal")), queries, keys, query.dtype)
        if self.change.sees is not None:
            wanted = self.change.sees(visible)
            hidden = torch.zeros(wanted.shape, dtype=query.dtype).masked_fill(~wanted, lowest(query.dtype))
            given["attn_mask"], given["is_causal"] = bias + hidden, False
        if self.change.axis != -1:
            return self._over_queries(given, visible, bias)
        return func(**given)

    def _unpacked(self, func: Any, given: dict[str, Any]) -> Tensor:
        """A single query whose heads lie along the query axis, beside the keys that they share: laid out as usual."""
        query, mask = given["query"], given.get("attn_mask")
        shared = self.site.heads // query.shape[1]
        laid = {n: given[n].repeat_interleave(shared, 1) for n in ("key", "value")}
        laid["query"] = query.reshape(query.shape[0], self.site.heads, 1, -1)
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
            laid["attn_mask"] = mask.reshape(mask.shape[0], self.site.heads, 1, -1)
        result = self._fused(func, (), {**given, **laid})
        return result.reshape(*query.shape[:3], -1)

    def _over_queries(self, given: dict[str, Any], visible: Tensor, bias: Tensor) -> Tensor:
        query, key, value = given["query"], given["key"], given["value"]
        if key.shape[1] != query.shape[1]:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        scale = given.get("scale") or query.shape[-1] ** -0.5
        logits = torch.matmul(query, key.transpose(-1, -2)) * scale + bias
        logits = logits.masked_fill(~visible, lowest(query.dtype))
        return torch.matmul(F.softmax(logits, dim=self.change.axis), value)


def _without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {n: v for n, v in given.items() if n not in names}
