"""A target made of a program: what its inputs hold, and the sizes under which it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from intently.errors import CannotCheck
from intently.targets import declared
from intently.targets.discover import attempt
from intently.targets.key_masks import with_padding
from intently.targets.program import Program
from intently.targets.signature import lengths_for
from intently.targets.stream import Stream
from intently.targets.target import Target, tensors_of

FAR = 2e4  # units of rounding by which a replay may differ
_OTHER_LENGTHS = (8, 16, 32, 64, 128, 512)


def as_target(target: Target) -> Target:
    """The target of a program with its streams, masks and fixed sizes found; `CannotCheck` where it cannot be fed."""
    program = target.model
    assert isinstance(program, Program)
    found = declared.streams(program.inputs, program.reader, tokens=target.tokens)
    first = declared.content(program.inputs)[0].shape[0]
    samples = first if isinstance(first, int) else None
    target = with_padding(_running(replace(target, streams=found, samples=samples, output=_main(found))))
    failure = _rehearsed(program, target)
    if failure is not None:
        program.watched = Unwatched(program)
        failure = f"no attention call could be looked at: {failure}; promises were tried from outside only"
    return replace(target, notes=(*target.notes, *_notes(program, target), *([failure] if failure else [])))


class Unwatched(nn.Module):
    """Stands in for a replay that cannot be made: the program itself, of which nothing is seen."""

    def __init__(self, program: Program):
        super().__init__()
        self._program = program

    def forward(self, **arguments: Any) -> Any:
        with (
            torch._C.DisableTorchFunction()
        ):  # what a tracer sees of the call is nothing, not the reading of its results
            return self._program(**arguments)


def _rehearsed(program: Program, target: Target) -> str | None:
    """Why the program's replay cannot stand for it; None where it gives the same outputs."""
    batch = target.batch(target.samples or 2, lengths_for(target.streams), dtype=program.dtype)
    try:
        with torch.no_grad():
            replayed = program.watched(**program.complete(batch.arguments))
    except Exception as error:
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return f"the graph cannot be replayed in torch ({said})"
    for mine, theirs in zip(tensors_of(replayed), tensors_of(program(**batch.arguments)), strict=True):
        mine, theirs = mine.detach().double(), theirs.detach().double()
        finite = theirs[torch.isfinite(theirs)]
        gap = (mine - theirs).abs().nan_to_num(posinf=0.0)
        if finite.numel() and float(gap.amax()) > FAR * program.resolution * float(
            finite.abs().amax().clamp_min(1e-30)
        ):
            return f"the graph replayed in torch differs by {float(gap.amax()):.2g}"
    return None


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
    said = str(first).splitlines()[0][:200] if str(first) else ""
    raise CannotCheck(
        f"{target.label} raised on every input tried for {', '.join(s.argument for s in target.streams)}",
        cause=f"{type(first).__name__}: {said}".rstrip(": "),
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


def _notes(program: Program, target: Target) -> Iterator[str]:
    yield from program.notes()
    if target.samples:
        count = "1 sample" if target.samples == 1 else f"{target.samples} samples"
        yield f"the graph takes {count} at a time: what needs another number is not tried"
    fixed = [s for s in target.streams if s.length]
    if fixed and fixed[0].kind != "pixels":
        yield f"the graph takes {fixed[0].length} positions of {fixed[0].argument} and no other number"
    taken = {s.argument for s in target.streams} | {s.padding.argument for s in target.streams if s.padding}
    added = [each.name for each in program.inputs if each.name not in taken]
    if added:
        yield f"added to the content: {', '.join(added[:4])}{', …' if len(added) > 4 else ''}"
