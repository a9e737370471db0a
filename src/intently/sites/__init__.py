"""Find every attention call in a running PyTorch model, without class names and without changing the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from intently._verbs import callable_module
from intently.sites.call import Replacement
from intently.sites.site import Reads, Rows, Scale, Site, Tensors
from intently.sites.trace import Edit, Settings, Tracer, tracing
from intently.sites.trace_types import Sizes

__all__ = [
    "Edit",
    "Reads",
    "Replacement",
    "Rows",
    "Scale",
    "Settings",
    "Site",
    "Sizes",
    "Tensors",
    "Tracer",
    "find",
    "sequence_first",
    "tracing",
]


def named_arguments(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one call by the names of the model's signature."""
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
    named: dict[str, Any] = {}
    for name, value in bound.items():
        if isinstance(value, dict) and name not in kwargs:
            named.update(value)
        else:
            named[name] = value
    return named


def find(model: Any, *args: Any, **kwargs: Any) -> tuple[Site, ...]:
    """The attention calls that `model(*args, **kwargs)` makes, in order.

    The model runs once, without gradients, in the mode (train or eval) it is in; its outputs are unchanged by the
    tracing. Each `Site` tells the module's path, the user's line, the role (self or cross), the heads and widths, the
    effective scale, the kernel, and the mask really used, in words.

    >>> import torch
    >>> from intently.sites import find
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(2, 5, 8)
    >>> [(s.path, s.heads, s.mask) for s in find(layer, x, x, x)]
    [('(root)', 2, 'full')]
    """
    arguments = named_arguments(model, args, kwargs)
    with torch.no_grad(), tracing(model, arguments, Settings(sizes=sizes_of(model, arguments))) as tracer:
        model(*args, **kwargs)
    return tracer.sites()


def sequence_first(model: Any) -> bool:
    """torch's own layers say their layout; a model of someone's own is batch first unless its behaviour tells otherwise."""
    if isinstance(model, (nn.MultiheadAttention,)):
        return not model.batch_first
    if isinstance(model, nn.Transformer):
        return not model.batch_first
    if isinstance(model, (nn.TransformerEncoder, nn.TransformerDecoder)):
        return not model.layers[0].self_attn.batch_first  # type: ignore[union-attr]
    if isinstance(model, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return not model.self_attn.batch_first
    return False


def sizes_of(model: Any, arguments: Mapping[str, Any]) -> Sizes:
    """A guess at the batch size and the stream lengths from the shapes of the arguments."""
    shapes = [v.shape for v in arguments.values() if isinstance(v, torch.Tensor) and v.dim() >= 2]
    if not shapes:
        return Sizes()
    batch, length = (1, 0) if sequence_first(model) else (0, 1)
    return Sizes(batch=shapes[0][batch], lengths=frozenset(s[length] for s in shapes))


callable_module(__name__, "find")
