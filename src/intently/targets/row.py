"""An output that holds the positions of several streams in a row: which of them are the main stream's, found by trying."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from intently.targets.stream import Batch
from intently.targets.target import OutputForm, Part, Target, tensors_of

_OTHER = 5  # another seed


def in_a_row(target: Target, batch: Batch, output: Any, run: Callable[[Batch], Any]) -> OutputForm | None:
    """How to read the main stream's positions off such an output; None where it is none, or nothing tells them apart.

    They stand first or last. Each output is moved by its own position more than by others', so with new content in
    one of the streams all outputs on one side must move more, by comparison, than any on the other.
    """
    main = target.main
    count = main.positions(batch.lengths[main.argument])
    for index, tensor in enumerate(tensors_of(output)):
        shape = list(tensor.shape)
        for others in _combined(target):
            row = count + sum(s.positions(batch.lengths[s.argument]) for s in others)
            if len(shape) < 3 or shape.count(row) != 1 or batch.samples not in shape:
                continue
            part = Part(index, shape.index(batch.samples), shape.index(row), tensor.numel() // (batch.samples * row))
            base = part.read(tensor)
            by_main, by_others = (
                _moved(part, base, run(_anew(target, batch, names)))
                for names in ({main.argument}, {s.argument for s in others})
            )
            share = by_main / (by_main + by_others).clamp_min(torch.finfo(torch.double).tiny)
            if float(share[:count].amin()) > float(share[count:].amax()):
                return OutputForm((dataclasses.replace(part, side="first"),))
            if float(share[-count:].amin()) > float(share[:-count].amax()):
                return OutputForm((dataclasses.replace(part, side="last"),))
    return None


def _moved(part: Part, base: Tensor, output: Any) -> Tensor:
    """How far each output stands from where it stood."""
    return (part.read(list(tensors_of(output))[part.index]) - base).abs().mean((0, 2))


def _combined(target: Target) -> Iterator[tuple[Any, ...]]:
    sources = target.sources
    for number in range(len(sources), 0, -1):
        yield from combinations(sources, number)


def _anew(target: Target, batch: Batch, names: set[str]) -> Batch:
    """The same batch with other content in some streams."""
    dtype = next((v.dtype for v in batch.arguments.values() if isinstance(v, Tensor) and v.is_floating_point()), None)
    other = target.batch(batch.samples, batch.lengths, seed=_OTHER, dtype=dtype or torch.float64)
    return dataclasses.replace(batch, arguments={**batch.arguments, **{n: other.arguments[n] for n in names}})
