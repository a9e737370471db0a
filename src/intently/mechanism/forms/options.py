"""What every form hands on, untouched, to `attention`."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from intently.masks import Mask
from intently.mechanism.attention import Backend
from intently.mechanism.door import Bias


class _Shared(TypedDict, total=False):
    mask: Mask | Tensor | None
    dropout: float
    backend: Backend


class BiaslessOptions(_Shared, total=False):
    """Keyword arguments of `attention` for forms that name scale, cap and bias themselves."""

    sink: Tensor | float | None


class ScoreOptions(BiaslessOptions, total=False):
    """Keyword arguments of `attention` for forms whose score leaves no scale or cap to choose."""

    bias: Tensor | Bias | None


class SinklessOptions(_Shared, total=False):
    """Keyword arguments of `attention` for forms that say themselves what the sink is."""

    bias: Tensor | Bias | None
    scale: float | None
    softcap: float | None


class Options(SinklessOptions, total=False):
    """Keyword arguments of `attention`, with its meaning, defaults and errors."""

    sink: Tensor | float | None
