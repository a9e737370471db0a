"""An ONNX file as a target: onnxruntime runs it as it is, and a replay in torch shows its attention."""

from __future__ import annotations

import contextlib
import inspect
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
from intently.targets import onnx_inputs
from intently.targets.discover import attempt
from intently.targets.key_masks import with_padding
from intently.targets.onnx_inputs import Given
from intently.targets.program import Program
from intently.targets.stream import Stream
from intently.targets.target import Switch, Target

SMALL = 20_000_000  # bytes; a smaller graph is run by one thread
LARGEST = 2_000_000_000  # bytes that one protobuf message may hold
_QUANTISED = frozenset(["DynamicQuantizeLinear", "QuantizeLinear", "MatMulInteger", "QLinearMatMul", "MatMulNBits"])
_OTHER_LENGTHS = (8, 16, 32, 64, 128, 512)


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
        self.resolution = 2.0**-8 if self.quantised else float(torch.finfo(self.dtype).eps)
        parameter = inspect.Parameter
        needed = [each.name for each in onnx_inputs.content(self.inputs)]
        self.__signature__ = inspect.Signature(
            [
                parameter(each.name, parameter.KEYWORD_ONLY, default=parameter.empty if each.name in needed else None)
                for each in self.inputs
            ]
        )
        self._plain = False  # whether the graph runs without the runtime's rewriting of it

    def __deepcopy__(self, memo: Any) -> OnnxProgram:
        return self

    @property
    def batch(self) -> int | None:
        """The number of samples that the graph declares; None where it is free."""
        first = onnx_inputs.content(self.inputs)[0].shape[0]
        return first if isinstance(first, int) else None

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

    def complete(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return onnx_inputs.completed(self.inputs, arguments)

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
    return as_target(program, path.name, tokens=tokens)


def as_target(program: OnnxProgram, name: str, *, tokens: int | None = None) -> Target:
    """A target with its streams, masks and fixed sizes found."""
    found = onnx_inputs.streams(program._model.graph, program.inputs, tokens=tokens)
    target = Target(program, name=name, streams=found, samples=program.batch, output=_main(found))
    target, program.samples = _running(target), target.samples
    switch = Switch("graph as written", enter=lambda model: model.as_written(), backend=True)
    target = with_padding(target)
    return replace(target, switches=(switch,), notes=tuple(_notes(program, target)))


def _running(target: Target) -> Target:
    """The target with lengths and a number of samples under which it runs: a free dimension may be fixed inside."""
    first: Exception | None = None
    for length in (None, *_OTHER_LENGTHS):
        streams = [s if s.length or s.kind == "pixels" else replace(s, length=length) for s in target.streams]
        choices: tuple[int | None, ...] = (target.samples,) if target.samples else (None, 1)
        for samples in choices:
            error = attempt(target, streams, samples=samples or 2)
            if error is None:
                return replace(target, streams=tuple(streams), samples=samples)
            first = first or error
    raise CannotCheck(
        f"{target.label} raised on every input tried for {', '.join(s.argument for s in target.streams)}",
        cause=_said(first),
        hint="--tokens VOCAB or --length N",
    ) from first


def _main(streams: Sequence[Stream]) -> str:
    """The stream whose positions the output follows: the decoder's, where one is named so."""
    names = [s.argument for s in streams]
    if streams[0].part == "query":
        return names[0]
    decoder = [n for n in names if n.startswith(("decoder_", "tgt", "target"))]
    own = [n for n in names if not n.startswith(("encoder_", "memory", "source", "src"))]
    return (decoder or own or names)[0]


def _notes(program: OnnxProgram, target: Target) -> Iterator[str]:
    if target.samples:
        yield f"the graph takes {target.samples} sample{'s' if target.samples > 1 else ''} at a time: what needs more, or one alone, is not tried"
    fixed = [s for s in target.streams if s.length]
    if fixed and fixed[0].kind != "pixels":
        yield f"the graph takes {fixed[0].length} positions of {fixed[0].argument} and no other number"
    if program.quantised:
        yield "the graph computes in 8 bits: an effect smaller than that rounding is not seen"
    names = [each.name for each in program.inputs]
    taken = {s.argument for s in target.streams} | {s.padding.argument for s in target.streams if s.padding}
    added = [n for n in names if n not in taken]
    if added:
        yield f"added to the content: {', '.join(added[:4])}{', …' if len(added) > 4 else ''}"


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


def _count(dims: Sequence[int]) -> int:
    total = 1
    for n in dims:
        total *= n
    return total


def _said(error: BaseException | None) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")
