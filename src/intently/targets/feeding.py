"""A model fed in pieces through its cache: in which pieces, and how it is handed what it saw before."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from intently.targets.stream import Batch, Padding
from intently.targets.target import Target

# How the position of a piece's first token is passed: a number, a tensor of one, of each token, of each in each sample.
StartForm = Literal["number", "tensor", "each", "batch each"]


@dataclass(frozen=True)
class Way:
    """One way to hand a model what it saw before; found by trying (see `intently.targets.ways`).

    `cache` is the argument that takes it, empty where the model keeps it inside itself; `empty` makes what stands there
    before the first piece, and without it nothing is passed. `returned` reads the new one off an output; without it
    the one passed in is changed in place.
    """

    name: str = "cached"
    cache: str = ""
    empty: Callable[[Any, Batch], Any] | None = None
    returned: Callable[[Any], Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)  # passed with every piece
    start: str = ""  # the argument that says where a piece begins
    start_form: StartForm = "number"
    whole_mask: bool = True  # the key mask speaks of every token so far, else of the new ones
    prepare: Callable[[Any, Batch], None] | None = None  # done to the model before the first piece
    encode: Callable[[Any, Batch], Mapping[str, Any]] | None = (
        None  # computed once from the source, passed with every piece
    )
    once: frozenset[str] = frozenset()  # streams given with the first piece only
    positions: str = ""  # an argument that may give the position of each token

    @property
    def inside(self) -> bool:
        """Whether the model itself remembers."""
        return not self.cache


@dataclass(frozen=True)
class Feed:
    """One sequence in pieces: `cuts` are their lengths. Without cuts it runs whole, with no cache.

    With `new` the sequence is a prompt, and the model's own `generate` feeds it as many tokens more.
    """

    way: Way
    name: str
    cuts: tuple[int, ...] = ()
    positions: bool = False  # the position of each token is passed, counted over the real ones
    new: int = 0

    def whole(self) -> Feed:
        """The same tokens in one forward without a cache: what the pieces are held against."""
        return dataclasses.replace(self, name="whole", cuts=())


def whole_batch(target: Target, batch: Batch, feed: Feed) -> Batch:
    """The batch of a whole forward, with the position of each token where the feed passes them."""
    if not feed.positions:
        return batch
    return dataclasses.replace(batch, arguments={**batch.arguments, feed.way.positions: _positions(target, batch)})


def _positions(target: Target, batch: Batch) -> Tensor:
    """Positions counted over the real tokens; those of pads are 0."""
    return (batch.kept[target.main.argument].long().cumsum(1) - 1).clamp_min(0)


def pieces(target: Target, batch: Batch, feed: Feed, given: Mapping[str, Any]) -> Iterator[Batch]:
    """The batch of each piece: its new tokens, the key mask so far, where it begins. `given` goes with every piece."""
    main, way, first = target.main, feed.way, 0
    places = _positions(target, batch) if feed.positions else None
    axis = 0 if main.sequence_first else 1
    for count in feed.cuts:
        last = first + count
        kept = {**batch.kept, main.argument: batch.kept[main.argument][:, :last]}
        arguments = dict(batch.arguments)
        for stream in target.streams:
            if stream is not main and first and stream.argument in way.once:
                arguments.pop(stream.argument)
        arguments.update({n: v for n, v in given.items() if v is not None})
        for name in (n for n, v in given.items() if v is None):
            arguments.pop(name, None)
        arguments[main.argument] = arguments[main.argument].narrow(axis, first, count)
        padding = main.padding
        if padding is not None and padding.argument in arguments:
            shown = kept[main.argument] if way.whole_mask else kept[main.argument][:, first:]
            arguments[padding.argument] = _mask(padding, shown, count)
        if way.start:
            arguments[way.start] = _start(way.start_form, batch.samples, first, last)
        if places is not None:
            arguments[way.positions] = places[:, first:last]
        lengths = {**batch.lengths, main.argument: count}
        yield Batch(arguments, lengths, batch.samples, kept, first)
        first = last


def _mask(padding: Padding, kept: Tensor, queries: int) -> Tensor:
    mask = padding.value(kept)
    return mask[:, -queries:] if padding.form == "batch query key" else mask


def _start(form: StartForm, samples: int, first: int, last: int) -> Any:
    if form == "number":
        return first
    if form == "tensor":
        return torch.tensor(first)
    each = torch.arange(first, last)
    return each if form == "each" else each.expand(samples, -1)


class Held:
    """What a model has seen so far, on the way from one piece to the next."""

    def __init__(self, model: Any, batch: Batch, way: Way):
        self._way = way
        if way.prepare is not None:
            way.prepare(model, batch)
        self.given: dict[str, Any] = {**way.arguments, **(way.encode(model, batch) if way.encode else {})}
        self._cache = way.empty(model, batch) if way.empty is not None else None
        self._passed = way.empty is not None

    def arguments(self) -> dict[str, Any]:
        return {self._way.cache: self._cache} if self._passed and self._way.cache else {}

    def after(self, output: Any) -> None:
        """Take the new cache off an output."""
        if self._way.returned is not None:
            self._cache, self._passed = self._way.returned(output), True


@contextlib.contextmanager
def unremembered(model: Any) -> Iterator[None]:
    """Put back on exit what the model's modules keep inside themselves: buffers, tensors and objects in attributes."""
    if not isinstance(model, nn.Module):
        yield
        return
    skipped = {"_parameters", "_modules", "training"}
    # One memory for all copies: what several modules share (a configuration) stays one thing, and no part is copied.
    memory: dict[int, Any] = {id(part): part for part in (*model.modules(), *model.parameters())}
    before = []
    for module in model.modules():
        plain = {k: v for k, v in vars(module).items() if k not in skipped and "_hooks" not in k}
        before.append((module, plain, {k: _copied(v, memory) for k, v in plain.items()}))
    try:
        yield
    finally:
        for module, plain, kept in before:
            for name in [n for n in vars(module) if n not in plain and n not in skipped and "_hooks" not in n]:
                del module.__dict__[name]
            module.__dict__.update(kept)


def _copied(value: Any, memory: dict[int, Any]) -> Any:
    if isinstance(value, (bool, int, float, str, type(None), type)) or callable(value):
        return value
    try:
        return copy.deepcopy(value, memory)
    except Exception:
        return value
