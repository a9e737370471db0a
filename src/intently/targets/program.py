"""A program: a computation as a file fixes it, which runs as one thing and is looked at as another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


class Program(ABC):
    """What a file holds is called as it is, by the runtime that it was made for; nothing inside it can be watched there.

    `watched` is the same computation node by node, in which attention is found, described and edited. Types are fixed:
    promises are judged in `dtype`, with `resolution` as its unit of rounding. `samples` is the number of samples that
    the program is bound to, None where it takes any; `parameters` is how many numbers it has learned.
    """

    dtype: torch.dtype
    resolution: float
    samples: int | None = None
    parameters: int = 0
    watched: nn.Module

    @abstractmethod
    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """Run it as it is."""

    def complete(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with what a caller has to add to these streams and masks (positions, an empty cache)."""
        return dict(arguments)

    @abstractmethod
    def shaken(self, step: float, seed: int) -> Callable[..., Any] | None:
        """The same program with each weight moved by up to `step`, relatively; None where that cannot be made."""
