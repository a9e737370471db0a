"""Positions: how attention, blind to order by itself, is told where its tokens stand."""

from __future__ import annotations

from intently.mechanism.positions.alibi import Alibi, alibi, alibi_slopes
from intently.mechanism.positions.from_padding import positions_from_documents, positions_from_padding
from intently.mechanism.positions.layout import half_to_interleaved, interleaved_to_half
from intently.mechanism.positions.learned import LearnedPositions
from intently.mechanism.positions.relative import RelativeBias, relative_bucket
from intently.mechanism.positions.rotary import (
    Angles,
    Layout,
    Rotary,
    Scaling,
    rotary_angles,
    rotary_frequencies,
    rotate,
)
from intently.mechanism.positions.rotary_grid import grid_angles, grid_places, sectioned_angles
from intently.mechanism.positions.scaling import DynamicNTK, Linear, Llama3, LongRoPE, NTKAware, YaRN, yarn_mscale
from intently.mechanism.positions.sinusoidal import sinusoidal

__all__ = [
    "Alibi",
    "Angles",
    "DynamicNTK",
    "Layout",
    "LearnedPositions",
    "Linear",
    "Llama3",
    "LongRoPE",
    "NTKAware",
    "RelativeBias",
    "Rotary",
    "Scaling",
    "YaRN",
    "alibi",
    "alibi_slopes",
    "grid_angles",
    "grid_places",
    "half_to_interleaved",
    "interleaved_to_half",
    "positions_from_documents",
    "positions_from_padding",
    "relative_bucket",
    "rotary_angles",
    "rotary_frequencies",
    "rotate",
    "sectioned_angles",
    "sinusoidal",
    "yarn_mscale",
]
