"""An ONNX file as a target: onnxruntime runs it as it is, and a replay in torch shows its attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intently.errors import CannotCheck
from intently.sites.onnx import Replay, nodes
from intently.sites.onnx.operators import TYPES
from intently.targets.declared import Given, Reader
from intently.targets.program import Program
from intently.targets.program_target import as_target
from intently.targets.target import Switch, Target

SMALL = 20_000_000  # bytes; a smaller graph is run by one thread
LARGEST = 2_000_000_000  # bytes that one protobuf message may hold
_PASSING = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Flatten")
_QUANTISED = frozenset(["DynamicQuantizeLinear", "QuantizeLinear", "MatMulInteger", "QLinearMatMul", "MatMulNBits"])


class OnnxProgram(Program):
    """A graph in onnxruntime, called by the names of its inputs; the outputs come back by theirs."""

    def __init__(self, model: Any, path: Path | None = None):
        self._model = model
        self._path = path
        stored = {each.name for each in model.graph.initializer}
        self.inputs = tuple(_given(each) for each in model.graph.input if each.name not in stored)
        floats = [each.dtype for each in self.inputs if each.floating] + [
            TYPES[each.data_type] for each in model.graph.initializer if each.data_type in TYPES and len(each.dims) > 1
        ]
        self.dtype = next((d for d in floats if d.is_floating_point), torch.float32)
        self.parameters = sum(_count(each.dims) for each in model.graph.initializer)
        self.quantised = any(node.op_type in _QUANTISED for node in model.graph.node)
        self._plain = False  # whether the graph runs without the runtime's rewriting of it

    @cached_property
    def _session(self) -> Any:
        return self._opened(self._model, self._path)

    @cached_property
    def _unoptimised(self) -> Any:
        return self._opened(self._model, self._path, optimise=False)

    def _opened(self, model: Any, path: Path | None = None, *, optimise: bool = True) -> Any:
        ort = runtime()
        options = ort.SessionOptions()
        options.log_severity_level = 4
        if self.parameters < SMALL:
            options.intra_op_num_threads = 1
        if not optimise:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        source = str(path) if path is not None else model.SerializeToString()
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    def __call__(self, **arguments: Any) -> dict[str, Tensor]:
        return self._run(self._unoptimised if self._plain else self._session, arguments)

    def _run(self, session: Any, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        given = {n: nodes.to_numpy(v) for n, v in self.complete(arguments).items()}
        names = [each.name for each in session.get_outputs()]
        return {n: nodes.from_numpy(v) for n, v in zip(names, session.run(None, given), strict=True)}

    def reader(self, name: str) -> Reader:
        graph, names = self._model.graph, {name}
        for node in graph.node:
            if not names & set(node.input):
                continue
            if node.op_type in _PASSING:
                names |= set(node.output)
            elif node.op_type == "Gather":
                shape = _stored(graph).get(node.input[0], [])
                return Reader(rows=shape[0] if len(shape) == 2 else 0)
            elif node.op_type == "Conv":
                strides = next((a.ints for a in node.attribute if a.name == "strides"), [1])
                return Reader(channels=_stored(graph)[node.input[1]][1] * _groups(node), stride=int(strides[0]))
        return Reader()

    @property
    def resolution(self) -> float:
        return 2.0**-8 if self.quantised else super().resolution

    def notes(self) -> Iterator[str]:
        if self.quantised:
            yield "the graph computes in 8 bits: an effect smaller than that rounding is not seen"

    @cached_property
    def watched(self) -> nn.Module:
        return Replay(self._model)

    def shaken(self, step: float, seed: int) -> Callable[..., dict[str, Tensor]] | None:
        if self._model.ByteSize() > LARGEST:
            return None
        from onnx import numpy_helper

        moved = type(self._model)()
        moved.CopyFrom(self._model)
        generator = torch.Generator().manual_seed(seed)
        for held in moved.graph.initializer:
            value = nodes.tensor(held)
            if value.is_floating_point() and value.numel() > 1:
                noise = 1 + (torch.rand(value.shape, generator=generator) - 0.5) * 2 * step
                held.CopyFrom(numpy_helper.from_array(nodes.to_numpy((value * noise).to(value.dtype)), held.name))
        session = self._opened(moved)
        return lambda **arguments: self._run(session, arguments)

    @contextlib.contextmanager
    def as_written(self) -> Iterator[None]:
        """Run the graph as it is written, without the runtime's rewriting of it."""
        self._plain = True
        try:
            yield
        finally:
            self._plain = False


def load(path: Path, *, tokens: int | None = None) -> Target:
    """The target for an ONNX file. Raises `CannotCheck` in one sentence where it cannot be read, run or fed."""
    model = _read(path)
    try:
        program = OnnxProgram(model, path)
        _ = program._session
    except CannotCheck:
        raise
    except Exception as error:
        raise CannotCheck(f"onnxruntime cannot run {path}", cause=_said(error)) from error
    switch = Switch("graph as written", enter=lambda model: model.as_written(), backend=True)
    return replace(as_target(Target(program, name=path.name, tokens=tokens)), switches=(switch,))


def runtime() -> Any:
    """onnxruntime; `CannotCheck` where it is not installed."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise CannotCheck(
            f"an ONNX file needs the package {error.name}, which is not installed", hint="pip install 'intently[onnx]'"
        ) from error
    assert onnx is not None
    return onnxruntime


def _read(path: Path) -> Any:
    if not path.is_file():
        raise CannotCheck(f"there is no file {path}")
    runtime()
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path))
    except DecodeError as error:
        raise CannotCheck(
            f"{path} is not an ONNX model", cause="its bytes are no ModelProto", hint="export it again"
        ) from error
    except Exception as error:
        raise CannotCheck(f"{path} cannot be read", cause=_said(error)) from error
    if not model.graph.node:
        raise CannotCheck(f"{path} is not an ONNX model, or an empty one", cause="its graph has no node")
    return model


def _given(info: Any) -> Given:
    kind = info.type.tensor_type
    if kind.elem_type not in TYPES:
        raise CannotCheck(
            f"the graph's input {info.name} is no tensor of numbers", cause=f"its type has the code {kind.elem_type}"
        )
    shape = tuple(
        int(d.dim_value) if d.HasField("dim_value") and d.dim_value > 0 else d.dim_param or f"{info.name}.{i}"
        for i, d in enumerate(kind.shape.dim)
    )
    return Given(info.name, TYPES[kind.elem_type], shape)


def _stored(graph: Any) -> dict[str, list[int]]:
    """Shapes of the tensors stored in a graph, through the nodes that only turn their numbers into floats."""
    shapes = {each.name: list(each.dims) for each in graph.initializer}
    for node in graph.node:
        if node.op_type in ("DequantizeLinear", "Cast", "Identity") and node.input[0] in shapes:
            shapes[node.output[0]] = shapes[node.input[0]]
        elif node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            shapes[node.output[0]] = list(node.attribute[0].t.dims)
    return shapes


def _groups(node: Any) -> int:
    return next((int(a.i) for a in node.attribute if a.name == "group"), 1)


def _count(dims: Sequence[int]) -> int:
    total = 1
    for n in dims:
        total *= n
    return total


def _said(error: BaseException | None) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")
