"""A backend for ONNX's own test runner: models made of `Attention` and `RotaryEmbedding` nodes, node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from intently.mechanism.onnx import attention_operator, rotary_operator

FIRST_OPSET = 23


@dataclass(frozen=True)
class Step:
    """One node of a graph, ready to run: a function of torch tensors, and the names of what goes in and out."""

    run: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[str, ...]  # "" where an optional input is left out
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A model that can be run again and again."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Tensor]
    device: torch.device

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], **_: Any) -> tuple[np.ndarray, ...]:
        """Run on numpy arrays, in the order of the graph's inputs or by name; the outputs in the graph's order."""
        if not isinstance(inputs, Mapping):
            if len(inputs) != len(self.inputs):
                raise ValueError(
                    f"onnx backend: {len(inputs)} inputs for the {len(self.inputs)} of the graph: {self.inputs}"
                )
            inputs = dict(zip(self.inputs, inputs, strict=True))
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise ValueError(f"onnx backend: no value for the graph's inputs {missing}")
        known = self.constants | {name: _to_torch(array, self.device) for name, array in inputs.items()}
        for step in self.steps:
            results = step.run(*(known[name] if name else None for name in step.inputs), **step.attributes)
            known.update(zip(step.outputs, results, strict=False))
        return tuple(_to_numpy(known[name]) for name in self.outputs)


class Backend:
    """The interface of `onnx.backend.base.Backend`, so that ONNX's runner can hold the five stages to its cases.

    The version of the operator follows the model's opset import; `version=` overrides it. Keyword arguments beyond
    those named here are what the runner passes for itself (tolerances), and are ignored.

    Example, as a test file of its own::

        import onnx.backend.test
        from intently.mechanism.onnx import Backend

        runner = onnx.backend.test.BackendTest(Backend, __name__)
        runner.include("test_attention").include("test_rotary_embedding").exclude("_expanded")
        globals().update(runner.test_cases)

    Source: onnx, "Implementing an ONNX backend".
    """

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **_: Any) -> bool:
        """Whether every node of the model is an operator, with attributes, that this backend knows."""
        try:
            _steps(model.graph.node, _opset(model.opset_import))
        except ValueError:
            return False
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", *, version: int | None = None, **_: Any) -> Prepared:
        """Check a model and make it ready to run.

        Raises:
            ImportError: onnx is not installed.
            ValueError: a node, an attribute, an opset or a device that this backend does not know.
        """
        onnx = _library()
        graph = model.graph
        # Our own sentence on an unknown attribute comes before that of the checker.
        steps = _steps(graph.node, _opset(model.opset_import) if version is None else version)
        if version is None:
            onnx.checker.check_model(model)
        place = _device(device)
        constants = {each.name: _to_torch(onnx.numpy_helper.to_array(each), place) for each in graph.initializer}
        return Prepared(
            steps=steps,
            inputs=tuple(each.name for each in graph.input if each.name not in constants),
            outputs=tuple(each.name for each in graph.output),
            constants=constants,
            device=place,
        )

    @classmethod
    def run_model(
        cls, model: Any, inputs: Sequence[Any] | Mapping[str, Any], device: str = "CPU", **kwargs: Any
    ) -> tuple[np.ndarray, ...]:
        """Prepare a model and run it once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: Any,
        inputs: Sequence[Any],
        device: str = "CPU",
        outputs_info: Any = None,
        *,
        version: int | None = None,
        opset_version: int | None = None,
        **_: Any,
    ) -> tuple[np.ndarray, ...]:
        """Run one node; `version` (or `opset_version`, as ONNX calls it) is that of the newest text when left out."""
        asked = [each for each in (version, opset_version) if each is not None]
        (step,) = _steps([node], asked[0] if asked else attention_operator.VERSIONS[-1])
        place = _device(device)
        named = [name for name in step.inputs if name]
        if len(named) != len(inputs):
            raise ValueError(f"onnx backend: {len(inputs)} inputs for the {len(named)} that the node names: {named}")
        known = {name: _to_torch(array, place) for name, array in zip(named, inputs, strict=True)}
        results = step.run(*(known[name] if name else None for name in step.inputs), **step.attributes)
        return tuple(_to_numpy(each) for name, each in zip(step.outputs, results, strict=False) if name)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """`"CPU"`, and `"CUDA"` or `"CUDA:1"` where torch finds it."""
        kind, _, index = device.partition(":")
        if kind == "CPU":
            return True
        return kind == "CUDA" and torch.cuda.is_available() and int(index or 0) < torch.cuda.device_count()


def _library() -> Any:
    try:
        import onnx
        import onnx.checker
        import onnx.numpy_helper
    except ImportError as error:
        raise ImportError(
            "onnx backend: the package onnx is not installed. Try: pip install 'intently[onnx]'"
        ) from error
    return onnx


def _opset(imports: Any) -> int:
    """The version of the default domain that a model imports."""
    versions = [each.version for each in imports if each.domain in ("", "ai.onnx")]
    if not versions:
        raise ValueError("onnx backend: the model imports no opset of the default domain, where Attention lives")
    return versions[0]


def _steps(nodes: Any, opset: int) -> tuple[Step, ...]:
    return tuple(step_of(node, opset) for node in nodes)


def step_of(node: Any, opset: int) -> Step:
    kind = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    if kind not in ("Attention", "RotaryEmbedding"):
        raise ValueError(
            f"onnx backend: node {node.name or kind!r} is {kind}; only Attention and RotaryEmbedding are known"
        )
    if opset < FIRST_OPSET:
        raise ValueError(f"onnx backend: opset {opset} has no {kind}; it came with opset {FIRST_OPSET}")
    attributes = _attributes(node)
    if kind == "RotaryEmbedding":
        _check_attributes(kind, attributes, rotary_operator.ATTRIBUTES, FIRST_OPSET)
        return Step(_rotary, tuple(node.input), tuple(node.output), attributes)
    version = _attention_version(opset)
    _check_attributes(kind, attributes, attention_operator.ATTRIBUTES, version)
    return Step(
        attention_operator.attention_op, tuple(node.input), tuple(node.output), attributes | {"version": version}
    )


def _attention_version(opset: int) -> int:
    """The text of `Attention` that an opset means: the newest one not newer than the opset."""
    known = attention_operator.VERSIONS
    if opset > known[-1]:
        newest = _library().defs.get_schema("Attention", max_inclusive_version=opset).since_version
        if newest > known[-1]:
            raise ValueError(
                f"onnx backend: opset {opset} has Attention in version {newest}; this backend knows {known}. "
                f"version={known[-1]} runs the model as that version would"
            )
    return max(version for version in known if version <= opset)


def _attributes(node: Any) -> dict[str, Any]:
    helper = _library().helper
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def _check_attributes(kind: str, given: dict[str, Any], since: dict[str, int], version: int) -> None:
    for name in given:
        if name not in since:
            raise ValueError(f"onnx backend: {kind} has no attribute {name}; it has {', '.join(sorted(since))}")
        if version < since[name]:
            raise ValueError(
                f"onnx backend: version {version} of {kind} does not know {name}; it came with version {since[name]}. "
                "Raise the model's opset import, or pass version="
            )


def _rotary(*inputs: Tensor, **attributes: Any) -> tuple[Tensor]:
    return (rotary_operator.rotary_embedding_op(*inputs, **attributes),)


def _device(device: str) -> torch.device:
    if not Backend.supports_device(device):
        raise ValueError(f'onnx backend: device is {device!r}; "CPU" is needed, or "CUDA" where torch finds one')
    return torch.device(device.lower())


def _to_torch(array: Any, device: torch.device) -> Tensor:
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":  # a type that numpy borrows, and torch does not read
        return torch.tensor(array.view(np.int16), device=device).view(torch.bfloat16)
    return torch.tensor(array, device=device)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes  # comes with onnx

    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
