"""Runs an ONNX graph in torch, node by node, and says at any moment which node is at work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from intently.mechanism.onnx import backend
from intently.report import Source
from intently.sites.onnx import nodes
from intently.sites.onnx.operators import operator

_STAGED = ("Attention", "RotaryEmbedding")  # what the mechanism itself speaks


class Unreplayed(Exception):
    """A graph holds something that cannot be run here; the text says what."""


class Replay(nn.Module):
    """A graph as a module: the same weights, the same nodes, every one of them a torch function that can be followed.

    An operator that is not known here is left to onnxruntime, one node at a time; only what it reads and makes is then
    seen of it. `place` names the node at work, for those who look on.
    """

    def __init__(self, model: Any):
        super().__init__()
        self._graph = nodes.read(model.graph)
        self._opsets = {o.domain if o.domain != "ai.onnx" else "": o.version for o in model.opset_import}
        self._functions = {
            f"{f.domain}.{f.name}": (f, nodes.steps_of(f.node), {a.name: nodes.attribute(a) for a in f.attribute_proto})
            for f in model.functions
        }
        self._makers = {name: step for step in self._graph.steps for name in step.outputs}
        self._now: list[nodes.Step] = []  # the step at work, inside the calls of functions and branches around it
        self._constants: dict[str, Tensor] = {}
        for index, (name, value) in enumerate(self._graph.stored.items()):
            self._hold(name, value, index)
        for step in self._graph.steps:
            if step.kind == "Constant":
                self._hold(step.outputs[0], nodes.constant(step.attributes), len(self._constants))

    def _hold(self, name: str, value: Tensor, index: int) -> None:
        """A weight is a parameter, as it was in the model that was exported; a single number only where it was named like one."""
        learned = value.is_floating_point() and (value.numel() > 1 or nodes.is_module_path(name))
        if learned:
            parameter = nn.Parameter(value, requires_grad=False)
            self.register_parameter(f"p{index}", parameter)
            self._constants[name] = parameter
        else:
            self.register_buffer(f"b{index}", value)
            self._constants[name] = value

    def node_at_work(self) -> tuple[str, Source | None]:
        """The label of the node at work (of its softmax, where it multiplies weights with values), and the line it was exported from."""
        if not self._now:
            return "(root)", None
        outer, inner = self._now[0], self._now[-1]
        return nodes.softmax_before(outer, self._makers).label, inner.source or outer.source

    def forward(self, **arguments: Tensor) -> dict[str, Tensor]:
        known = self._run(self._graph.steps, {**self._constants, **arguments}, {})
        return {name: known[name] for name in self._graph.outputs}

    def _run(self, steps: Sequence[nodes.Step], known: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        for step in steps:
            if step.kind == "Constant" and step.outputs[0] in known:
                continue
            self._now.append(step)
            try:
                made = self._made(step, known, given)
            finally:
                self._now.pop()
            known.update((name, value) for name, value in zip(step.outputs, made, strict=False) if name)
        return known

    def _made(self, step: nodes.Step, known: dict[str, Any], given: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a step makes; `given` are the attributes of the call of the function that it stands in."""
        inputs = [known[name] if name else None for name in step.inputs]
        while inputs and inputs[-1] is None:
            inputs.pop()
        attributes = {n: given.get(v.name) if isinstance(v, nodes.Reference) else v for n, v in step.attributes.items()}
        attributes = {n: v for n, v in attributes.items() if v is not None}
        if step.kind in self._functions:
            return self._call(*self._functions[step.kind], inputs, attributes)
        if step.kind == "Constant":
            return (nodes.constant(attributes),)
        if step.kind == "If":
            branch: nodes.Graph = attributes["then_branch" if bool(inputs[0]) else "else_branch"]
            inner = self._run(branch.steps, {**known, **branch.stored}, given)
            return tuple(inner[name] for name in branch.outputs)
        if step.kind in _STAGED:
            staged = backend.step_of(step.proto, self._opsets[""])
            return tuple(staged.run(*inputs, **staged.attributes))
        function = operator(step.kind, self._opsets.get("", 1))
        if function is not None:
            try:
                made = function({**attributes, "outputs": len(step.outputs)}, *inputs)
                return made if isinstance(made, tuple) else (made,)
            except NotImplementedError:
                pass  # a form of it that is not known
        return self._alone(step, inputs)

    def _call(
        self, function: Any, steps: Sequence[nodes.Step], defaults: Mapping[str, Any], inputs: Sequence[Any], attributes: Mapping[str, Any]
    ) -> tuple[Any, ...]:  # fmt: skip
        """A function of the model's own: its body, with these inputs."""
        inner = dict(zip(function.input, [*inputs, *[None] * len(function.input)], strict=False))
        inner = self._run(steps, inner, {**defaults, **attributes})
        return tuple(inner[name] for name in function.output)

    def _alone(self, step: nodes.Step, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """A step that is not known here, run by onnxruntime by itself."""
        if any(isinstance(value, nodes.Graph) for value in step.attributes.values()):
            raise Unreplayed(f"it holds {step.kind}, a graph within the graph")

        def evaluated(*tensors: Tensor | None) -> tuple[Tensor, ...]:
            given = [t for t in tensors if t is not None]
            if has_torch_function(given):
                return handle_torch_function(evaluated, given, *tensors)
            return nodes.evaluate(step, tensors, self._opsets)

        evaluated.__name__ = step.kind
        try:
            return evaluated(*inputs)
        except Exception as error:
            raise Unreplayed(f"it holds {step.kind}, which is not known here") from error
