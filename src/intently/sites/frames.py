"""Which module and which line of the user's code is making a call: read from the running stack, so that nothing is hooked."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Protocol, runtime_checkable

import torch

from intently.report import Source

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent.parent)
# These stand between a module and its caller, where a fast path is shadowed or flex attention watched.
_TRACING = tuple(str(Path(_HERE) / "sites" / name) for name in ("trace.py", "flex.py", "scripted.py"))
_MECHANISM = str(Path(_HERE) / "mechanism")  # a library to models that are built from it, as torch is
# Parts of this package that play the user: a model's modules come from there.
_PLAYING = (str(Path(_HERE) / "demo"), str(Path(_MECHANISM) / "layers"))


@runtime_checkable
class Placed(Protocol):
    """A model that runs node by node, and says itself which node is at work."""

    def node_at_work(self) -> tuple[str, Source | None]: ...


class Names:
    """The path of every module of a model, by identity."""

    def __init__(self, root: object):
        self._paths: dict[int, str] = {}
        self.placed = root if isinstance(root, Placed) else None
        self.alone = not isinstance(root, torch.nn.Module)
        if isinstance(root, torch.nn.Module):
            # A compiled module holds the user's module one step further in; its paths are the user's.
            inner = getattr(root, "_orig_mod", None)
            for name, module in (inner if isinstance(inner, torch.nn.Module) else root).named_modules():
                self._paths[id(module)] = name or "(root)"

    def path(self, module: object) -> str | None:
        return self._paths.get(id(module))


def locate(names: Names) -> tuple[str, Source | None]:
    """The path of the innermost module whose forward is running, and the innermost line that is the user's."""
    if names.placed is not None:
        return names.placed.node_at_work()
    frame: FrameType | None = sys._getframe(2)
    source: Source | None = None
    path: str | None = None
    while frame is not None and (path is None or source is None):
        code = frame.f_code
        file = code.co_filename
        ours = file.startswith(_HERE) and not file.startswith((*_PLAYING, _MECHANISM))
        if ours and not file.startswith(_TRACING):
            break  # beyond the call of the model lies whoever asked for the check
        library = file.startswith((_TORCH, _MECHANISM, "<")) or "/einops/" in file
        theirs = not ours and (not library or file.startswith(_PLAYING))
        if source is None and theirs:
            source = Source(file, frame.f_lineno)
        if path is None and not ours and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            # A function that is handed a module (a library's dispatcher) is not that module's own code.
            path = names.path(owner) if _is_method(owner, code) else None
            # A library's dispatcher (in site-packages, another file than the module's) says less than the module's line.
            if (
                path is not None
                and theirs
                and source is not None
                and source.file != file
                and "site-packages" in source.file
            ):
                source = Source(file, frame.f_lineno)
        frame = frame.f_back
    return path or "(root)", source


def _is_method(owner: object, code: CodeType) -> bool:
    return code.co_varnames[0] == "self" or any(
        getattr(vars(kind).get(code.co_name), "__code__", None) is code for kind in type(owner).__mro__
    )


def parameters_of(root: object) -> Mapping[str, torch.Tensor]:
    """Parameters and buffers by name, marked as such."""
    if not isinstance(root, torch.nn.Module):
        return {}
    named: dict[str, torch.Tensor] = {f"parameter:{n}": p for n, p in root.named_parameters()}
    named.update({f"buffer:{n}": b for n, b in root.named_buffers()})
    return named
