"""What the inputs that a file declares hold: told by names, types and shapes, and by what reads them first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from intently.errors import CannotCheck
from intently.targets.signature import is_mask, looks_like_qkv
from intently.targets.stream import Stream

_CACHE = re.compile(r"past|cache(?!_position)|^mem_|_(key|value)s?_?\d+$")
_POSITIONS = re.compile(r"position|^pos(_ids)?$")
_KINDS = re.compile(r"token_type|segment")
_PASSING = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Flatten")


@dataclass(frozen=True)
class Given:
    """One input as a graph declares it; a dimension is a number, or the name of one that is free."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Reader:
    """What reads an input first: a table of so many rows, or a convolution of so many channels."""

    rows: int = 0
    channels: int = 0
    stride: int = 0


def content(inputs: Sequence[Given]) -> list[Given]:
    """The inputs that carry content: what is neither a mask nor something that follows from the others."""
    return [
        each
        for each in inputs
        if len(each.shape) >= 2
        and each.dtype != torch.bool
        and not is_mask(each.name)
        and not any(p.search(each.name) for p in (_CACHE, _POSITIONS, _KINDS))
    ]


def streams(
    inputs: Sequence[Given], reader_of: Callable[[str], Reader], *, tokens: int | None = None
) -> tuple[Stream, ...]:
    """A stream for each input that carries content. Raises `CannotCheck` where it is not clear what one holds."""
    chosen = content(inputs)
    if not chosen:
        raise CannotCheck(
            "no input of the graph carries content along a sequence",
            cause=f"it takes {', '.join(map(str, inputs)) or 'nothing'}",
        )
    if len(chosen) == 3 and looks_like_qkv([each.name for each in chosen]):
        return _of_query_key_value(chosen)
    return tuple(_stream(each, reader_of(each.name), tokens) for each in chosen)


def _of_query_key_value(chosen: Sequence[Given]) -> tuple[Stream, ...]:
    made = []
    for each, part in zip(chosen, ("query", "key", "value"), strict=True):
        if len(each.shape) not in (3, 4) or not isinstance(each.shape[-1], int):
            raise CannotCheck(f"the input {each} is neither [batch, length, width] nor [batch, heads, length, width]")
        heads = each.shape[1] if len(each.shape) == 4 else 0
        heads, length = (heads if isinstance(heads, int) else 3), _fixed(each.shape[-2])
        made.append(Stream(each.name, "features", length=length, width=each.shape[-1], heads=heads, part=part))  # type: ignore[arg-type]
    query, key, value = made
    return replace(query, follows=key.argument), key, replace(value, follows=key.argument)


def _stream(given: Given, reader: Reader, tokens: int | None) -> Stream:
    rank, shape = len(given.shape), given.shape
    if not given.floating and rank == 2:
        return Stream(given.name, "tokens", length=_fixed(shape[1]), vocab=tokens or reader.rows or 2)
    if given.floating and rank == 3 and reader.channels:
        length = _fixed(shape[2], reader.stride)
        return Stream(given.name, "frames", length=length, width=reader.channels, stride=reader.stride)
    if given.floating and rank == 3 and isinstance(shape[2], int):
        return Stream(given.name, "features", length=_fixed(shape[1]), width=shape[2])
    if given.floating and rank == 4 and reader.channels:
        height, width = (n if isinstance(n, int) else 4 * reader.stride for n in shape[2:])
        patch = reader.stride if reader.stride > 1 else max(1, height // 8)
        return Stream(given.name, "pixels", width=reader.channels, patch=patch, side=(height, width))
    raise CannotCheck(
        f"it is not clear what the graph's input {given} holds",
        cause="known are ids [batch, length], vectors [batch, length, width], pictures [batch, channels, height, width] "
        "and frames [batch, channels, time]",
    )


def _fixed(size: int | str, stride: int = 1) -> int | None:
    return size // stride if isinstance(size, int) else None


def completed(inputs: Sequence[Given], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with everything else that the graph asks for: positions from the mask, an empty cache, kinds of 0."""
    sizes: dict[str, int] = {}
    for each in inputs:
        value = arguments.get(each.name)
        if isinstance(value, Tensor):
            sizes.update((n, size) for n, size in zip(each.shape, value.shape, strict=False) if isinstance(n, str))
    whole = dict(arguments)
    for each in inputs:
        if each.name not in whole:
            whole[each.name] = _added(each, sizes, arguments)
    return {each.name: whole[each.name] for each in inputs}


def _added(each: Given, sizes: Mapping[str, int], arguments: Mapping[str, Any]) -> Tensor:
    first = next(v for v in arguments.values() if isinstance(v, Tensor) and v.dim() >= 2)
    batch, length = first.shape[:2]
    if _CACHE.search(each.name) and each.floating:
        shape = [sizes.get(n, batch if i == 0 else 0) if isinstance(n, str) else n for i, n in enumerate(each.shape)]
        if 0 in shape:
            return torch.zeros(shape, dtype=each.dtype)
    elif _POSITIONS.search(each.name) and not each.floating:
        mask = next((v for n, v in arguments.items() if is_mask(n) and v.shape == (batch, length)), None)
        if len(each.shape) == 2 and mask is not None:
            return (mask.to(torch.int64).cumsum(-1) - 1).clamp_min(0).to(each.dtype)
        places = torch.arange(length, dtype=each.dtype)
        return (
            places if len(each.shape) == 1 else places.expand(1 if each.shape[0] == 1 else batch, length).contiguous()
        )
    elif is_mask(each.name) or _KINDS.search(each.name):
        shape = [
            sizes.get(n, (batch, length)[min(i, 1)]) if isinstance(n, str) else n for i, n in enumerate(each.shape)
        ]
        make = torch.ones if is_mask(each.name) else torch.zeros
        return make(shape, dtype=each.dtype)
    elif len(each.shape) < 2 and not each.floating and all(n == 1 for n in each.shape):
        return torch.zeros(tuple(int(n) for n in each.shape), dtype=each.dtype)  # a flag that is off, a count of 0
    raise CannotCheck(
        f"the graph asks for {each}, and it is not clear what that holds",
        cause="added to the content are key masks, positions, kinds of tokens, empty caches and flags",
    )
