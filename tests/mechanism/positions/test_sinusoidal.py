"""Sinusoidal positions against loops over the formula and against the tables of published models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from intently.mechanism.positions import sinusoidal


def by_the_formula(positions, width: int, base: float, order: str, inclusive: bool) -> np.ndarray:
    table = np.zeros((len(positions), width))
    for row, position in enumerate(positions):
        for p in range(width // 2):
            turn = position / base ** (p / (width // 2 - 1) if inclusive else 2 * p / width)
            at = (2 * p, 2 * p + 1) if order == "interleaved" else (p, p + width // 2)
            table[row, at[0]], table[row, at[1]] = math.sin(turn), math.cos(turn)
    return table


@pytest.mark.parametrize("order", ["interleaved", "concatenated"])
@pytest.mark.parametrize("inclusive", [False, True])
def test_equals_the_formula(order, inclusive):
    positions = [0, 1, 2, 3, 257, 100_000]
    options = {"base": 1e4, "order": order, "inclusive": inclusive}
    table = sinusoidal(torch.tensor(positions), 10, dtype=torch.float64, **options)
    np.testing.assert_allclose(table.numpy(), by_the_formula(positions, 10, **options), atol=1e-10)
    # The control: the other order and the other spacing are told apart.
    other = "concatenated" if order == "interleaved" else "interleaved"
    assert np.abs(table.numpy() - by_the_formula(positions, 10, 1e4, other, inclusive)).max() > 0.5
    assert np.abs(table.numpy() - by_the_formula(positions, 10, 1e4, order, not inclusive)).max() > 0.1


def test_four_tokens_by_hand():
    # Base 100, width 4: frequencies 1 and 1/10.
    table = sinusoidal(torch.arange(4), 4, base=100.0, dtype=torch.float64)
    for m in range(4):
        assert table[m].tolist() == pytest.approx([math.sin(m), math.cos(m), math.sin(m / 10), math.cos(m / 10)])


def test_equals_marian_and_whisper_and_gptj():
    pytest.importorskip("transformers")
    from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
    from transformers.models.whisper.modeling_whisper import sinusoids

    ours = sinusoidal(torch.arange(40), 16, order="concatenated")
    marian = MarianSinusoidalPositionalEmbedding(40, 16)
    torch.testing.assert_close(ours, marian.create_weight())
    torch.testing.assert_close(ours, create_sinusoidal_positions(40, 16), atol=1e-5, rtol=0)
    inclusive = sinusoidal(torch.arange(40), 16, order="concatenated", inclusive=True)
    torch.testing.assert_close(inclusive, sinusoids(40, 16), atol=1e-5, rtol=0)


def test_a_step_is_the_same_rotation_everywhere():
    # PE(m + k) = R(k) PE(m): what the paper chose sines for.
    table = sinusoidal(torch.arange(50), 6, dtype=torch.float64).unflatten(-1, (3, 2))
    turn = 7 * 1e4 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    sine, cosine = table[:-7, :, 0], table[:-7, :, 1]
    moved = torch.stack([sine * turn.cos() + cosine * turn.sin(), cosine * turn.cos() - sine * turn.sin()], dim=-1)
    torch.testing.assert_close(moved, table[7:])


def test_shapes_and_dtypes():
    assert sinusoidal(torch.zeros(2, 3, dtype=torch.int64), 8, dtype=torch.bfloat16).shape == (2, 3, 8)
    far = torch.tensor([256, 257])
    assert not sinusoidal(far, 8, dtype=torch.bfloat16)[0].equal(sinusoidal(far, 8, dtype=torch.bfloat16)[1])
    compiled = torch.compile(lambda at: sinusoidal(at, 8), fullgraph=True, backend="eager")
    assert compiled(far).equal(sinusoidal(far, 8))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: sinusoidal(torch.arange(3), 5), ValueError, "width is 5"),
        (lambda: sinusoidal(torch.arange(3), 2, inclusive=True), ValueError, "width is 2"),
        (lambda: sinusoidal(torch.arange(3), 4, order="mixed"), ValueError, "'mixed'"),
        (lambda: sinusoidal(torch.ones(3).half(), 4), TypeError, r"float16\[3\]"),
    ],
)
def test_refusals_say_what_is_wrong(call, error, says):
    with pytest.raises(error, match=says):
        call()
