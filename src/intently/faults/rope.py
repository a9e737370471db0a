"""What the faults of rotary positions share: the maps that would be right, and how a wrong turn is told."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intently.faults.evidence import Examination
from intently.promises import Condition
from intently.promises.order_aware import rotations
from intently.report import Severity, Table, Witness
from intently.sites import Site
from intently.sites.rotation import Rotation

_SAME = 1e-3


def severity(seen: Examination) -> Severity:
    """A released architecture is trained with the turns it has."""
    return "warning" if seen.trial.target.known else "error"


def promise(seen: Examination, condition: Condition) -> tuple[str, str]:
    """The promise that shows it from outside, under its condition: pads in front, where the model takes them."""
    shifted = seen.broken("position-shift")
    return ("position-shift", shifted[0].name) if shifted else ("order-aware", condition.name)


def powers(step: Tensor, positions: Tensor, first: Tensor) -> Tensor:
    """Maps `[*positions, width, width]`: `first` at position 0, and turned by one more `step` at each next one."""
    low, high = int(positions.min()), int(positions.max())
    table = [torch.linalg.matrix_power(step, n) @ first for n in range(low, high + 1)]
    return torch.stack(table)[positions - low]


def spread_over(maps: Tensor, like: Rotation) -> Tensor:
    """Maps of positions, or of positions of each sample, for every sample and head."""
    maps = maps[None] if maps.dim() == 3 else maps
    return maps[:, None].expand(like.maps.shape)


def agreeing(query: Rotation, key: Rotation) -> Tensor | None:
    """Maps for both: those of the one that keeps norms, else their tables put to the pairs of features that share an angle."""
    for rotation in (query, key):
        if rotation.keeps_norm and rotation.varies(2) and rotation.turns:
            return rotation.maps
    return _paired_by_table(query.maps)


def _paired_by_table(maps: Tensor) -> Tensor | None:
    """The same sines and cosines, each pair made of two features that hold the same."""
    cosines = maps.diagonal(dim1=-2, dim2=-1)
    beside = maps - torch.diag_embed(cosines)
    touched = [int(i) for i in (beside.abs().amax(-1) > _SAME).flatten(0, -2).any(0).nonzero().flatten()]
    mates: dict[int, int] = {}
    for one in touched:
        alike = [j for j in touched if j != one and bool(((cosines[..., one] - cosines[..., j]).abs() < _SAME).all())]
        if len(alike) != 1:
            return None
        mates[one] = alike[0]
    right = maps.clone()
    for one, other in mates.items():
        if one > other or mates[other] != one:
            continue
        sine = beside[..., other, :].sum(-1)  # the later of two features gets the sine as it is
        for row, column, value in (
            (one, other, -sine),
            (other, one, sine),
            (one, one, cosines[..., one]),
            (other, other, cosines[..., one]),
        ):
            right[..., row, [c for c in mates if c not in (one, other)]] = 0
            right[..., row, column] = value
    return right


def pair_of(site: Site) -> tuple[Rotation, Rotation]:
    pair = rotations(site)
    assert pair is not None
    return pair


def witness(site: Site, sentence: str, values: dict[str, Any]) -> Witness:
    """The cosines of the first turned features of the queries, by position and head."""
    query = pair_of(site)[0] if pair_of(site)[0].turns else pair_of(site)[1]
    cosines = query.maps[0].diagonal(dim1=-2, dim2=-1)
    turned = (query.maps[0] - torch.diag_embed(cosines)).abs().amax(-1).flatten(0, -2).amax(0) > _SAME
    feature = int(turned.nonzero()[0])
    positions = range(min(4, cosines.shape[1]))
    table = Table(
        corner=f"cosine, feature {feature}",
        columns=tuple(f"position {p}" for p in positions),
        rows=tuple(
            (f"head {h}", tuple(round(float(cosines[h, p, feature]), 4) for p in positions))
            for h in range(min(3, cosines.shape[0]))
        ),
    )
    return Witness(sentence, table, values)
