"""Normalised queries and keys against numpy, against torch and published layers, and against their own bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from intently.mechanism.steady import QKL2Norm, QKLayerNorm, QKRMSNorm, QKRMSNormAcrossHeads

WIDTH, HEADS, KV_HEADS = 6, 4, 2


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_gains(norm: torch.nn.Module) -> torch.nn.Module:
    """Float64 and gains that differ by feature, so that a forgotten gain cannot pass."""
    norm.double()
    for seed, parameter in enumerate(norm.parameters()):
        parameter.data.copy_(normal(*parameter.shape, seed=seed))
    return norm


NORMS = {
    "layer": lambda: QKLayerNorm(WIDTH),
    "layer with bias": lambda: QKLayerNorm(WIDTH, bias=True),
    "rms": lambda: QKRMSNorm(WIDTH),
    "rms across heads": lambda: QKRMSNormAcrossHeads(HEADS, KV_HEADS, width=WIDTH),
    "l2": lambda: QKL2Norm(16),
    "l2 by head": lambda: QKL2Norm(16, heads=HEADS),
}


def in_numpy(name: str, norm: torch.nn.Module, query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights = {key: value.detach().numpy() for key, value in norm.named_parameters()}
    results = []
    for role, states in (("query", query), ("key", key)):
        result = np.empty_like(states)
        for b, h, t in np.ndindex(states.shape[:3]):
            x = states[b, h, t]
            if name.startswith("layer"):
                y = (x - x.mean()) / np.sqrt(x.var() + 1e-6) * weights[f"{role}_gain"]
                y = y + weights.get(f"{role}_bias", 0)
            elif name == "rms":
                y = x / np.sqrt((x**2).mean() + 1e-6) * weights[f"{role}_gain"]
            elif name == "rms across heads":
                y = x / np.sqrt((states[b, :, t] ** 2).mean() + 1e-6) * weights[f"{role}_gain"][h]
            else:
                temperature = weights["temperature"].reshape(-1)
                y = x / np.sqrt((x**2).sum()) * (temperature[h % len(temperature)] if role == "query" else 1)
            result[b, h, t] = y
        results.append(result)
    return results[0], results[1]


@pytest.mark.parametrize("name", NORMS)
def test_equals_numpy(name):
    norm = with_gains(NORMS[name]())
    query, key = normal(2, HEADS, 3, WIDTH, seed=8), normal(2, KV_HEADS, 5, WIDTH, seed=9)
    ours = [each.detach().numpy() for each in norm(query, key)]
    truth = in_numpy(name, norm, query.numpy(), key.numpy())
    for mine, true in zip(ours, truth, strict=True):
        np.testing.assert_allclose(mine, true)
    # The control: another norm's transcription is told apart.
    wrong = in_numpy(
        "rms" if name.startswith("layer") else "layer", with_gains(QKLayerNorm(WIDTH)), query.numpy(), key.numpy()
    )
    assert np.abs(ours[0] - wrong[0]).max() > 0.1


def test_equals_torch():
    query, key = normal(2, HEADS, 3, WIDTH), normal(2, KV_HEADS, 5, WIDTH, seed=1)
    layer = with_gains(QKLayerNorm(WIDTH, bias=True))
    theirs = torch.nn.functional.layer_norm(query, (WIDTH,), layer.query_gain, layer.query_bias, 1e-6)
    torch.testing.assert_close(layer(query, key)[0], theirs)
    rms = with_gains(QKRMSNorm(WIDTH))
    torch.testing.assert_close(rms(query, key)[1], torch.nn.functional.rms_norm(key, (WIDTH,), rms.key_gain, 1e-6))


def test_equals_qwen3_and_olmo2():
    pytest.importorskip("transformers")
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    query, key = normal(2, HEADS, 3, WIDTH).float(), normal(2, KV_HEADS, 5, WIDTH, seed=1).float()
    ours, theirs = with_gains(QKRMSNorm(WIDTH)).float(), Qwen3RMSNorm(WIDTH)
    theirs.weight.data.copy_(ours.query_gain)
    torch.testing.assert_close(ours(query, key)[0], theirs(query))

    ours, theirs = (
        with_gains(QKRMSNormAcrossHeads(HEADS, KV_HEADS, width=WIDTH)).float(),
        Olmo2RMSNorm(KV_HEADS * WIDTH),
    )
    theirs.weight.data.copy_(ours.key_gain.flatten())
    before_the_split = key.transpose(1, 2).flatten(-2)
    torch.testing.assert_close(
        ours(query, key)[1].transpose(1, 2).flatten(-2), theirs(before_the_split), rtol=1e-4, atol=1e-5
    )


def largest_logit(norm, query: torch.Tensor, key: torch.Tensor) -> float:
    query, key = norm(query, key)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = 1.0 if isinstance(norm, QKL2Norm) else 1 / math.sqrt(WIDTH)
    return (scale * query @ key.mT).abs().max().item()


@pytest.mark.parametrize("name", NORMS)
def test_logits_stay_within_the_bound_however_large_the_states(name):
    norm = with_gains(NORMS[name]())
    for size in (1e-8, 1.0, 1e8):
        query, key = size * normal(8, HEADS, 9, WIDTH, seed=2), size * normal(8, KV_HEADS, 9, WIDTH, seed=3)
        assert largest_logit(norm, query, key) <= norm.bound().item()
    # The control: without the norm no number bounds them.
    assert (query @ key.repeat_interleave(2, dim=1).mT).abs().max() > norm.bound().item()


def test_the_bounds_are_reached():
    # All of a query and a key on the feature whose gains are largest; across heads, all on one head as well.
    query, key = torch.zeros(1, HEADS, 1, WIDTH).double(), torch.zeros(1, KV_HEADS, 1, WIDTH).double()
    query[0, 0, 0, 2] = key[0, 0, 0, 2] = 1e4
    for norm in (QKRMSNorm(WIDTH), QKRMSNormAcrossHeads(HEADS, KV_HEADS, width=WIDTH)):
        norm.double()
        norm.query_gain.data[..., 2], norm.key_gain.data[..., 2] = 3.0, 2.0
        assert largest_logit(norm, query, key) == pytest.approx(norm.bound().item(), rel=1e-6)
    assert QKRMSNorm(WIDTH).bound().item() == pytest.approx(math.sqrt(WIDTH))
    assert QKRMSNormAcrossHeads(HEADS, KV_HEADS, width=WIDTH).bound().item() == pytest.approx(math.sqrt(8 * WIDTH))
    assert largest_logit(QKL2Norm(16).double(), query, key) == pytest.approx(math.log2(16**2 - 16))
    balanced = torch.tensor([1.0, -1.0] * 3).double().expand(1, HEADS, 1, WIDTH)  # no mean to remove
    assert largest_logit(QKLayerNorm(WIDTH).double(), 1e4 * balanced, 1e4 * balanced) == pytest.approx(math.sqrt(WIDTH))


@pytest.mark.parametrize("name", NORMS)
def test_precision_gradients_and_zeros(name):
    norm = with_gains(NORMS[name]())
    query, key = normal(1, HEADS, 2, WIDTH).requires_grad_(), normal(1, KV_HEADS, 2, WIDTH, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(norm, (query, key))
    truth = norm(query, key)
    norm.float()
    for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float16, 0.02)):
        for mine, true in zip(norm(query.to(dtype), key.to(dtype)), truth, strict=True):
            assert mine.dtype == dtype
            torch.testing.assert_close(mine.double(), true, atol=tolerance, rtol=tolerance)
    # 300² overflows float16; inside it is float32.
    assert norm(torch.full_like(query, 300, dtype=torch.float16), key.half())[0].isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(query.float(), key.float())[0].dtype == torch.float32
    zeros = torch.zeros(1, HEADS, 2, WIDTH, requires_grad=True)
    norm(zeros, key.float())[0].sum().backward()
    assert zeros.grad.isfinite().all()
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    query, key = query.detach().float(), key.detach().float()
    torch.testing.assert_close(compiled(query, key), norm(query, key))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: QKLayerNorm(0), "width is 0"),
        (
            lambda: QKRMSNorm(8)(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)),
            r"float32\[1, 2, 3, 4\] for a width of 8",
        ),
        (lambda: QKRMSNormAcrossHeads(4, 3, width=2), "4 heads are no multiple of 3"),
        (
            lambda: QKRMSNormAcrossHeads(4, width=2)(torch.zeros(1, 4, 3, 2), torch.zeros(1, 2, 3, 2)),
            "kv_heads not given",
        ),
        (lambda: QKL2Norm(1), "length is 1"),
        (lambda: QKL2Norm(9, heads=4)(torch.zeros(1, 2, 3, 2), torch.zeros(1, 2, 3, 2)), "4 temperatures"),
    ],
)
def test_refusals_say_what_is_wrong(call, says):
    with pytest.raises(ValueError, match=says):
        call()
