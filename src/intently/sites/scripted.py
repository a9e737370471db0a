"""Sees into functions scripted by torch.jit: the Python that they were made from runs a second time, to be looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from intently.sites.provenance import tensors_in

if TYPE_CHECKING:
    from intently.sites.trace import Tracer

_MADE_FROM = "_torchdynamo_inline"  # where torch.jit keeps the Python function, for torch.compile


@contextlib.contextmanager
def watching_scripted(tracer: Tracer) -> Iterator[None]:
    """The output stays that of the scripted call, unless an edit reached a call inside."""
    scripted: Any = torch.jit.ScriptFunction
    original = vars(scripted)["__call__"]
    inside = False

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        python = getattr(function, _MADE_FROM, None)
        if python is None:
            return original(function, *args, **kwargs)
        if inside:
            return python(*args, **kwargs)
        copies: list[tuple[Tensor, Tensor]] = []  # either run may write into its arguments
        others = _copied((args, kwargs), tracer, copies)
        state = torch.get_rng_state()
        with torch._C.DisableTorchFunction():
            output = original(function, *args, **kwargs)
        inside = True
        try:
            return _followed(tracer, output, lambda: python(*others[0], **others[1]), copies, state)
        finally:
            inside = False

    scripted.__call__ = call
    try:
        yield
    finally:
        scripted.__call__ = original


def _followed(
    tracer: Tracer, output: Any, python: Callable[[], Any], copies: list[tuple[Tensor, Tensor]], state: Tensor
) -> Any:
    """`output` with the history of the Python run; without one where that run fails or gives something else."""
    seen = len(tracer.calls)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            shadow = python()
    except Exception:  # what scripts understand is not all Python
        del tracer.calls[seen:]
        return output
    if any(c.key in tracer.settings.edits for c in tracer.calls[seen:]):
        return shadow
    written = [*tensors_in([output]), *(tensor for tensor, _ in copies)]
    read = [*tensors_in([shadow]), *(copy for _, copy in copies)]
    if not _same(written, read):  # scripts may ask whether they are scripted, and traces keep what they met
        del tracer.calls[seen:]
        return output
    tracer.adopt(written, read)
    return output


def _copied(value: Any, tracer: Tracer, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """The same arguments with copies of all tensors, which have the history of the originals."""
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunction():
            copy = value.clone()
        tracer.known.put(copy, tracer.known.of(value))
        copies.append((value, copy))
        return copy
    if isinstance(value, dict):
        return {k: _copied(v, tracer, copies) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_copied(v, tracer, copies) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _same(written: list[Tensor], read: list[Tensor]) -> bool:
    with torch._C.DisableTorchFunction():
        try:
            torch.testing.assert_close(written, read, equal_nan=True)
        except AssertionError:
            return False
    return True
