"""Rotary positions on a grid against numpy, Qwen2-VL and Pixtral, and the law that only differences count."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from intently.mechanism.positions import grid_angles, grid_places, rotary_angles, rotate, sectioned_angles


def in_numpy(places: np.ndarray, width: int, base: float, kind: str) -> np.ndarray:
    """The turn of every pair, `[length, width/2]`."""
    axes, turns = places.shape[1], []
    for a in range(axes):
        for p in range(width // 2 // axes):
            theta = base ** (-2 * p / (width / axes)) if kind == "shared" else base ** (-2 * (axes * p + a) / width)
            turns.append(places[:, a] * theta)
    return np.stack(turns, axis=1)


@pytest.mark.parametrize("kind", ["shared", "alternating"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_equals_numpy(kind, axes):
    places = torch.randint(0, 50, (7, axes))
    angles = grid_angles(places, 12, base=100.0, frequencies=kind, dtype=torch.float64)
    turns = in_numpy(places.numpy(), 12, 100.0, kind)
    np.testing.assert_allclose(angles.cos.numpy(), np.cos(turns))
    np.testing.assert_allclose(angles.sin.numpy(), np.sin(turns), atol=1e-12)
    if axes > 1:  # the control: the two conventions are told apart
        other = in_numpy(places.numpy(), 12, 100.0, "alternating" if kind == "shared" else "shared")
        assert np.abs(angles.cos.numpy() - np.cos(other)).max() > 0.01
    else:
        torch.testing.assert_close(angles, rotary_angles(places[:, 0], 12, base=100.0, dtype=torch.float64))


def test_equals_qwen2_vl_and_pixtral():
    pytest.importorskip("transformers")
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionRotaryEmbedding

    config = SimpleNamespace(rope_parameters={"rope_type": "axial", "rope_theta": 1e4}, head_dim=16)
    places = grid_places(3, 5)
    for theirs, kind in ((Qwen2VLVisionRotaryEmbedding, "shared"), (PixtralVisionRotaryEmbedding, "alternating")):
        cos, sin = theirs(config)(torch.zeros(1), places)
        ours = grid_angles(places, 16, frequencies=kind)
        torch.testing.assert_close(torch.cat([ours.cos, ours.cos], dim=-1), cos)
        torch.testing.assert_close(torch.cat([ours.sin, ours.sin], dim=-1), sin)


@pytest.mark.parametrize("kind", ["shared", "alternating"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_depend_on_differences_of_rows_and_columns_alone(kind, layout):
    query, key = torch.randn(2, 1, 6, 8, dtype=torch.float64)

    def scores(shift):
        angles = grid_angles(grid_places(2, 3) + torch.tensor(shift), 8, frequencies=kind, dtype=torch.float64)
        return rotate(query, angles, layout=layout) @ rotate(key, angles, layout=layout).mT

    torch.testing.assert_close(scores([0, 0]), scores([40, 7]))
    # The control: rows and columns are not the same thing.
    swapped = grid_angles(grid_places(2, 3).flip(-1), 8, frequencies=kind, dtype=torch.float64)
    assert (
        rotate(query, swapped, layout=layout) @ rotate(key, swapped, layout=layout).mT - scores([0, 0])
    ).abs().max() > 0.1


def test_grid_places_read_line_by_line():
    assert grid_places(2, 3).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert grid_places(0, 3).shape == (0, 2)


def test_sections_by_numpy_and_text_is_ordinary():
    places = torch.randint(0, 50, (2, 7, 3))
    angles = sectioned_angles(places, (1, 3, 2), base=100.0, dtype=torch.float64)
    for pair, axis in enumerate([0, 1, 1, 1, 2, 2]):
        turn = places[..., axis].numpy() * 100.0 ** (-2 * pair / 12)
        np.testing.assert_allclose(angles.sin[..., pair].numpy(), np.sin(turn), atol=1e-12)
    text = torch.arange(7)[:, None].expand(7, 3)
    torch.testing.assert_close(sectioned_angles(text, (1, 3, 2)), rotary_angles(torch.arange(7), 12))


def test_compiles():
    compiled = torch.compile(
        lambda at: (*grid_angles(at, 8), *sectioned_angles(at, (1, 3))), fullgraph=True, backend="eager"
    )
    places = grid_places(2, 3)
    torch.testing.assert_close(compiled(places), (*grid_angles(places, 8), *sectioned_angles(places, (1, 3))))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: grid_angles(grid_places(2, 2), 6), ValueError, "a multiple of 4"),
        (lambda: grid_angles(torch.arange(4), 8), ValueError, r"int64\[4\]"),
        (lambda: grid_angles(grid_places(2, 2), 8, frequencies="mixed"), ValueError, "'mixed'"),
        (lambda: grid_angles(grid_places(2, 2).half(), 8), TypeError, "collide"),
        (lambda: sectioned_angles(grid_places(2, 2), (1, 1, 1)), ValueError, "3 sections"),
    ],
)
def test_refusals_say_what_is_wrong(call, error, says):
    with pytest.raises(error, match=says):
        call()
