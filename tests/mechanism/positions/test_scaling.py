"""Context scaling against plain numpy, against what Hugging Face computes for published configurations, and its laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from intently.mechanism.positions import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    NTKAware,
    Rotary,
    YaRN,
    rotary_angles,
    rotary_frequencies,
    yarn_mscale,
)


def plain(width: int, base: float) -> np.ndarray:
    return np.array([base ** (-2 * p / width) for p in range(width // 2)])


def frequencies(scaling, width: int, base: float, length: int = 8) -> np.ndarray:
    return scaling.frequencies(width, base, torch.arange(length)).numpy()


# ---------------------------------------------------------------------------- transcriptions in numpy


def yarn_in_numpy(width, base, factor, trained, fast, slow, truncate) -> np.ndarray:
    def pair_that_turns(times):
        return width * np.log(trained / (2 * np.pi * times)) / (2 * np.log(base))

    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    result = []
    for p, theta in enumerate(plain(width, base)):
        ramp = min(max((p - low) / (high - low), 0), 1)
        result.append(theta * (1 - ramp) + theta / factor * ramp)
    return np.array(result)


def llama3_in_numpy(width, base, factor, trained, low, high) -> np.ndarray:
    result = []
    for theta in plain(width, base):
        wavelength = 2 * np.pi / theta
        if wavelength < trained / high:
            result.append(theta)
        elif wavelength > trained / low:
            result.append(theta / factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            result.append((1 - smooth) * theta / factor + smooth * theta)
    return np.array(result)


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(frequencies(Linear(4.0), 64, 1e4), plain(64, 1e4) / 4)


def test_ntk_keeps_the_fastest_and_divides_the_slowest_by_the_factor():
    scaled = frequencies(NTKAware(8.0), 64, 1e4)
    np.testing.assert_allclose(scaled, plain(64, 1e4 * 8 ** (64 / 62)))
    assert scaled[0] == 1.0
    assert scaled[-1] == pytest.approx(plain(64, 1e4)[-1] / 8)


def test_dynamic_ntk_is_nothing_within_the_trained_length_and_ntk_beyond():
    scaling = DynamicNTK(1.0, trained=16)
    np.testing.assert_allclose(frequencies(scaling, 64, 1e4, length=16), plain(64, 1e4))
    np.testing.assert_allclose(frequencies(scaling, 64, 1e4, length=64), frequencies(NTKAware(4.0), 64, 1e4))
    np.testing.assert_allclose(  # factor 2, four times the length: 2 · 4 - 1 = 7
        frequencies(DynamicNTK(2.0, trained=16), 64, 1e4, length=64), frequencies(NTKAware(7.0), 64, 1e4)
    )


@pytest.mark.parametrize(
    "scaling", [DynamicNTK(1.0, trained=16), LongRoPE((1.0,) * 4, (2.0,) * 4, trained=16, factor=4.0)]
)
def test_scalings_by_length_give_each_sequence_its_own(scaling):
    # In a batch the longer neighbour must not change what the shorter sequence gets.
    rotary, positions = Rotary(8, scaling=scaling), torch.stack([torch.arange(8), torch.arange(56, 64)])
    batch = rotary.angles(positions)
    for row, alone in enumerate(positions):
        assert batch.cos[row].equal(rotary.angles(alone).cos)
    # The first stays within the trained length, the second does not.
    unscaled = rotary_angles(positions, 8).sin * scaling.attention_factor
    torch.testing.assert_close(batch.sin[0], unscaled[0])
    assert (batch.sin[1] - unscaled[1]).abs().max() > 0.1


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("width", "base", "factor", "trained"), [(128, 1e4, 16.0, 4096), (64, 1.5e5, 32.0, 4096)])
def test_yarn_equals_its_transcription(width, base, factor, trained, truncate):
    scaling = YaRN(factor, trained=trained, truncate=truncate)
    truth = yarn_in_numpy(width, base, factor, trained, 32, 1, truncate)
    np.testing.assert_allclose(frequencies(scaling, width, base), truth)
    assert frequencies(scaling, width, base)[0] == 1.0
    assert frequencies(scaling, width, base)[-1] == pytest.approx(plain(width, base)[-1] / factor)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(factor) + 1)
    # The control: the ends of the ramp matter to this comparison.
    wrong = yarn_in_numpy(width, base, factor, trained, 32, 1, not truncate)
    assert np.abs(frequencies(scaling, width, base) / truth - 1).max() < 1e-9 < np.abs(wrong / truth - 1).max()


@pytest.mark.parametrize(("width", "factor", "trained"), [(128, 8.0, 8192), (64, 32.0, 8192), (16, 4.0, 64)])
def test_llama3_equals_its_transcription(width, factor, trained):
    truth = llama3_in_numpy(width, 5e5, factor, trained, 1, 4)
    np.testing.assert_allclose(frequencies(Llama3(factor, trained=trained), width, 5e5), truth)


def test_the_attention_factor_multiplies_cosine_and_sine():
    # cos² + sin² = 1.21 where the factor is 1.1: 0.1 ln(e) + 1.
    angles = rotary_angles(torch.arange(4), 8, scaling=YaRN(math.e, trained=64))
    torch.testing.assert_close(angles.cos**2 + angles.sin**2, torch.full((4, 4), 1.21))


# ---------------------------------------------------------------------------- Hugging Face, on published configurations

LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072}
PUBLISHED = {
    "longchat, linear": (
        LLAMA,
        {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
        Linear(8.0),
    ),
    "llama 3.1 8B": (
        LLAMA,
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        Llama3(8.0, trained=8192),
    ),
    "llama 3.2 1B": (
        {**LLAMA, "hidden_size": 2048, "head_dim": 64},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        Llama3(32.0, trained=8192),
    ),
    "qwen 2.5 7B, yarn": (
        {**LLAMA, "hidden_size": 3584, "num_attention_heads": 28},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
        YaRN(4.0, trained=32768),
    ),
    "gpt-oss, yarn not truncated": (
        {**LLAMA, "head_dim": 64},
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        YaRN(32.0, trained=4096, truncate=False),
    ),
    "deepseek v3, yarn with mscale": (
        {**LLAMA, "head_dim": 64},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        YaRN(40.0, trained=4096, attention=yarn_mscale(40.0, 0.707) / yarn_mscale(40.0, 1.0)),
    ),
    "phi 3, longrope": (
        {**LLAMA, "hidden_size": 128, "num_attention_heads": 8},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.02, 1.1, 1.3, 1.5, 1.7, 1.9, 2.0],
            "long_factor": [1.05, 1.2, 2.0, 4.5, 10.0, 24.0, 48.0, 64.0],
            "original_max_position_embeddings": 4096,
        },
        LongRoPE(
            short=(1.0, 1.02, 1.1, 1.3, 1.5, 1.7, 1.9, 2.0),
            long=(1.05, 1.2, 2.0, 4.5, 10.0, 24.0, 48.0, 64.0),
            trained=4096,
            factor=32.0,
        ),
    ),
    "dynamic": (
        {**LLAMA, "max_position_embeddings": 4096},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        DynamicNTK(2.0, trained=4096),
    ),
}


def published(name: str, length: int) -> tuple[np.ndarray, float, np.ndarray, float]:
    """Frequencies and attention factor, ours and theirs."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes, rope, scaling = PUBLISHED[name]
    config = LlamaConfig(**sizes, rope_parameters=rope)
    theirs, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=length)
    width = config.head_dim
    ours = scaling.frequencies(width, rope["rope_theta"], torch.tensor([0, length - 1]))
    return ours.numpy(), scaling.attention_factor, theirs.double().numpy(), factor


@pytest.mark.parametrize("length", [100, 5000, 20000])
@pytest.mark.parametrize("name", PUBLISHED)
def test_equals_hugging_face_on_published_configurations(name, length):
    ours, our_factor, theirs, their_factor = published(name, length)
    np.testing.assert_allclose(ours, theirs, rtol=3e-6)  # theirs are float32
    assert our_factor == pytest.approx(their_factor)


def test_the_comparison_tells_scalings_apart():
    ours, *_ = published("llama 3.1 8B", 100)
    _, _, other, _ = published("qwen 2.5 7B, yarn", 100)
    assert np.abs(ours / other - 1).max() > 0.1
    # Dynamic and LongRoPE do depend on the length, so the three lengths above are not one test done thrice.
    for name in ("dynamic", "phi 3, longrope"):
        assert np.abs(published(name, 100)[0] / published(name, 20000)[0] - 1).max() > 0.1


# ---------------------------------------------------------------------------- laws and refusals

ALL = [
    Linear(2.0),
    NTKAware(2.0),
    DynamicNTK(2.0, trained=16),
    YaRN(2.0, trained=64),
    Llama3(2.0, trained=64),
    LongRoPE((1.0,) * 4, (3.0,) * 4, trained=16, factor=2.0),
]


@pytest.mark.parametrize("scaling", ALL, ids=lambda each: type(each).__name__)
def test_scaled_rotations_stay_relative_and_compile(scaling):
    states = torch.randn(2, 1, 4, 8, dtype=torch.float64)
    rotary = Rotary(8, scaling=scaling)
    # Both start at 20 and 30: beyond the trained 16, but of one length for each call.
    query, key = states
    near = rotary(query, torch.arange(20, 24)) @ rotary(key, torch.arange(20, 24)).mT
    if not isinstance(scaling, DynamicNTK):  # whose angles grow with the length, by design
        far = rotary(query, torch.arange(30, 34)) @ rotary(key, torch.arange(30, 34)).mT
        torch.testing.assert_close(near, far)
    compiled = torch.compile(lambda x, at: rotary(x, at), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query, torch.arange(20, 24)), rotary(query, torch.arange(20, 24)))
    assert rotary(states[..., :0, :], torch.arange(0)).shape == (2, 1, 0, 8)


@pytest.mark.parametrize("scaling", [Linear(1.0), NTKAware(1.0), YaRN(1.0, trained=64), Llama3(1.0, trained=64)])
def test_a_factor_of_one_changes_nothing(scaling):
    torch.testing.assert_close(scaling.frequencies(8, 1e4, torch.arange(4)), rotary_frequencies(8, 1e4))
    assert scaling.attention_factor == 1.0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Linear(0.25), "Inverted"),
        (lambda: NTKAware(math.nan), "factor is nan"),
        (lambda: DynamicNTK(2.0, trained=0), "trained is 0"),
        (lambda: YaRN(2.0, trained=64, fast=1.0, slow=32.0), "fast >= slow"),
        (lambda: Llama3(2.0, trained=64, low=4.0, high=1.0), "Swapped"),
        (lambda: Rotary(2, scaling=NTKAware(2.0)).angles(torch.arange(3)), "width is 2"),
        (lambda: Rotary(8, scaling=LongRoPE((1.0,), (1.0,), trained=8, factor=2.0)).angles(torch.arange(3)), "4 pairs"),
    ],
)
def test_refusals_say_what_is_wrong(call, says):
    with pytest.raises(ValueError, match=says):
        call()
