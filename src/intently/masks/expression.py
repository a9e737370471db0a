"""What a mask is made of: small frozen terms, each of which answers "may this query see this key?" for index tensors.

A term never builds a matrix. It is asked at a `Place`, which holds broadcastable index tensors, so the same answer
serves a whole matrix (aranges that broadcast) and a FlexAttention `mask_mod` (scalars under `vmap`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor

LARGEST_WRITTEN_OUT = 4096
"""A table with more entries than this is named by its shape, not spelled out, in a phrase."""


@dataclass(frozen=True)
class Place:
    """Where a term is asked: index tensors that broadcast together, and the sizes where they are known."""

    sample: Tensor
    head: Tensor
    query: Tensor
    key: Tensor
    queries: int | None
    keys: int | None
    offset: int

    def known_keys(self, asker: Expression) -> int:
        if self.keys is None:
            raise ValueError(f"{asker} depends on the number of keys, which is not known here; pass keys=")
        return self.keys

    def known_queries(self, asker: Expression) -> int:
        if self.queries is None:
            raise ValueError(f"{asker} depends on the number of queries, which is not known here; pass queries=")
        return self.queries


@dataclass(frozen=True)
class Sizes:
    """The sizes of the matrix a reach is asked of, and the position of its first query."""

    queries: int
    keys: int
    offset: int = 0

    def clip(self, start: int, stop: int) -> range:
        """The half-open run inside the keys; `range(0)` when nothing of it is."""
        start, stop = max(start, 0), min(stop, self.keys)
        return range(start, stop) if start < stop else range(0)

    def hull(self, flags: Tensor) -> range:
        """From the first to the last True of `flags` `[key]`."""
        places = flags.nonzero().flatten()
        return self.clip(int(places[0]), int(places[-1]) + 1) if len(places) else range(0)


@dataclass(frozen=True, eq=False)
class Table:
    """A tensor as a value: compared and hashed by shape and content, wherever it lies."""

    data: Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return self.data.shape == other.data.shape and torch.equal(self.data.cpu(), other.data.cpu())

    def __hash__(self) -> int:
        return hash((tuple(self.data.shape), int(self.data.sum())))

    def to(self, device: torch.device | str) -> Table:
        return Table(self.data.to(device))

    def pick(self, *indices: Tensor) -> Tensor:
        # aten.index, not data[indices]: plain indexing by a 0-d tensor calls .item(), which vmap forbids.
        data = self.data.to(indices[-1].device)
        sizes = data.shape
        wrapped = [torch.zeros_like(index) if size == 1 else index for index, size in zip(indices, sizes, strict=True)]
        return torch.ops.aten.index(data, wrapped)

    def bits(self) -> str:
        """The table spelled out: `[110, 011]`, nested for more axes; its shape when that would be long."""
        if self.data.numel() > LARGEST_WRITTEN_OUT:
            return f"bool{list(self.data.shape)}"

        def spell(rows: Any) -> str:
            if rows and isinstance(rows[0], list):
                return "[" + ", ".join(spell(row) for row in rows) + "]"
            return "".join("1" if entry else "0" for entry in rows)

        return spell(self.data.tolist())


class Expression(ABC):
    """A term of the language. Frozen subclasses; equal when they say the same in the same words."""

    @property
    def parts(self) -> tuple[Expression, ...]:
        """The terms this one is made of."""
        return ()

    @abstractmethod
    def at(self, place: Place) -> Tensor:
        """True where the query may see the key."""

    @abstractmethod
    def __str__(self) -> str: ...

    def reach(self, rows: range, at: Sizes) -> range:
        """A run of keys outside of which no query in `rows` sees anything; `rows` is not empty."""
        return range(at.keys)

    def require(self, first: int, stop: int, keys: int) -> None:
        """Raise when the term says nothing about query positions `first..stop-1` or about `keys` keys."""
        for part in self.parts:
            part.require(first, stop, keys)

    @property
    def samples(self) -> tuple[int, ...]:
        """Batch sizes the terms insist on."""
        return tuple(size for part in self.parts for size in part.samples)

    @property
    def heads(self) -> tuple[int, ...]:
        """Numbers of heads the terms insist on."""
        return tuple(size for part in self.parts for size in part.heads)

    def to(self, device: torch.device | str) -> Expression:
        return self


def _covers(term: Expression, what: str, size: int, first: int, stop: int) -> None:
    if first < 0 or stop > size:
        asked = f"{what} {first} to {stop - 1}"
        raise ValueError(f"{term} speaks of {what} 0 to {size - 1}; asked about {asked}")


@dataclass(frozen=True)
class Full(Expression):
    def at(self, place: Place) -> Tensor:
        return place.key == place.key

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Nothing(Expression):
    def at(self, place: Place) -> Tensor:
        return place.key != place.key

    def reach(self, rows: range, at: Sizes) -> range:
        return range(0)

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True)
class Causal(Expression):
    """key <= query + offset."""

    offset: int = 0

    def at(self, place: Place) -> Tensor:
        return place.key <= place.query + self.offset

    def reach(self, rows: range, at: Sizes) -> range:
        return at.clip(0, rows.stop + self.offset)

    def __str__(self) -> str:
        return f"causal({self.offset})" if self.offset else "causal"


@dataclass(frozen=True)
class Back(Expression):
    """key > query - width: a limit on how far back, silent about later keys."""

    width: int

    def at(self, place: Place) -> Tensor:
        return place.key > place.query - self.width

    def reach(self, rows: range, at: Sizes) -> range:
        return at.clip(rows.start - self.width + 1, at.keys)

    def __str__(self) -> str:
        return f"window({self.width})"


@dataclass(frozen=True)
class Window(Expression):
    """query - left <= key <= query + right."""

    left: int
    right: int

    def at(self, place: Place) -> Tensor:
        return (place.key >= place.query - self.left) & (place.key <= place.query + self.right)

    def reach(self, rows: range, at: Sizes) -> range:
        return at.clip(rows.start - self.left, rows.stop + self.right)

    def __str__(self) -> str:
        return f"window({self.left}, {self.right})"


@dataclass(frozen=True)
class Chunks(Expression):
    """query // size == key // size."""

    size: int

    def at(self, place: Place) -> Tensor:
        return place.key // self.size == place.query // self.size

    def reach(self, rows: range, at: Sizes) -> range:
        return at.clip(rows.start // self.size * self.size, ((rows.stop - 1) // self.size + 1) * self.size)

    def __str__(self) -> str:
        return f"chunks({self.size})"


@dataclass(frozen=True)
class Prefix(Expression):
    """key < length, or key <= query."""

    length: int

    def at(self, place: Place) -> Tensor:
        return (place.key < self.length) | (place.key <= place.query)

    def reach(self, rows: range, at: Sizes) -> range:
        return at.clip(0, max(self.length, rows.stop))

    def __str__(self) -> str:
        return f"prefix({self.length})"


@dataclass(frozen=True)
class Keys(Expression):
    """The same few keys for every query: half-open runs of key positions."""

    runs: tuple[tuple[int, int], ...]

    def at(self, place: Place) -> Tensor:
        nowhere = place.key != place.key
        return reduce(lambda seen, run: seen | ((place.key >= run[0]) & (place.key < run[1])), self.runs, nowhere)

    def reach(self, rows: range, at: Sizes) -> range:
        return at.clip(self.runs[0][0], self.runs[-1][1])

    def __str__(self) -> str:
        return "keys(" + ", ".join(spell_run(run, "-") for run in self.runs) + ")"


@dataclass(frozen=True)
class Documents(Expression):
    """Query and key in the same document; `ids` is [position] or [batch, position]."""

    ids: Table

    def at(self, place: Place) -> Tensor:
        if self.ids.data.ndim == 1:
            return self.ids.pick(place.query) == self.ids.pick(place.key)
        return self.ids.pick(place.sample, place.query) == self.ids.pick(place.sample, place.key)

    def reach(self, rows: range, at: Sizes) -> range:
        if torch.compiler.is_compiling():  # a traced table has no numbers to look at
            return range(at.keys)
        # Ids count up in order of appearance, so the documents of neighbouring queries have neighbouring ids.
        ids = self.ids.data.reshape(-1, self.ids.data.shape[-1])
        asked = ids[:, rows.start : rows.stop]
        least, most = asked.amin(dim=1, keepdim=True), asked.amax(dim=1, keepdim=True)
        return at.hull(((ids >= least) & (ids <= most)).any(dim=0))

    def require(self, first: int, stop: int, keys: int) -> None:
        size = self.ids.data.shape[-1]
        _covers(self, "query positions", size, first, stop)
        _covers(self, "keys", size, 0, keys)

    @property
    def samples(self) -> tuple[int, ...]:
        return () if self.ids.data.ndim == 1 else (self.ids.data.shape[0],)

    def to(self, device: torch.device | str) -> Expression:
        return replace(self, ids=self.ids.to(device))

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Document lengths in order, when every document is one run and all samples agree."""
        if self.ids.data.ndim != 1:
            return None
        runs = [(name, len(list(run))) for name, run in groupby(self.ids.data.tolist())]
        return tuple(size for _, size in runs) if len({name for name, _ in runs}) == len(runs) else None

    def __str__(self) -> str:
        lengths = self.lengths
        if lengths is not None:
            return "documents(" + ", ".join(map(str, lengths)) + ")"
        if self.ids.data.numel() > LARGEST_WRITTEN_OUT:
            return f"documents(ids=int{list(self.ids.data.shape)})"
        return f"documents(ids={self.ids.data.tolist()})"


@dataclass(frozen=True)
class Kept(Expression):
    """Per sample, the first (side right) or last (side left) `lengths` keys; the pads lie on `side`."""

    lengths: tuple[int, ...]
    side: str
    table: Table

    def at(self, place: Place) -> Tensor:
        kept = self.table.pick(place.sample)
        return place.key < kept if self.side == "right" else place.key >= place.known_keys(self) - kept

    def reach(self, rows: range, at: Sizes) -> range:
        kept = max(self.lengths)
        return at.clip(0, kept) if self.side == "right" else at.clip(at.keys - kept, at.keys)

    def require(self, first: int, stop: int, keys: int) -> None:
        if max(self.lengths) > keys:
            raise ValueError(f"{self} keeps {max(self.lengths)} keys of a sample, but there are only {keys} keys")

    @property
    def samples(self) -> tuple[int, ...]:
        return (len(self.lengths),)

    def to(self, device: torch.device | str) -> Expression:
        return replace(self, table=self.table.to(device))

    def __str__(self) -> str:
        return ("left " if self.side == "left" else "") + "padding(" + ", ".join(map(str, self.lengths)) + ")"


@dataclass(frozen=True)
class KeptWhere(Expression):
    """Per sample, the keys where `keep` [batch, key] is True."""

    keep: Table

    def at(self, place: Place) -> Tensor:
        return self.keep.pick(place.sample, place.key)

    def reach(self, rows: range, at: Sizes) -> range:
        return range(at.keys) if torch.compiler.is_compiling() else at.hull(self.keep.data.any(dim=0))

    def require(self, first: int, stop: int, keys: int) -> None:
        _covers(self, "keys", self.keep.data.shape[1], 0, keys)

    @property
    def samples(self) -> tuple[int, ...]:
        return (self.keep.data.shape[0],)

    def to(self, device: torch.device | str) -> Expression:
        return replace(self, keep=self.keep.to(device))

    def __str__(self) -> str:
        return f"padding(keep={self.keep.bits()})"


@dataclass(frozen=True)
class Neighborhood(Expression):
    """Positions on a row-major grid, within `radius` along every axis."""

    shape: tuple[int, ...]
    radius: tuple[int, ...]

    def at(self, place: Place) -> Tensor:
        near = place.key == place.key
        stride = prod(self.shape)
        for size, radius in zip(self.shape, self.radius, strict=True):
            stride //= size
            step = place.query // stride % size - place.key // stride % size
            near = near & (step <= radius) & (step >= -radius)
        return near

    def reach(self, rows: range, at: Sizes) -> range:
        stride = prod(self.shape[1:])
        first, last = rows.start // stride - self.radius[0], (rows.stop - 1) // stride + self.radius[0]
        steps = [prod(self.shape[axis + 1 :]) * radius for axis, radius in enumerate(self.radius)]
        near = at.clip(rows.start - sum(steps), rows.stop + sum(steps))
        return at.clip(max(first * stride, near.start), min((last + 1) * stride, near.stop))

    def require(self, first: int, stop: int, keys: int) -> None:
        size = prod(self.shape)
        _covers(self, "query positions", size, first, stop)
        _covers(self, "keys", size, 0, keys)

    def __str__(self) -> str:
        radius = self.radius[:1] if len(set(self.radius)) == 1 else self.radius
        return f"neighborhood({'x'.join(map(str, self.shape))}, {'x'.join(map(str, radius))})"


@dataclass(frozen=True)
class Explicit(Expression):
    """A matrix given outright: [query, key], [batch, query, key] or [batch, heads, query, key]."""

    table: Table

    def at(self, place: Place) -> Tensor:
        leading = ((), (place.sample,), (place.sample, place.head))[self.table.data.ndim - 2]
        # Size-1 query and key axes are ordinary sizes here (require() checked them), so zeroing their index is right.
        return self.table.pick(*leading, place.query, place.key)

    def require(self, first: int, stop: int, keys: int) -> None:
        _covers(self, "query positions", self.table.data.shape[-2], first, stop)
        _covers(self, "keys", self.table.data.shape[-1], 0, keys)

    @property
    def samples(self) -> tuple[int, ...]:
        return () if self.table.data.ndim == 2 else (self.table.data.shape[0],)

    @property
    def heads(self) -> tuple[int, ...]:
        return () if self.table.data.ndim < 4 else (self.table.data.shape[1],)

    def to(self, device: torch.device | str) -> Expression:
        return replace(self, table=self.table.to(device))

    def __str__(self) -> str:
        return f"explicit({self.table.bits()})"


@dataclass(frozen=True)
class _Parent(Expression):
    """A term made of terms."""

    children: tuple[Expression, ...]

    @property
    def parts(self) -> tuple[Expression, ...]:
        return self.children

    def to(self, device: torch.device | str) -> Expression:
        return replace(self, children=tuple(child.to(device) for child in self.children))


@dataclass(frozen=True)
class And(_Parent):
    def at(self, place: Place) -> Tensor:
        return reduce(torch.logical_and, (child.at(place) for child in self.children))

    def reach(self, rows: range, at: Sizes) -> range:
        parts = [child.reach(rows, at) for child in self.children]
        return at.clip(max(part.start for part in parts), min(part.stop for part in parts))

    def __str__(self) -> str:
        return " & ".join(f"({child})" if isinstance(child, Or) else str(child) for child in self.children)


@dataclass(frozen=True)
class Or(_Parent):
    def at(self, place: Place) -> Tensor:
        return reduce(torch.logical_or, (child.at(place) for child in self.children))

    def reach(self, rows: range, at: Sizes) -> range:
        return _hull(child.reach(rows, at) for child in self.children)

    def __str__(self) -> str:
        return " | ".join(map(str, self.children))


@dataclass(frozen=True)
class Not(_Parent):
    def at(self, place: Place) -> Tensor:
        return ~self.children[0].at(place)

    def __str__(self) -> str:
        return "~" + _tight(self.children[0])


@dataclass(frozen=True)
class BottomRight(_Parent):
    """The child with the last query placed at the last key, whatever the numbers of both."""

    def at(self, place: Place) -> Tensor:
        shift = place.known_keys(self) - place.known_queries(self)
        return self.children[0].at(replace(place, query=place.query - place.offset + shift, offset=shift))

    def reach(self, rows: range, at: Sizes) -> range:
        shift = at.keys - at.queries
        moved = shift - at.offset
        child = range(rows.start + moved, rows.stop + moved)
        return self.children[0].reach(child, replace(at, offset=shift))

    def require(self, first: int, stop: int, keys: int) -> None:
        self.children[0].require(keys - (stop - first), keys, keys)

    def __str__(self) -> str:
        return "bottom-right " + _tight(self.children[0])


@dataclass(frozen=True)
class Each(_Parent):
    """One child per sample or per head."""

    axis: str

    def at(self, place: Place) -> Tensor:
        if len(self.children) == 1:  # size 1 broadcasts, as everywhere
            return self.children[0].at(place)
        index = place.sample if self.axis == "sample" else place.head
        answers = [child.at(place) & (index == number) for number, child in enumerate(self.children)]
        return reduce(torch.logical_or, answers)

    @property
    def samples(self) -> tuple[int, ...]:
        return super().samples + ((len(self.children),) if self.axis == "sample" else ())

    @property
    def heads(self) -> tuple[int, ...]:
        return super().heads + ((len(self.children),) if self.axis == "head" else ())

    def reach(self, rows: range, at: Sizes) -> range:
        return _hull(child.reach(rows, at) for child in self.children)

    def __str__(self) -> str:
        return f"per_{self.axis}(" + ", ".join(map(str, self.children)) + ")"


def without_bands(term: Expression) -> Expression:
    """The term with every limit on distance (a window, chunks) taken out."""
    if isinstance(term, (Back, Window, Chunks, Neighborhood)):
        return Full()
    if not isinstance(term, _Parent):
        return term
    children = tuple(without_bands(child) for child in term.children)
    if isinstance(term, And):
        children = tuple(child for child in children if child != Full()) or (Full(),)
        return children[0] if len(children) == 1 else And(children)
    return replace(term, children=children)


def _hull(runs: Iterable[range]) -> range:
    """The shortest run that holds them all."""
    filled = [run for run in runs if run]
    return range(min(run.start for run in filled), max(run.stop for run in filled)) if filled else range(0)


def _tight(term: Expression) -> str:
    return f"({term})" if isinstance(term, And | Or) else str(term)


def spell_run(run: tuple[int, int], dash: str = "–") -> str:
    """A half-open run in words: `3` or `3–5`."""
    return str(run[0]) if run[1] - run[0] == 1 else f"{run[0]}{dash}{run[1] - 1}"


def runs_of(flags: list[bool]) -> tuple[tuple[int, int], ...]:
    """The half-open runs of True in a list."""
    runs, start = [], 0
    for value, group in groupby(flags):
        stop = start + len(list(group))
        if value:
            runs.append((start, stop))
        start = stop
    return tuple(runs)
