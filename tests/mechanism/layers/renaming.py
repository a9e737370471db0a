"""State dicts under other names, so that weights of published models can be put in our layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor


def renamed(state: Mapping[str, Tensor], names: Mapping[str, str], *, under: str = "") -> dict[str, Tensor]:
    """The entries that begin with `under`, each renamed by the first pattern of `names` that it matches; others go."""
    ours = {}
    for name, value in state.items():
        if not name.startswith(under):
            continue
        for pattern, place in names.items():
            if re.fullmatch(pattern, name[len(under) :]):
                ours[re.sub(pattern, place, name[len(under) :])] = value
                break
    return ours


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference: absolute, but relative to entries beyond 1, where float32 itself is coarser."""
    assert ours.shape == theirs.shape
    return float(((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).detach().max())
