"""A program: a computation as a file fixes it, which runs as one thing and is looked at as another."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from intently.targets.declared import Given, Reader


class Program(ABC):
    """What a file holds is called as it is, by the runtime that it was made for; nothing inside it can be watched there.

    `watched` is the same computation node by node, in which attention is found, described and edited. Types are fixed:
    promises are judged in `dtype`, with `resolution` as its unit of rounding. `parameters` is how many numbers it has
    learned.
    """

    inputs: tuple[Given, ...]
    dtype: torch.dtype
    parameters: int = 0
    watched: nn.Module

    @abstractmethod
    def __call__(self, **arguments: Any) -> Any:
        """Run it as it is."""

    @abstractmethod
    def shaken(self, step: float, seed: int) -> Callable[..., Any] | None:
        """The same program with each weight moved by up to `step`, relatively; None where that cannot be made."""

    @abstractmethod
    def reader(self, name: str) -> Reader:
        """What reads an input first."""

    @property
    def resolution(self) -> float:
        """The unit of rounding, relative."""
        return float(torch.finfo(self.dtype).eps)

    @property
    def __signature__(self) -> inspect.Signature:
        from intently.targets.declared import content

        needed = {each.name for each in content(self.inputs)}
        kind, absent = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
        parameters = [
            inspect.Parameter(each.name, kind, default=absent if each.name in needed else None) for each in self.inputs
        ]
        return inspect.Signature(parameters)

    def __deepcopy__(self, memo: Any) -> Program:
        return self  # nothing in it changes

    def complete(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with what a caller has to add to streams and masks (positions, an empty cache)."""
        from intently.targets.declared import completed

        return completed(self.inputs, arguments)

    def notes(self) -> Iterable[str]:
        """What a reader of the report should know of it."""
        return ()
