"""The keyword arguments of `attention` as types, for functions that hand on all of them or some, with its meaning and defaults."""

from __future__ import annotations

from typing import Literal, TypedDict

from torch import Tensor

from intently._typing import Bool, Float
from intently.masks import Mask
from intently.mechanism.door import Bias

Name = Literal["stages", "fused", "blocked", "flex", "math", "oracle"]
Backend = Literal["auto", "stages", "fused", "blocked", "flex", "math", "oracle"]


class _Masked(TypedDict, total=False):
    mask: Mask | Bool[Tensor, "*mask_axes"] | None


class _Biased(TypedDict, total=False):
    bias: Float[Tensor, "*bias_axes"] | Bias | None


class _Scaled(TypedDict, total=False):
    scale: float | None
    softcap: float | None


class _Sunk(TypedDict, total=False):
    sink: Float[Tensor, "*sink_axes"] | float | None


class _Dropped(TypedDict, total=False):
    dropout: float


class _Run(TypedDict, total=False):
    backend: Backend


class TruthOptions(_Masked, _Biased, _Scaled, _Sunk, total=False):
    """All that decides the result: a truth is not random, and runs one way."""


class StageOptions(TruthOptions, _Dropped, total=False):
    """All but the backend."""


class Options(StageOptions, _Run, total=False):
    """All of them."""


class ScoreOptions(_Masked, _Biased, _Sunk, _Dropped, _Run, total=False):
    """For forms whose score leaves no scale or cap to choose."""


class BiaslessOptions(_Masked, _Sunk, _Dropped, _Run, total=False):
    """For forms that name scale, cap and bias themselves."""


class SinklessOptions(_Masked, _Biased, _Scaled, _Dropped, _Run, total=False):
    """For forms that say themselves what the sink is."""


class LocalOptions(_Biased, _Scaled, _Sunk, _Dropped, total=False):
    """For forms that make the mask and choose the backend themselves."""


class TileStageOptions(_Scaled, _Sunk, _Dropped, total=False):
    """Those that need no layout in tiles."""


class TileOptions(TileStageOptions, _Run, total=False):
    """The same with the choice of a backend."""
