"""Sees calls of `flex_attention`, which torch's function mode does not: by standing in for its code while tracing."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from intently.sites.trace import Tracer

_HOOK = "_intently_watch"


def _stand_in(*args: Any, **kwargs: Any) -> Any:
    return _intently_watch(*args, **kwargs)  # type: ignore[name-defined]


def evaluated(score_mod: Any, block_mask: Any, scale: float) -> Callable[[Tensor], Tensor]:
    """The logits that the score and mask functions make of bare scores `[batch, heads, query, key]`."""

    def logits_of(scores: Tensor) -> Tensor:
        batch, heads, queries, keys = (torch.arange(n) for n in scores.shape)
        index = (batch[:, None, None, None], heads[:, None, None], queries[:, None], keys)
        index = tuple(i.expand(scores.shape) for i in index)
        flat = [i.reshape(-1) for i in index]
        logits = scores * scale
        if score_mod is not None:
            logits = torch.vmap(score_mod)(logits.reshape(-1), *flat).reshape(scores.shape)
        if block_mask is not None and block_mask.mask_mod is not None:
            seen = torch.vmap(block_mask.mask_mod)(*flat).reshape(scores.shape)
            logits = logits.masked_fill(~seen, float("-inf"))
        return logits

    return logits_of


@contextlib.contextmanager
def watching_flex(tracer: Tracer) -> Iterator[None]:
    """Users import the function by name, so its code object is exchanged rather than the module's attribute."""
    try:
        from torch.nn.attention import flex_attention as module
    except ImportError:
        yield
        return
    target = module.flex_attention
    scope = target.__globals__
    original = types.FunctionType(target.__code__, scope, target.__name__, target.__defaults__, target.__closure__)
    original.__kwdefaults__ = target.__kwdefaults__
    if target.__closure__ or _HOOK in scope:
        yield  # wrapped by somebody else, or already watched
        return

    def watch(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            result = original(*args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        seen = tracer.flex(args, kwargs, output)
        return (seen, *result[1:]) if isinstance(result, tuple) else seen

    code, defaults = target.__code__, (target.__defaults__, target.__kwdefaults__)
    scope[_HOOK] = watch
    target.__code__ = _stand_in.__code__
    target.__defaults__, target.__kwdefaults__ = None, None
    try:
        yield
    finally:
        target.__code__ = code
        target.__defaults__, target.__kwdefaults__ = defaults
        del scope[_HOOK]
