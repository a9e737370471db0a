"""Models behind `torch.compile`: judged as compiled, looked at in the module that was compiled, and held against it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from intently.targets.target import Switch

NOTE = "the model is judged as compiled; its calls are looked at in the module that was compiled"
# A check runs many shapes and types. At the limit that torch sets, it would go on uncompiled without a word.
_MOST_COMPILED = 256


def is_compiled(model: Any) -> bool:
    """Whether a module stands for another that torch compiles when it is called."""
    return isinstance(model, nn.Module) and isinstance(getattr(model, "_orig_mod", None), nn.Module)


def uncompiled() -> Switch:
    """The switch that runs the module as it was written."""
    from intently.targets.target import Switch

    return Switch("not compiled", enter=lambda model: torch.compiler.set_stance("force_eager"), backend=True)


def staying_compiled(model: Any) -> AbstractContextManager[None]:
    """A context in which a compiled model is compiled anew for every shape and type that asks for it."""
    return _without_limit() if is_compiled(model) else contextlib.nullcontext()


@contextlib.contextmanager
def _without_limit() -> Iterator[None]:
    from torch._dynamo import config

    with config.patch(recompile_limit=_MOST_COMPILED, accumulated_recompile_limit=8 * _MOST_COMPILED):
        yield
