"""What modules read and gave in a run: recorded call by call, and compared at guarded positions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Channel:
    """One module whose inputs agree where they should and whose output does not."""

    module: nn.Module
    path: str
    moved: float


@dataclass
class Recording:
    """Inputs and outputs of every module call of a run, in the order in which calls end."""

    calls: list[tuple[nn.Module, list[Tensor], list[Tensor]]] = field(default_factory=list)


@contextlib.contextmanager
def hooked(root: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handles = [
        m.register_forward_hook(hook, with_kwargs=True)
        for m in root.modules()
        if not isinstance(m, torch.jit.ScriptModule)
    ]
    try:
        with torch.compiler.set_stance("force_eager"):  # a hook is our code, which no compiler is to read
            yield
    finally:
        for handle in handles:
            handle.remove()


def swapped(value: Any, swaps: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return swaps.get(id(value), value)
    if isinstance(value, dict):
        changed = {k: swapped(v, swaps) for k, v in value.items()}
        try:
            return type(value)(**changed)
        except TypeError:
            return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(swapped(v, swaps) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(swapped(v, swaps) for v in value)
    return value


def tensors_held(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        return [t for v in values.values() for t in tensors_held(v)]
    if isinstance(values, (list, tuple)):
        return [t for v in values for t in tensors_held(v)]
    return []


def over(guarded: Tensor, tensor: Tensor) -> Tensor | None:
    """The guard laid over a tensor that has a batch and a position axis (or only a batch axis)."""
    batch, positions = guarded.shape
    shape = list(tensor.shape)
    if batch in shape:
        first = shape.index(batch)
        others = [i for i, n in enumerate(shape) if n == positions and i != first]
        if others:
            spread = guarded if first < others[0] else guarded.T
            view = [n if i in (first, others[0]) else 1 for i, n in enumerate(shape)]
            return spread.reshape(view).expand(shape)
        whole = guarded.all(1)
        if whole.any() and not whole.all():
            return whole.reshape([batch if i == first else 1 for i in range(len(shape))]).expand(shape)
    if shape and shape[0] == batch * positions:
        return guarded.reshape(-1, *([1] * (len(shape) - 1))).expand(shape)
    return None


def gap(one: Sequence[Tensor], other: Sequence[Tensor], guarded: Tensor) -> float:
    """Largest relative difference at guarded positions; of tensors without such positions nothing is asked."""
    worst = 0.0
    for a, b in zip(one, other, strict=False):
        mask = over(guarded, a)
        if mask is None or a.shape != b.shape or not mask.any() or not a.is_floating_point():
            if mask is not None and a.shape == b.shape and not torch.equal(a[mask], b[mask]):
                worst = max(worst, 1.0)
            continue
        size = float(a.double().abs().amax().clamp_min(1e-30))
        apart = float((a.double() - b.double()).abs()[mask].amax()) / size
        worst = max(worst, apart if apart > 1e-12 else 0.0)
    return worst
