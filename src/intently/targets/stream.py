"""The sequences a model reads: how to make content for them, change one position, and say which positions are pads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["tokens", "features", "pixels", "frames"]
MaskForm = Literal["batch key", "batch 1 key", "batch 1 1 key", "batch query key", "lengths"]
TellingForm = Literal["numbers", "positions", "bounds"]


@dataclass(frozen=True)
class Padding:
    """The argument that says which keys are pads. `keep`: a true entry keeps the key; None until it is observed."""

    argument: str
    keep: bool | None = None
    dtype: torch.dtype = torch.long
    form: MaskForm = "batch key"
    optional: bool = True
    observed: bool = False  # the polarity was read off the model's behaviour

    def value(self, kept: Tensor) -> Tensor:
        """The argument's value for a bool [batch, key] that is True at real positions."""
        if self.form == "lengths":
            return kept.sum(-1)
        mask = kept if self.keep in (True, None) else ~kept
        if self.form == "batch 1 key":
            mask = mask[:, None]
        elif self.form == "batch 1 1 key":
            mask = mask[:, None, None]
        elif self.form == "batch query key":
            mask = mask[:, None].expand(-1, mask.shape[-1], -1)
        return mask.to(self.dtype)


@dataclass(frozen=True)
class Telling:
    """The argument that says which documents are packed into a row: a number for each position, positions that start
    again with each document, or the bounds of the documents."""

    argument: str
    form: TellingForm
    rank: int = 2  # [batch, position], or [position] for all samples
    optional: bool = True
    content: bool = False  # it indexes a table, as the numbers of a pair's two sentences do

    @property
    def promises(self) -> bool:
        """Whether a model that takes it claims to keep documents apart."""
        return self.form != "positions" and not self.content

    def value(self, samples: int, documents: Sequence[int]) -> Tensor:
        """The argument's value where `documents[i]` is the number of the document that position i belongs to."""
        numbers = torch.tensor(documents)
        if self.form == "bounds":
            lengths = torch.unique_consecutive(numbers, return_counts=True)[1].repeat(samples)
            return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
        # From 1 on, since 0 is the number of pads in many conventions.
        row = numbers + 1 if self.form == "numbers" else (numbers[:, None] == numbers).tril(-1).sum(-1)
        return row.expand(samples, -1).clone() if self.rank == 2 else row


@dataclass(frozen=True)
class Stream:
    """One sequence among a model's arguments.

    `tokens` are ids `[batch, length]` below `vocab`; `features` are `[batch, length, width]`, or `[length, batch, width]`
    when `sequence_first`, or `[batch, heads, length, width]` when `heads` is given; `pixels` are `[batch, channels,
    height, width]` cut in square patches; `frames` are `[batch, channels, time]`, `stride` steps to a position.
    """

    argument: str
    kind: Kind
    length: int | None = None  # None: free
    vocab: int = 0
    width: int = 0
    heads: int | None = None
    patch: int = 1
    side: tuple[int, int] = (0, 0)
    stride: int = 1
    sequence_first: bool = False
    follows: str | None = None  # the stream whose length this one shares (values and keys)
    part: Literal["", "query", "key", "value"] = ""  # of a plain function of q, k and v
    padding: Padding | None = None
    avoid: frozenset[int] = frozenset()  # ids that mean something special
    like: Tensor | None = None  # an example whose values outside the positions are kept (extra axes)

    def make(self, batch: int, length: int, seed: int, dtype: torch.dtype) -> Tensor:
        """Random content; sample b is the same whatever the number of samples."""
        axis = 1 if self.sequence_first else 0
        return torch.stack([self._sample(length, seed * 104729 + b, dtype) for b in range(batch)], axis)

    def _sample(self, length: int, seed: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "tokens":
            return self.ids[torch.randint(len(self.ids), (length,), generator=generator)]
        shape = list(self.shape(1, length))
        del shape[1 if self.sequence_first else 0]
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    @property
    def ids(self) -> Tensor:
        """Token ids that may be used as plain content."""
        plain = [i for i in range(self.vocab) if i not in self.avoid]
        return torch.tensor(plain or list(range(self.vocab)))

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        if self.kind == "pixels":
            return (batch, self.width, *self.side)
        if self.kind == "frames":
            return (batch, self.width, length * self.stride)
        if self.heads is not None:
            return (batch, self.heads, length, self.width) if self.heads else (batch, length, self.width)
        return (length, batch, self.width) if self.sequence_first else (batch, length, self.width)

    def positions(self, length: int) -> int:
        """How many positions there are to change."""
        if self.kind == "pixels":
            return (self.side[0] // self.patch) * (self.side[1] // self.patch)
        return length

    def place(self, sample: int, position: int) -> tuple[Any, ...]:
        """The index of one position of one sample."""
        if self.kind == "pixels":
            across = self.side[1] // self.patch
            row, column = divmod(position, across)
            p = self.patch
            return (sample, slice(None), slice(row * p, (row + 1) * p), slice(column * p, (column + 1) * p))
        if self.kind == "frames":
            return (sample, slice(None), slice(position * self.stride, (position + 1) * self.stride))
        if self.heads:
            return (sample, slice(None), position)
        return (position, sample) if self.sequence_first else (sample, position)

    def change(self, content: Tensor, sample: int, position: int, seed: int) -> Tensor:
        """A copy in which one position of one sample holds something else."""
        changed = content.clone()
        where = self.place(sample, position)
        generator = torch.Generator().manual_seed(seed * 7919 + position * 31 + sample)
        if self.kind == "tokens":
            ids = self.ids
            others = ids[ids != content[where]]
            if len(others):
                changed[where] = others[torch.randint(len(others), (1,), generator=generator)].reshape(())
            return changed
        part = content[where]
        changed[where] = torch.randn(part.shape, generator=generator, dtype=torch.float64).to(content.dtype)
        return changed


@dataclass(frozen=True)
class Batch:
    """Arguments for one call, with what is known about them."""

    arguments: Mapping[str, Any]
    lengths: Mapping[str, int]
    samples: int
    kept: Mapping[str, Tensor]  # per stream: bool [batch, position], True at real positions
    first: int | None = None  # of a piece fed through a cache: the position of its first token
