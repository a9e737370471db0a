"""Ways to run a model that should not change its outputs: arguments that ask for weights, flags that choose a code path."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from intently.targets.compiled import is_compiled, uncompiled

if TYPE_CHECKING:
    from intently.targets.target import Switch, Target

_LOOKING = re.compile(
    r"(need|return|output|get|with|want)_?(weights?|attn|attention|attentions|att|scores?|maps?|probs?)(_?(weights?|maps?|probs?))?$|^(output_attentions|need_weights|return_attn)$"
)
_CACHING = re.compile(r"^(use_cache|return_cache|use_kv_cache)$")
_KERNEL = re.compile(
    r"flash|sdpa|fused|efficient|fast_?(path|attn|attention)|memory_eff|use_torch|scaled_dot", re.IGNORECASE
)


def switches_of(model: Any, target: Target) -> Iterator[Switch]:
    """The switches that a model's signature, attributes and layers offer."""
    from intently.targets.target import Switch

    if is_compiled(model):
        yield uncompiled()
    if any(s.backend for s in target.switches):
        return
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    for name, parameter in parameters.items():
        if isinstance(parameter.default, bool) and (_LOOKING.search(name) or _CACHING.match(name)):
            yield Switch(f"{name}={not parameter.default}", arguments={name: not parameter.default}, looking=True)
        elif isinstance(parameter.default, bool) and _KERNEL.search(name):
            yield Switch(f"{name}={not parameter.default}", arguments={name: not parameter.default}, backend=True)
    if not isinstance(model, nn.Module):
        return
    for attribute, value in _flags(model):
        yield Switch(f"{attribute}={not value}", enter=_flip(attribute, not value), backend=True)
    if any(isinstance(m, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) for m in model.modules()):
        yield Switch("gradients on", gradients=True, backend=True)


def _flags(model: nn.Module) -> list[tuple[str, bool]]:
    """Boolean attributes of modules that choose a kernel, and the value that most modules have."""
    found: dict[str, list[bool]] = {}
    for module in model.modules():
        if type(module).__module__.startswith("torch."):
            continue
        for name, value in vars(module).items():
            if isinstance(value, bool) and not name.startswith("_") and name != "training" and _KERNEL.search(name):
                found.setdefault(name, []).append(value)
    return [(name, sum(values) * 2 >= len(values)) for name, values in found.items()]


def _flip(attribute: str, value: bool) -> Callable[[Any], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def enter(model: nn.Module) -> Iterator[None]:
        before = [(m, m.__dict__[attribute]) for m in model.modules() if isinstance(m.__dict__.get(attribute), bool)]
        try:
            for module, _ in before:
                module.__dict__[attribute] = value
            yield
        finally:
            for module, old in before:
                module.__dict__[attribute] = old

    return enter
