"""An exported program (`torch.export`) as a target: run as it was saved, looked at node by node."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intently.errors import CannotCheck
from intently.sites.graph import GraphReplay
from intently.targets.declared import Given, Reader
from intently.targets.program import Program
from intently.targets.program_target import as_target
from intently.targets.target import Target

_PASSING = (
    "to",
    "_to_copy",
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "clone",
    "contiguous",
    "alias",
    "transpose",
    "permute",
)


class TorchProgram(Program):
    """An `ExportedProgram`, called by the names of its inputs."""

    def __init__(self, exported: ExportedProgram):
        self._exported = exported
        self._module = exported.module()
        nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
        names = exported.graph_signature.user_inputs
        self._names = [str(n) for n in names]
        values = {str(n): nodes[n].meta.get("val") for n in names if n in nodes}
        self.inputs = tuple(_given(n, v) for n, v in values.items() if isinstance(v, Tensor))
        self._others = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
        self._nodes = nodes
        floats = [p.dtype for p in self._module.parameters() if p.is_floating_point()]
        self.dtype = (floats + [each.dtype for each in self.inputs if each.floating] + [torch.float32])[0]
        self.parameters = sum(p.numel() for p in self._module.parameters())

    def __call__(self, **arguments: Any) -> Any:
        return self._run(self._module, arguments)

    def _run(self, module: nn.Module, arguments: dict[str, Any]) -> Any:
        whole = self.complete(arguments)
        form = self._exported.call_spec.in_spec
        assert form is not None
        args, kwargs = pytree.tree_unflatten([whole[name] for name in self._names], form)
        return module(*args, **kwargs)

    def complete(self, arguments: Any) -> dict[str, Any]:
        return {**super().complete(arguments), **self._others}

    @cached_property
    def watched(self) -> nn.Module:
        return GraphReplay(self._exported)

    def shaken(self, step: float, seed: int) -> Callable[..., Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            moved = copy.deepcopy(self._module)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in moved.parameters():
                if parameter.is_floating_point():
                    noise = torch.rand(parameter.shape, generator=generator).to(parameter) - 0.5
                    parameter.mul_(1 + noise * 2 * step)
        return lambda **arguments: self._run(moved, arguments)

    def reader(self, name: str) -> Reader:
        todo = [self._nodes[name]]
        while todo:
            node = todo.pop(0)
            for user in node.users:
                kind = str(user.target).rpartition("aten.")[2].partition(".")[0]
                if kind == "embedding" and user.args[1] is node:
                    return Reader(rows=_shape(user.args[0])[0])
                if kind in ("conv1d", "conv2d", "convolution"):
                    groups = user.args[8] if kind == "convolution" else (user.args[6] if len(user.args) > 6 else 1)
                    stride = user.args[3] if len(user.args) > 3 else [1]
                    return Reader(channels=_shape(user.args[1])[1] * int(groups), stride=int(stride[0]))  # type: ignore[arg-type, index]
                if kind in _PASSING:
                    todo.append(user)
        return Reader()


def _shape(node: Any) -> list[int]:
    assert isinstance(node, fx.Node)
    return [int(n) for n in node.meta["val"].shape]


def _given(name: str, value: Tensor) -> Given:
    return Given(name, value.dtype, tuple(n if isinstance(n, int) else str(n) for n in value.shape))


def discovered(target: Target) -> Target:
    """A target whose model is an `ExportedProgram`, ready to run."""
    return as_target(replace(target, model=TorchProgram(target.model), name=target.name or "ExportedProgram"))


def load(path: Path, *, tokens: int | None = None) -> Target:
    """The target for a saved program. Raises `CannotCheck` in one sentence where it cannot be read or fed."""
    if not path.is_file():
        raise CannotCheck(f"there is no file {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.load(str(path))
    except Exception as error:
        lines = str(error).splitlines()
        said = f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")
        raise CannotCheck(
            f"{path} is no program that torch.export saved, or not for this torch ({torch.__version__})", cause=said,
            hint="torch.export.save(torch.export.export(model, inputs), 'model.pt2')",
        ) from error  # fmt: skip
    return as_target(Target(TorchProgram(exported), name=path.name, tokens=tokens))
