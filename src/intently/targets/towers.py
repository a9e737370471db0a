"""Two towers: a stream that is read beside the main one, and meets it only in an output that both of them move."""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import Tensor

from intently.targets.signature import dtype_of, lengths_for
from intently.targets.stream import Stream
from intently.targets.target import Target, call, output_form, tensors_of

_OTHER = 5  # another seed
_LENGTH = 11  # positions of what is put aside: as many as no judged stream has, or its outputs were taken for theirs


def with_towers(target: Target) -> Target:
    """The target with such streams put aside: what follows the main one is not made from them, and is not meant to be.

    A memory that is ignored looks the same at the outputs of the main stream; but then no output is moved by both.
    """
    found = [s for s in target.sources if _stands_apart(target, s)]
    masked = [s for s in found if s.padding is not None]
    if masked and target.main.padding is None:  # the tower with more to keep is the one to judge
        target = dataclasses.replace(target, output=masked[0].argument)
        found = [s for s in target.sources if _stands_apart(target, s)]
    if not found:
        return target
    names = {s.argument for s in found}
    aside = [s for s in target.streams if names & {s.argument, s.follows}]
    said = f"{' and '.join(s.argument for s in found)} is read by a tower of its own, which meets that of {target.main.argument} at the end alone: it is run, and not judged here"
    return dataclasses.replace(
        target,
        streams=tuple(s for s in target.streams if s not in aside),
        aside=tuple(dataclasses.replace(s, length=s.length or _LENGTH) for s in aside),
        notes=(*target.notes, said),
    )


def _stands_apart(target: Target, stream: Stream) -> bool:
    base = _outputs(target)
    lengths = lengths_for(target.streams)
    parts = output_form(base, 2, target.main.positions(lengths[target.main.argument])).parts
    by_stream, by_main = (_moved(base, _outputs(target, s.argument)) for s in (stream, target.main))
    judged = {p.index for p in parts}
    return not judged & by_stream and bool(by_stream & by_main)


def _outputs(target: Target, anew: str = "") -> list[Tensor]:
    """Every floating tensor that one call gives, perhaps with other content in one stream."""
    lengths, dtype = lengths_for(target.streams), dtype_of(target.model)
    arguments = dict(target.batch(2, lengths, dtype=dtype).arguments)
    if anew:
        arguments[anew] = target.batch(2, lengths, seed=_OTHER, dtype=dtype).arguments[anew]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return list(tensors_of(call(target.model, arguments)))


def _moved(base: list[Tensor], other: list[Tensor]) -> set[int]:
    """Which tensors differ."""
    pairs = enumerate(zip(base, other, strict=True))
    return {i for i, (a, b) in pairs if not torch.equal(a.nan_to_num(), b.nan_to_num())}
