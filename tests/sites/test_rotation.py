"""Rotations measured at calls, held against angles computed by hand and against transformers' own tables."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intently.sites import Settings, Site, Sizes, tracing
from intently.sites.rotation import Rotation, meeting

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 5, 8
ANGLES = torch.arange(LENGTH, dtype=torch.float64)[:, None] / 10 ** (torch.arange(4, dtype=torch.float64) / 4)


def halves(x: Tensor, angles: Tensor) -> Tensor:
    table = torch.cat([angles, angles], -1)
    a, b = x.chunk(2, -1)
    return x * table.cos() + torch.cat([-b, a], -1) * table.sin()


def neighbours(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def mixed(x: Tensor, angles: Tensor) -> Tensor:
    table = angles.repeat_interleave(2, -1)
    a, b = x.chunk(2, -1)
    return x * table.cos() + torch.cat([-b, a], -1) * table.sin()


class Attention(nn.Module):
    def __init__(self, turn, fused: bool) -> None:
        super().__init__()
        self.turn, self.fused, self.qkv = turn, fused, nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = self.turn(q), self.turn(k)
        y = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT / WIDTH**0.5).softmax(-1) @ v
        return y.transpose(1, 2).flatten(2)


def site_of(turn, *, fused: bool = True) -> Site:
    torch.manual_seed(0)
    model, x = Attention(turn, fused), torch.randn(BATCH, LENGTH, HEADS * WIDTH, dtype=torch.float64)
    settings = Settings(keep=True, sizes=Sizes(BATCH, frozenset({LENGTH})))
    with torch.no_grad(), tracing(model, {"x": x}, settings) as tracer:
        model(x)
    return tracer.sites()[0]


def rotation(site: Site, name: str = "query") -> Rotation:
    found = site.rotation(name)
    assert found is not None
    return found


@pytest.mark.parametrize("fused", [True, False])
def test_maps_of_halves_are_the_angles(fused: bool) -> None:
    maps = rotation(site_of(lambda x: halves(x, ANGLES), fused=fused)).maps
    assert maps.shape == (BATCH, HEADS, LENGTH, WIDTH, WIDTH)
    expected = torch.zeros(LENGTH, WIDTH, WIDTH, dtype=torch.float64)
    for pair in range(4):
        expected[:, pair, pair] = expected[:, pair + 4, pair + 4] = ANGLES[:, pair].cos()
        expected[:, pair + 4, pair] = ANGLES[:, pair].sin()
        expected[:, pair, pair + 4] = -ANGLES[:, pair].sin()
    assert torch.allclose(maps, expected.expand_as(maps), atol=1e-12)


@pytest.mark.parametrize("turn", [halves, neighbours])
@pytest.mark.parametrize("fused", [True, False])
def test_true_rotations_go_by_position_and_meet_alike(turn, fused: bool) -> None:
    site = site_of(lambda x: turn(x, ANGLES), fused=fused)
    query, key = rotation(site), rotation(site, "key")
    assert [query.varies(axis) for axis in (0, 1, 2)] == [False, False, True]
    assert query.turns
    assert query.keeps_norm
    assert meeting(query, key) < 1e-12
    step = query.step(2)
    assert step is not None
    assert torch.allclose(torch.linalg.matrix_power(step, 3), query.maps[0, 0, 3], atol=1e-12)


def test_mixed_layouts_keep_no_norm() -> None:
    site = site_of(lambda x: mixed(x, ANGLES))
    query = rotation(site)
    assert not query.keeps_norm
    assert meeting(query, rotation(site, "key")) > 0.1


def test_angles_over_heads_do_not_go_by_position() -> None:
    found = rotation(site_of(lambda x: halves(x, ANGLES[:HEADS, None])))
    assert [found.varies(axis) for axis in (0, 1, 2)] == [False, True, False]
    assert found.step(1) is not None


def test_a_temperature_by_position_is_no_other_shape() -> None:
    factor = torch.linspace(1, 2, LENGTH, dtype=torch.float64)[:, None]
    site = site_of(lambda x: halves(x, ANGLES) * factor)
    assert rotation(site).keeps_norm
    assert meeting(rotation(site), rotation(site, "key")) < 1e-12


@pytest.mark.parametrize(
    "turn", [lambda x: x, lambda x: F.normalize(halves(x, ANGLES), dim=-1), lambda x: x.softmax(-1)]
)
def test_nothing_is_told_of_what_no_table_turns_or_is_not_linear(turn) -> None:
    assert site_of(turn).rotation("query") is None
