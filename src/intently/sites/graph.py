"""Runs a graph that torch exported, node by node, and says at any moment which module and line its node came from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from intently.report import Source

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_SUBSCRIPT = re.compile(r"^L\['self'\]\.?")


class GraphReplay(nn.Module):
    """An exported program as a module whose every operation is seen; arguments go by the names of its inputs."""

    def __init__(self, program: Any):
        super().__init__()
        self.program = program.module()
        self._names = [n.target for n in self.program.graph.nodes if n.op == "placeholder"]
        self._form = program.call_spec.out_spec
        self._interpreter: _Interpreter | None = None

    def forward(self, **arguments: Any) -> Any:
        self._interpreter = _Interpreter(self.program)
        try:
            flat = self._interpreter.run(*(arguments[name] for name in self._names), enable_io_processing=False)
        finally:
            self._interpreter = None
        return pytree.tree_unflatten(list(flat), self._form)

    def node_at_work(self) -> tuple[str, Source | None]:
        """The path of the module, and the line, that the node at work was exported from."""
        notes = self._interpreter.notes if self._interpreter is not None else {}
        frames = _FRAME.findall(notes.get("stack_trace") or "")
        scopes = list((notes.get("nn_module_stack") or {}).values())
        path = _SUBSCRIPT.sub("", scopes[-1][0]) if scopes else ""
        return path or "(root)", Source(frames[-1][0], int(frames[-1][1])) if frames else None


class _Interpreter(fx.Interpreter):
    """Keeps what is noted of the node at work."""

    notes: Mapping[str, Any]

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.notes = {}

    def run_node(self, n: fx.Node) -> Any:
        self.notes = n.meta
        return super().run_node(n)
