"""Rotary positions against complex multiplication, against other people's code, and against the laws they are made for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intently.mechanism import attention, project
from intently.mechanism.positions import (
    Angles,
    Rotary,
    half_to_interleaved,
    interleaved_to_half,
    rotary_angles,
    rotary_frequencies,
    rotate,
)

SMALL = settings(max_examples=25, deadline=None, derandomize=True)
LAYOUTS = pytest.mark.parametrize("layout", ["half", "interleaved"])


def states_of(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_complex_numbers(states: np.ndarray, positions: np.ndarray, width: int, base: float, layout: str) -> np.ndarray:
    """Each pair as a complex number times exp(i m θ), in float64: nothing of it is ours."""
    result = states.astype(np.float64).copy()
    for p in range(width // 2):
        first, second = (p, p + width // 2) if layout == "half" else (2 * p, 2 * p + 1)
        turn = np.exp(1j * positions * base ** (-2 * p / width))  # [*batch, length]
        turned = (states[..., first] + 1j * states[..., second]) * np.expand_dims(turn, -2)
        result[..., first], result[..., second] = turned.real, turned.imag
    return result


# ---------------------------------------------------------------------------- right values


@LAYOUTS
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
)
def test_equals_complex_multiplication(layout, width, dtype, tolerance):
    # Widths 2 and 4 of 8 are partial rotations: the rest is passed on.
    states = states_of(2, 3, 5, 8, dtype=dtype)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 0, 100, 5000, 131071]])
    turned = Rotary(width, base=500.0, layout=layout)(states, positions)
    truth = by_complex_numbers(states.double().numpy(), positions.numpy(), width, 500.0, layout)
    assert turned.dtype == dtype
    np.testing.assert_allclose(turned.double().numpy(), truth, atol=tolerance, rtol=tolerance)
    assert turned[..., width:].equal(states[..., width:])


@pytest.mark.parametrize(("asked", "given"), [("half", "interleaved"), ("interleaved", "half")])
def test_the_comparison_tells_the_layouts_apart(asked, given):
    # The negative control: the silent fault that the layout argument is about.
    states, positions = states_of(1, 1, 5, 8), torch.arange(5)
    turned = Rotary(8, layout=given)(states, positions).numpy()
    truth = by_complex_numbers(states.numpy(), positions.numpy(), 8, 1e4, asked)
    assert np.abs(turned - truth).max() > 0.5
    assert np.abs(turned[..., 0, :] - truth[..., 0, :]).max() == 0  # and at position 0 nobody sees it


def test_a_hand_worked_quarter_turn():
    # Base chosen so that pair 1 turns a hundredth as fast; a position of π/2 turns (1, 0) of pair 0 into (0, 1).
    angles = rotary_angles(torch.tensor([np.pi / 2], dtype=torch.float64), 4, dtype=torch.float64)
    half = rotate(torch.tensor([[[1.0, 0, 0, 0]]], dtype=torch.float64), angles, layout="half")
    interleaved = rotate(torch.tensor([[[1.0, 0, 0, 0]]], dtype=torch.float64), angles, layout="interleaved")
    assert half.flatten().tolist() == pytest.approx([0, 0, 1, 0], abs=1e-15)
    assert interleaved.flatten().tolist() == pytest.approx([0, 1, 0, 0], abs=1e-15)


def test_half_equals_llama_and_interleaved_equals_gptj_in_transformers():
    pytest.importorskip("transformers")
    from transformers.models.gptj import modeling_gptj as gptj
    from transformers.models.llama import modeling_llama as llama

    states, positions = states_of(2, 3, 7, 8, dtype=torch.float32), torch.arange(7)
    angles = rotary_angles(positions, 8)
    cos, sin = (torch.cat([each, each], dim=-1)[None] for each in angles)
    theirs, _ = llama.apply_rotary_pos_emb(states, states, cos, sin)
    torch.testing.assert_close(rotate(states, angles), theirs)

    sin, cos = gptj.create_sinusoidal_positions(7, 8).chunk(2, dim=-1)
    theirs = gptj.apply_rotary_pos_emb(states.transpose(1, 2), sin[None], cos[None]).transpose(1, 2)
    torch.testing.assert_close(rotate(states, angles, layout="interleaved"), theirs)


# ---------------------------------------------------------------------------- laws


@st.composite
def cases(draw):
    """Width of the head, width rotated, base, layout, a seed, two positions and a shift."""
    width = draw(st.integers(1, 6))
    rotated = draw(st.integers(1, width))
    rotary = Rotary(2 * rotated, draw(st.floats(1.5, 1e6)), layout=draw(st.sampled_from(["half", "interleaved"])))
    place = st.integers(0, 10**5)
    return 2 * width, rotary, draw(st.integers(0, 2**16)), draw(place), draw(place), draw(place)


@SMALL
@given(case=cases())
def test_a_score_depends_on_the_difference_of_positions_alone(case):
    width, rotary, seed, i, j, shift = case
    query, key = states_of(2, 1, 1, width, seed=seed)
    plain = rotary(query, torch.tensor([i])) @ rotary(key, torch.tensor([j])).mT
    moved = rotary(query, torch.tensor([i + shift])) @ rotary(key, torch.tensor([j + shift])).mT
    torch.testing.assert_close(plain, moved, atol=1e-9, rtol=0)


@SMALL
@given(case=cases())
def test_lengths_are_kept_and_position_0_changes_nothing(case):
    width, rotary, seed, i, _, _ = case
    states = states_of(2, 3, 4, width, seed=seed)
    turned = rotary(states, torch.arange(i, i + 4))
    torch.testing.assert_close(turned.norm(dim=-1), states.norm(dim=-1))
    assert rotary(states, torch.zeros(4, dtype=torch.int64)).equal(states)


@SMALL
@given(case=cases())
def test_the_layouts_are_one_after_a_permutation(case):
    width, rotary, seed, i, _, _ = case
    states, positions = states_of(1, 3, 4, width, seed=seed), torch.arange(i, i + 4)
    features = states.transpose(-1, 0).reshape(width, -1)  # rows of a projection are the features of a head
    moved = interleaved_to_half(features, heads=1, width=rotary.width).view(width, 3, 4, 1).transpose(-1, 0)
    half = Rotary(rotary.width, rotary.base, layout="half")(moved, positions)
    interleaved = Rotary(rotary.width, rotary.base, layout="interleaved")(states, positions)
    back = half_to_interleaved(half.transpose(-1, 0).reshape(width, -1), heads=1, width=rotary.width)
    torch.testing.assert_close(back.view(width, 3, 4, 1).transpose(-1, 0), interleaved)


def test_converted_projections_give_the_same_attention():
    # Two kv heads under four query heads, rotated in part: what a converter of weights has to get right.
    states, positions = states_of(2, 5, 16), torch.arange(5)
    weights = {"query": states_of(4 * 6, 16, seed=1), "key": states_of(2 * 6, 16, seed=2)}
    biases = {"query": states_of(4 * 6, seed=3), "key": states_of(2 * 6, seed=4)}
    heads = {"query": 4, "key": 2}
    value = project(states, states_of(2 * 6, 16, seed=5), heads=2)

    def routed(layout: str, convert) -> torch.Tensor:
        rotary = Rotary(4, layout=layout)
        query, key = (
            rotary(
                project(states, convert(weights[s], heads[s]), convert(biases[s], heads[s]), heads=heads[s]), positions
            )
            for s in ("query", "key")
        )
        return attention(query, key, value)

    def as_it_is(weight, heads):
        return weight

    def converted(weight, heads):
        return interleaved_to_half(weight, heads, width=4)

    truth = routed("interleaved", as_it_is)
    torch.testing.assert_close(routed("half", converted), truth)
    assert (routed("half", as_it_is) - truth).abs().max() > 1e-2  # the control: unconverted weights are not the same


def test_conversion_equals_that_of_llama_in_transformers():
    # convert_llama_weights_to_hf: view(heads, width / 2, 2, model).transpose(1, 2)
    weight = states_of(3 * 8, 5)
    theirs = weight.view(3, 4, 2, 5).transpose(1, 2).reshape(24, 5)
    assert interleaved_to_half(weight, heads=3).equal(theirs)
    assert half_to_interleaved(theirs, heads=3).equal(weight)


# ---------------------------------------------------------------------------- precision


def test_positions_held_in_bfloat16_would_collide():
    # The silent fault: bfloat16 has 8 bits, so beyond 256 it counts in twos. 256 and 257 become one position.
    positions = torch.tensor([256, 257])
    assert positions.to(torch.bfloat16).diff().item() == 0
    naive = positions.to(torch.bfloat16).unsqueeze(-1) * rotary_frequencies(4).to(torch.bfloat16)
    assert naive.cos()[0].equal(naive.cos()[1])
    with pytest.raises(TypeError, match=r"bfloat16\[2\].*collide"):
        rotary_angles(positions.to(torch.bfloat16), 4)

    states = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16)
    turned = Rotary(4)(states, positions)
    assert turned.dtype == torch.bfloat16
    assert not turned[0, 0, 0].equal(turned[0, 0, 1])


def test_angles_stay_exact_far_out():
    # Float32 holds the angle 131071 to within 2**-7.9; the cosine would be off in the third digit.
    far = torch.tensor([131071])
    truth = np.cos(131071 * 1e4 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(rotary_angles(far, 8).cos[0].numpy(), truth, atol=1e-7)
    naive = torch.cos(far.float().unsqueeze(-1) * rotary_frequencies(8).float())[0].numpy()
    assert np.abs(naive - truth).max() > 1e-4
    assert rotary_angles(far, 8, dtype=torch.bfloat16).cos.dtype == torch.float32
    assert rotary_angles(far, 8, dtype=torch.float64).cos.dtype == torch.float64


# ---------------------------------------------------------------------------- every way of being called


def test_batched_and_shared_positions_and_edges():
    states = states_of(2, 3, 4, 6)
    rotary = Rotary(6)
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])
    both = rotary(states, positions)
    torch.testing.assert_close(both[1], rotary(states[1], positions[1]))
    torch.testing.assert_close(rotary(states, positions[:1]), rotary(states, positions[0]))
    assert rotary(states[:0], positions[0]).shape == (0, 3, 4, 6)
    assert rotary(states[..., :0, :], positions[0, :0]).shape == (2, 3, 0, 6)
    noncontiguous = states.transpose(1, 2).contiguous().transpose(1, 2)
    assert rotary(noncontiguous, positions).equal(both)
    expanded = states[:, :1].expand(2, 3, 4, 6)
    assert rotary(expanded, positions)[:, 0].equal(rotary(expanded, positions)[:, 2])


@LAYOUTS
def test_gradients_compile_vmap_and_autocast(layout):
    rotary, positions = Rotary(4, layout=layout), torch.arange(3)
    states = states_of(2, 1, 3, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotary(x, positions), (states,))
    plain = rotary(states, positions)
    compiled = torch.compile(lambda x, at: rotary(x, at), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(states, positions), plain)
    torch.testing.assert_close(torch.vmap(lambda x: rotary(x, positions))(states), plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert rotary(states.float(), positions).dtype == torch.float32


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: Rotary(3), ValueError, "width is 3"),
        (lambda: Rotary(4, base=1.0), ValueError, "base is 1.0"),
        (lambda: Rotary(4, layout="neox"), ValueError, "'neox'"),
        (lambda: rotary_angles(torch.ones(4).bool(), 4), TypeError, "positions_from_padding"),
        (lambda: rotary_angles([0, 1], 4), TypeError, "list"),
        (lambda: rotary_angles(torch.tensor(3), 4), ValueError, r"int64\[\]"),
        (lambda: Rotary(4)(torch.zeros(1, 2, 3, 4).long(), torch.arange(3)), TypeError, r"int64\[1, 2, 3, 4\]"),
        (lambda: Rotary(8)(torch.zeros(1, 2, 3, 4), torch.arange(3)), ValueError, "4 pairs are 8 features"),
        (lambda: Rotary(4)(torch.zeros(1, 3, 2, 4), torch.arange(3)), ValueError, "Heads and length swapped"),
        (lambda: Rotary(4)(torch.zeros(3, 4), torch.arange(3)), ValueError, "head axis"),
        (lambda: Rotary(4)(torch.zeros(2, 1, 3, 4), torch.zeros(5, 3)), ValueError, r"batch axes \[5\]"),
        (
            lambda: rotate(torch.zeros(1, 3, 4), Angles(torch.ones(3, 2), torch.ones(3, 1))),
            ValueError,
            "differ in shape",
        ),
        (lambda: interleaved_to_half(torch.zeros(10, 3), heads=4), ValueError, "10 rows.*4 heads"),
        (lambda: interleaved_to_half(torch.zeros(8, 3), heads=2, width=6), ValueError, "head's width 4"),
    ],
)
def test_refusals_say_what_is_wrong(call, error, says):
    with pytest.raises(error, match=says):
        call()
