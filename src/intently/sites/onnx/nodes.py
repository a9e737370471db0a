"""An ONNX graph in plain data: each node with its label, the line it was exported from, its attributes as torch sees them."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from intently.report import Source

# Between a softmax and the product with the values stand only these.
_AFTER_SOFTMAX = frozenset(
    ["Dropout", "Cast", "CastLike", "Where", "Mul", "Div", "Identity", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Slice", "Expand", "Add"]
)  # fmt: skip
_SOFTMAX = frozenset(["Softmax", "Exp"])
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class Reference:
    """An attribute of a node in a function's body that takes its value from the call."""

    name: str


@dataclass(frozen=True, eq=False)
class Step:
    """A node of a graph in plain data; `proto` is the node itself, for onnxruntime."""

    kind: str  # the operator, after its domain where that is not ONNX's own
    inputs: tuple[str, ...]  # "" where one is left out
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    label: str
    source: Source | None
    proto: Any


@dataclass(frozen=True)
class Graph:
    """Steps in their order, the tensors that are stored with them, and the names of what comes out."""

    steps: tuple[Step, ...]
    stored: Mapping[str, Tensor]
    outputs: tuple[str, ...]


def read(graph: Any) -> Graph:
    """A graph, or the graph of one branch of a node, in plain data."""
    return Graph(
        steps_of(graph.node), {i.name: tensor(i) for i in graph.initializer}, tuple(each.name for each in graph.output)
    )


def steps_of(sequence: Any) -> tuple[Step, ...]:
    return tuple(_step(node, number) for number, node in enumerate(sequence))


def _step(node: Any, number: int) -> Step:
    notes = {each.key: each.value for each in getattr(node, "metadata_props", ())}
    name = node.name or f"{node.op_type}_{number}"
    scope = _scope(notes)
    return Step(
        kind=node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}",
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        attributes={each.name: attribute(each) for each in node.attribute},
        label=f"{scope}/{name}" if scope and not name.startswith("/") else name,
        source=_source(notes),
        proto=node,
    )


def _scope(notes: Mapping[str, str]) -> str:
    """The path of the module whose forward a node was exported from; "" where nothing notes it."""
    noted = notes.get("pkg.torch.onnx.name_scopes")
    if noted is None:
        return ""
    try:
        scopes = ast.literal_eval(noted)
    except (SyntaxError, ValueError):
        return ""
    return str(scopes[-2]) if len(scopes) > 1 else ""


def _source(notes: Mapping[str, str]) -> Source | None:
    """The line of Python that a node was exported from, where the exporter notes it."""
    frames = _FRAME.findall(notes.get("pkg.torch.onnx.stack_trace", ""))
    return Source(frames[-1][0], int(frames[-1][1])) if frames else None


def softmax_before(step: Step, makers: Mapping[str, Step]) -> Step:
    """The softmax whose weights a product takes; the step itself where it takes none."""
    todo, seen = [step], 0
    while todo and seen < 32:
        current = todo.pop(0)
        seen += 1
        if current.kind in _SOFTMAX:
            return current
        if current is step or current.kind in _AFTER_SOFTMAX:
            todo += [makers[name] for name in current.inputs if name in makers]
    return step


def is_module_path(name: str) -> bool:
    """Whether an initialiser is named as a module names a parameter (`layers.0.temperature`), not as an exporter names a number."""
    return (
        "." in name
        and not name.startswith(("/", "onnx::"))
        and all(p.isidentifier() or p.isdigit() for p in name.split("."))
    )


def tensor(held: Any) -> Tensor:
    """A stored tensor."""
    from onnx import numpy_helper

    return from_numpy(numpy_helper.to_array(held))


def from_numpy(array: Any) -> Tensor:
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":  # a type that numpy borrows, and torch does not read
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(array)


def to_numpy(value: Tensor) -> Any:
    value = value.detach()
    if value.dtype != torch.bfloat16:
        return value.contiguous().numpy()
    import ml_dtypes  # comes with onnx

    return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def attribute(held: Any) -> Any:
    """The value of one attribute: numbers and lists as they are, tensors as torch's."""
    from onnx import AttributeProto, helper

    if held.ref_attr_name:
        return Reference(held.ref_attr_name)
    if held.type == AttributeProto.GRAPH:
        return read(held.g)
    if held.type == AttributeProto.TENSOR:
        return tensor(held.t)
    value = helper.get_attribute_value(held)
    return list(value) if not isinstance(value, (int, float, bytes, str)) else value


def constant(given: Mapping[str, Any]) -> Tensor:
    """The value of a `Constant` node, in any of its spellings."""
    name, value = next(iter(given.items()))
    if name == "value":
        return value
    return torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64)


def evaluate(step: Step, inputs: Sequence[Tensor | None], opsets: Mapping[str, int]) -> tuple[Tensor, ...]:
    """One node run by onnxruntime."""
    import onnxruntime
    from onnx import helper

    given = [(f"in{i}", to_numpy(t)) for i, t in enumerate(inputs) if t is not None]
    alone = type(step.proto)()
    alone.CopyFrom(step.proto)
    del alone.input[:], alone.output[:]
    alone.input.extend(f"in{i}" if t is not None else "" for i, t in enumerate(inputs))
    alone.output.extend(f"out{i}" if name else "" for i, name in enumerate(step.outputs))
    graph = helper.make_graph(
        [alone],
        "alone",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in given],
        [helper.make_empty_tensor_value_info(n) for n in alone.output if n],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()])
    model.ir_version = 10
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    made = iter(session.run(None, dict(given)))
    return tuple(from_numpy(next(made)) if name else torch.empty(0) for name in step.outputs)
