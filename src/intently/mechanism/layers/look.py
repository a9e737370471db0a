"""Looking without touching: any stage of any attention layer in a model, while its fused kernels keep running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from intently.mechanism.backends.stages import Stages


@runtime_checkable
class Staged(Protocol):
    """A layer that can give its stages for the arguments of a call, as `Attend` can."""

    def stages(self, *args: Any, **kwargs: Any) -> Stages: ...


Call = tuple[tuple[Any, ...], dict[str, Any]]


class Seen(Mapping[str, Stages]):
    """Stages by the path of the layer; computed when asked for, from the arguments the layer was called with."""

    def __init__(self, layers: dict[str, Any]) -> None:
        self._layers = layers
        self._calls: dict[str, list[Call]] = {path: [] for path in layers}

    def __getitem__(self, path: str) -> Stages:
        calls = self._of(path)
        if len(calls) > 1:
            raise LookupError(f"look: {path!r} was called {len(calls)} times; choose one of seen.calls({path!r})")
        return self._stages(path, calls[0])

    def calls(self, path: str) -> list[Stages]:
        """The stages of every call of a layer, in order: steps with a cache, or a layer used in several places."""
        return [self._stages(path, call) for call in self._of(path)]

    def __iter__(self) -> Iterator[str]:
        return (path for path, calls in self._calls.items() if calls)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _of(self, path: str) -> list[Call]:
        if path not in self._calls:
            raise KeyError(f"look: no layer with stages at {path!r}; there are {', '.join(map(repr, self._layers))}")
        if not self._calls[path]:
            raise KeyError(f"look: {path!r} has not been called since the look began")
        return self._calls[path]

    def _stages(self, path: str, call: Call) -> Stages:
        args, kwargs = call
        with torch.no_grad():
            return self._layers[path].stages(*args, **kwargs)

    def _record(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept = tuple(map(_detached, args)), {name: _detached(value) for name, value in kwargs.items()}
        self._calls[path].append(kept)


@contextmanager
def look(model: nn.Module) -> Iterator[Seen]:
    """See the stages of every attention layer in `model` for the calls made inside the `with`.

    The model runs as it always does, so its output is the same bit for bit; what the layers were called with is kept,
    and a stage is computed from it when it is asked for. Asking is possible after the `with` as well. In half precision
    the stages may differ from the kernel by its rounding; dropout is left out.

    Args:
        model: any module that contains layers with a method `stages`, such as `Attend`.

    Raises:
        ValueError: there are none.

    >>> import torch
    >>> from intently.mechanism.layers import MultiHeadAttention
    >>> layer = MultiHeadAttention(8, heads=2)
    >>> with look(layer) as seen:
    ...     output = layer(torch.randn(1, 4, 8))
    >>> list(seen), seen["attend"].weights.shape
    (['attend'], torch.Size([1, 2, 4, 4]))
    """
    modules = dict(model.named_modules())
    layers = {path: module for path, module in modules.items() if isinstance(module, Staged)}
    if not layers:
        raise ValueError(
            f"look: {type(model).__name__} contains no layer with stages. For layers that are not from "
            "intently.mechanism.layers, intently.sites finds attention in any model"
        )
    seen = Seen(layers)
    handles = []
    try:
        for path in layers:
            handles.append(modules[path].register_forward_hook(_recorder(seen, path), with_kwargs=True))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _recorder(seen: Seen, path: str) -> Any:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen._record(path, args, kwargs)

    return record


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
