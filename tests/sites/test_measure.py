"""Laws of reading scale and mask off logits: the slope is found under any mask, fill and bias; so is the mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from intently.sites.measure import fit_scale, seen_keys

FILLS = {
    "-inf": float("-inf"), "finfo.min": torch.finfo(torch.float32).min, "-1e9": -1e9,
    "double min": torch.finfo(torch.float64).min
}  # fmt: skip
LAW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def maps(draw, *, hides: bool = True, samples: int | None = None):
    """Scores, a slope per head, and a mask that leaves at least two thirds of each row's keys."""
    batch = samples or draw(st.integers(1, 3))
    heads, queries, keys = draw(st.integers(1, 4)), draw(st.integers(2, 7)), draw(st.integers(6, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randn(batch, heads, queries, keys, generator=generator, dtype=torch.float64)
    slope = draw(st.lists(st.floats(0.02, 8.0), min_size=heads, max_size=heads))
    order = torch.rand(batch, 1, queries, keys, generator=generator).argsort(-1)
    seen = order < keys - (draw(st.integers(0, keys // 5)) if hides else 0)
    return scores, torch.tensor(slope, dtype=torch.float64), seen.expand(scores.shape), generator


def logits_of(scores, slope):
    return scores * slope[None, :, None, None]


@LAW
@given(maps(), st.sampled_from(sorted(FILLS)), st.floats(-50, 50))
def test_the_slope_is_found_under_a_mask_and_constants_per_row(drawn, fill, constant):
    scores, slope, seen, generator = drawn
    level = constant * torch.randn(*scores.shape[:3], 1, generator=generator, dtype=torch.float64)
    fit = fit_scale(scores, (logits_of(scores, slope) + level).masked_fill(~seen, FILLS[fill]))
    torch.testing.assert_close(fit.slope, slope, rtol=1e-6, atol=1e-9)
    assert fit.residual < 1e-6 and not fit.fixed
    assert float(fit.added[seen].abs().amax()) < 1e-6 * max(1.0, abs(constant))


@LAW
@given(maps(), st.sampled_from(sorted(FILLS)))
def test_the_mask_is_found(drawn, fill):
    scores, slope, seen, _ = drawn
    logits = logits_of(scores, slope).masked_fill(~seen, FILLS[fill])
    found = seen_keys(logits.softmax(-1), fit_scale(scores, logits).added, logits, dropped=False)
    assert torch.equal(found, seen)


@LAW
@given(maps(), st.sampled_from(["-inf", "-1e9"]))
def test_an_added_fill_is_found_like_a_put_one(drawn, fill):
    scores, slope, seen, _ = drawn
    logits = logits_of(scores, slope) + torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, FILLS[fill])
    fit = fit_scale(scores, logits)
    torch.testing.assert_close(fit.slope, slope, rtol=1e-5, atol=1e-9)
    assert torch.equal(seen_keys(logits.softmax(-1), fit.added, logits, dropped=False), seen)


@LAW
@given(maps(hides=False, samples=3), st.floats(0.1, 5.0))
def test_a_bias_that_samples_share_is_taken_out(drawn, size):
    scores, slope, _, generator = drawn
    bias = size * torch.randn(1, *scores.shape[1:], generator=generator, dtype=torch.float64)
    logits = logits_of(scores, slope) + bias
    fit = fit_scale(scores, logits)
    torch.testing.assert_close(fit.slope, slope, rtol=1e-5, atol=1e-8)
    assert fit.fixed and fit.residual < 1e-6
    assert seen_keys(logits.softmax(-1), fit.added, logits, dropped=False).all()


@LAW
@given(maps(hides=False), st.integers(0, 2**31))
def test_a_mask_multiplied_in_after_the_softmax_is_found_unless_dropout_made_the_zeros(drawn, seed):
    scores, slope, _, _ = drawn
    logits = logits_of(scores, slope)
    seen = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    seen[..., 0] = True
    weights = logits.softmax(-1) * seen
    added = fit_scale(scores, logits).added
    assert torch.equal(seen_keys(weights, added, logits, dropped=False), seen)
    assert seen_keys(weights, added, logits, dropped=True).all()


@pytest.mark.parametrize("fill", FILLS)
def test_a_row_that_is_hidden_as_a_whole_sees_nothing(fill):
    scores = torch.randn(1, 2, 4, 6, dtype=torch.float64)
    seen = torch.ones(1, 2, 4, 6, dtype=torch.bool)
    seen[:, :, 2] = False
    logits = (scores * 0.5).masked_fill(~seen, FILLS[fill])
    fit = fit_scale(scores, logits)
    torch.testing.assert_close(fit.slope, torch.full((2,), 0.5, dtype=torch.float64))
    weights = torch.nan_to_num(logits.softmax(-1))
    assert torch.equal(seen_keys(weights, fit.added, logits, dropped=False), seen)


def test_a_swin_fill_hides_and_an_alibi_slope_does_not():
    scores = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    near = torch.arange(6)[:, None] - torch.arange(6)
    blocks = (near.abs() < 3).expand(2, 1, 6, 6)
    swin = scores * 0.5 + torch.where(blocks, 0.0, -100.0)
    assert torch.equal(seen_keys(swin.softmax(-1), fit_scale(scores, swin).added, swin, dropped=False), blocks)
    alibi = scores * 0.5 - near.abs() * 0.25
    assert seen_keys(alibi.softmax(-1), fit_scale(scores, alibi).added, alibi, dropped=False).all()


def test_different_logits_give_no_slope_that_explains_them():
    """A negative control: logits that have nothing to do with q·k are said to."""
    scores, other = torch.randn(2, 2, 5, 8, dtype=torch.float64), torch.randn(2, 2, 5, 8, dtype=torch.float64)
    fit = fit_scale(scores, other)
    assert fit.residual > 0.1 and not fit.fixed
