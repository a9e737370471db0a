"""A thing to check: a model (or function) with its intent and a way to make inputs for it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from intently.errors import CannotCheck
from intently.intent import Intent
from intently.report import SiteRecord
from intently.targets.stream import Batch, Stream, Telling


@dataclass(frozen=True)
class Switch:
    """A way to run the same model that should not change its outputs: a backend, a flag, an argument that asks for weights.

    `enter(model)` is a context in which the model runs that way; `arguments` are passed besides. `looking` marks a
    switch that asks the model to show something (its weights, its cache), `backend` one that chooses a kernel.
    """

    name: str
    enter: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext
    arguments: Mapping[str, Any] = field(default_factory=dict)
    looking: bool = False
    backend: bool = False
    gradients: bool = False


@dataclass(frozen=True)
class Target:
    """A model or a function, with its intent and what is known about its inputs.

    Only `model` is needed: streams, widths and the padding argument are found by trying (see
    `intently.targets.discover`). `inputs` is an example call (a tensor, a tuple or a dict) where that is not enough;
    `padding` is `"argument"`, `"argument:keep"` or `"argument:hide"`; `tokens` a vocabulary size, `features` a width.

    >>> import torch
    >>> from intently import Intent, Mask, Target
    >>> target = Target(torch.nn.Linear(4, 4), Intent(Mask.causal()), features=4)
    >>> target.label
    'Linear'
    """

    model: Any
    intent: Intent | None = None
    inputs: Any = None
    padding: str | None = None
    tokens: int | None = None
    features: int | None = None
    length: int | None = None
    name: str = ""
    streams: tuple[Stream, ...] = ()
    aside: tuple[Stream, ...] = ()  # given besides, of a fixed length; the output is not made from them
    output: str | None = None  # the stream whose positions the output follows
    constants: Mapping[str, Any] = field(default_factory=dict)
    switches: tuple[Switch, ...] = ()
    samples: int | None = None  # the number of samples that the model is bound to; None where it takes any
    known: bool = False  # a released architecture: its scale and kernels are as published
    notes: tuple[str, ...] = ()
    tellings: tuple[Telling, ...] = ()  # how the model is told which documents are packed into a row
    documents: tuple[int, ...] = ()  # packed: the number of the document that each position belongs to

    @property
    def label(self) -> str:
        return self.name or (
            type(self.model).__name__
            if isinstance(self.model, nn.Module)
            else getattr(self.model, "__name__", "function")
        )

    def ready(self) -> Target:
        """This target with its streams found; the same one when they are known."""
        if self.streams:
            return self
        from intently.targets.discover import discover

        return discover(self)

    def stream(self, argument: str) -> Stream:
        return next(s for s in self.streams if s.argument == argument)

    @property
    def seen_through_mask(self) -> tuple[Stream, ...]:
        """Streams whose positions the intended mask speaks of: the main one, or keys and values of a plain function."""
        parts = tuple(s for s in self.streams if s.part in ("key", "value"))
        return parts or (self.main,)

    @property
    def sources(self) -> tuple[Stream, ...]:
        """Sequences that the output reads without following them: an encoder's input, a memory, a context, a picture."""
        main = self.main
        if any(s.part for s in self.streams):
            return ()
        return tuple(s for s in self.streams if s is not main and s.follows is None)

    @property
    def main(self) -> Stream:
        """The stream whose positions the output follows."""
        return self.stream(self.output) if self.output else self.streams[-1]

    @property
    def together(self) -> Tensor | None:
        """bool [query, key]: positions of one document; None where nothing is packed."""
        numbers = torch.tensor(self.documents)
        return numbers[:, None] == numbers if self.documents else None

    def told(self, samples: int, length: int) -> dict[str, Tensor]:
        """The arguments that tell of packed documents; of one document where the model cannot do without them."""
        given = [t for t in self.tellings if self.documents or not t.optional]
        return {t.argument: t.value(samples, self.documents or (0,) * length) for t in given}

    def batch(
        self,
        samples: int,
        lengths: Mapping[str, int],
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        kept: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        """Random inputs; `kept[stream]` is a bool `[batch, position]` for the streams whose mask is to be passed."""
        arguments: dict[str, Any] = {}
        for name, value in self.constants.items():
            arguments[name] = value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        real = {}
        for number, stream in enumerate(self.streams):
            length = lengths[stream.argument]
            arguments[stream.argument] = stream.make(samples, length, seed * 31 + number, dtype)
            given = (kept or {}).get(stream.argument)
            real[stream.argument] = (
                given if given is not None else torch.ones(samples, stream.positions(length), dtype=torch.bool)
            )
            if stream.padding is not None and (given is not None or not stream.padding.optional):
                arguments[stream.padding.argument] = stream.padding.value(real[stream.argument])
        for number, stream in enumerate(self.aside, len(self.streams)):
            length = stream.length or 1
            arguments[stream.argument] = stream.make(samples, length, seed * 31 + number, dtype)
            if stream.padding is not None and not stream.padding.optional:
                kept_whole = torch.ones(samples, stream.positions(length), dtype=torch.bool)
                arguments[stream.padding.argument] = stream.padding.value(kept_whole)
        return Batch({**arguments, **self.told(samples, lengths[self.main.argument])}, dict(lengths), samples, real)

    def sites(self) -> tuple[SiteRecord, ...]:
        """The attention calls of one forward on inputs made for it."""
        from intently.targets.running import trace_once

        return tuple(site.record() for site in trace_once(self))


def call(model: Any, arguments: Mapping[str, Any]) -> Any:
    """`model(**arguments)`; a parameter that takes no keyword is passed by position."""
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return model(*arguments.values())
    by_position, by_name = [], dict(arguments)
    for name, parameter in parameters.items():
        if (parameter.kind is parameter.POSITIONAL_ONLY and name in by_name) or (
            parameter.kind is parameter.VAR_POSITIONAL and name in by_name
        ):
            by_position.append(by_name.pop(name))
    return model(*by_position, **by_name)


# What an output gives back for the next call. It turns with positions, as no output should.
_CACHED = re.compile(r"^(layer_)?past|^presents?$|cache|^kvs?$|^mems$")


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Floating tensors of a model's output, the main one (`logits`, `last_hidden_state`) first; not those of a cache."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        first = [k for k in ("logits", "last_hidden_state") if k in output]
        for key in [*first, *(k for k in output if k not in first)]:
            if not (isinstance(key, str) and _CACHED.search(key)):
                yield from tensors_of(output[key])
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors_of(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from tensors_of({f.name: getattr(output, f.name) for f in dataclasses.fields(output)})
    elif hasattr(output, "__dict__") and not callable(output):
        yield from tensors_of(vars(output))


@dataclass(frozen=True)
class Part:
    """One tensor of an output: which, where its samples and positions run, and how many values it has at each."""

    index: int
    batch_axis: int | None
    length_axis: int | None
    width: int = 0
    side: Literal["", "first", "last"] = ""  # where positions of several streams stand in a row: the main stream's

    def read(self, tensor: Tensor, positions: int | None = None) -> Tensor:
        """`[batch, position, values]`; one position when the tensor has no sequence axis.

        Of a row of several streams those of the main one are read, as many as `positions`.
        """
        axes = [a for a in (self.batch_axis, self.length_axis) if a is not None]
        moved = tensor.detach().movedim(axes, list(range(len(axes))))
        if self.batch_axis is None:
            moved = moved.unsqueeze(0)
        if self.length_axis is None:
            moved = moved.unsqueeze(1)
        if self.side and positions is not None:
            moved = moved[:, :positions] if self.side == "first" else moved[:, -positions:]
        return moved.reshape(*moved.shape[:2], -1).double()


@dataclass(frozen=True)
class OutputForm:
    """Which tensors of the output are read, and their axes."""

    parts: tuple[Part, ...]

    def read(self, output: Any, positions: int | None = None) -> Tensor:
        """`[batch, position, values]`, the values of all parts side by side; `positions` are those of the main stream."""
        found = list(tensors_of(output))
        if self.parts[-1].index >= len(found):
            raise CannotCheck(f"the output holds {len(found)} floating tensors where more were seen before")
        read = [part.read(found[part.index], positions) for part in self.parts]
        alike = [r for r in read if r.shape[:2] == read[0].shape[:2]]
        return torch.cat(alike, -1) if len(alike) > 1 else read[0]

    def like(self, other: OutputForm) -> OutputForm:
        """Of these parts, one for each of `other`'s, matched by width: a switch may add outputs (weights, a cache)."""
        matched, left = [], list(self.parts)
        for part in other.parts:
            fitting = next((p for p in left if p.width == part.width), None)
            if fitting is not None:
                left.remove(fitting)
                matched.append(fitting)
        return OutputForm(tuple(matched)) if matched else OutputForm(self.parts[:1])


def output_form(output: Any, samples: int, length: int) -> OutputForm:
    """The form of an output, told by sizes that occur only once among batch, length and widths.

    Every tensor `[batch, position, values]` is read; where there is none, the first with a batch axis.
    """
    found = list(tensors_of(output))
    if not found:
        raise CannotCheck(
            f"the model's output ({type(output).__name__}) holds no floating tensor",
            hint="return a tensor, a tuple, a dict or a dataclass of tensors",
        )
    along, other, plain = [], None, []
    for index, tensor in enumerate(found):
        shape = list(tensor.shape)
        if samples not in shape:
            continue
        batch_axis = shape.index(samples)
        axes = [i for i, n in enumerate(shape) if n == length and i != batch_axis]
        width = tensor.numel() // (samples * length) if axes else 0
        if axes and tensor.dim() <= 3 and shape.count(length) == 1:
            along.append(Part(index, batch_axis, axes[0], width))
        elif axes and other is None:
            other = Part(index, batch_axis, axes[0], width)
        else:
            plain.append(Part(index, batch_axis, None))
    if along:
        return OutputForm(tuple(along))
    # A table of every sample against every other is no sample's own.
    plain.sort(key=lambda part: list(found[part.index].shape).count(samples) > 1)
    return OutputForm((other or next(iter(plain), Part(0, None, None)),))
