"""Positions from outside: the argument that takes them, how they follow from a key mask, and a run that counts them so."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from intently.report import Source
from intently.sites.frames import Names, locate
from intently.sites.ops import name_of
from intently.targets.signature import signature
from intently.targets.target import Target

_POSITIONS = re.compile(r"^(decoder_|tgt_|input_)?(positions?(_ids|_indices|_index)?|pos(_ids|_idx)?|input_pos)$")
_OFFSET = re.compile(r"^((position|pos|cache|rope|rotary|seq|past)_)?(offset|start(_pos(ition)?)?)$|^past_len(gth)?$")


def position_argument(target: Target, stream: str = "") -> str | None:
    """The optional argument that takes the positions of a stream, by its name; None where there is none."""
    names = _optional(target, _POSITIONS)
    side = "decoder_" if stream.startswith("decoder_") else ""
    own = [n for n in names if n.startswith("decoder_") == bool(side)]
    return own[0] if own else None


def offset_argument(target: Target) -> str | None:
    """The optional argument that takes the number of positions that went before."""
    return next(iter(_optional(target, _OFFSET)), None)


def _optional(target: Target, names: re.Pattern[str]) -> list[str]:
    streams = {s.argument for s in target.streams}
    return [
        n
        for n, p in signature(target.model).items()
        if names.match(n) and n not in streams and p.default is not inspect.Parameter.empty
    ]


def counted(kept: Tensor) -> Tensor:
    """Positions that number the real tokens of each sample from 0; `kept` is bool `[batch, position]`."""
    return (kept.long().cumsum(-1) - 1).clamp_min(0)


class Counting(TorchFunctionMode):
    """While it is entered, a table of positions added to the content is read at positions counted from the key mask.

    A table is what is the same in every sample where the content is not: rows of a learned embedding or of a buffer,
    `[position, width]` with or without a sample axis. `places` are the modules and lines where one was added.
    """

    def __init__(self, model: Any, kept: Tensor):
        super().__init__()
        self.positions = counted(kept)
        self.names = Names(model)
        self.places: dict[str, Source | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if name_of(func) == "add" and len(args) > 1 and all(isinstance(a, Tensor) for a in args[:2]):
            read = self._counted(args[0], args[1])
            if read is not None:
                path, source = locate(self.names)
                self.places.setdefault(path, source)
                return func(*read, *args[2:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _counted(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor] | None:
        """The two addends with the rows of the table among them taken at the counted positions."""
        if not (left.is_floating_point() and right.is_floating_point()) or max(left.dim(), right.dim()) != 3:
            return None
        samples, length = self.positions.shape
        whole = torch.broadcast_shapes(left.shape, right.shape)
        if whole[-1] == length or set(whole[:2]) != {samples, length}:
            return None
        first = whole[0] == samples
        apart = [(t.expand(whole) if first else t.expand(whole).transpose(0, 1)) for t in (left, right)]
        same = [bool((t == t[:1]).all()) for t in apart]
        if samples < 2 or same[0] == same[1]:
            return None
        table = apart[0 if same[0] else 1]
        rows = table.gather(1, self.positions[..., None].expand(table.shape))
        rows = rows if first else rows.transpose(0, 1)
        return (rows, right) if same[0] else (left, rows)
