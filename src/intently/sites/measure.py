"""What logits and weights say about scale and mask: the slope of logit against q·k, and the keys that were really seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A key counts as hidden when its additive term lies this far (in nats) below the row's best: exp(-40) < 1e-17, below
# what double precision can add to a sum of weights. Swin's fill of -100 is hidden by this rule, ALiBi's slopes are not.
HIDDEN_NATS = 40.0

ENOUGH = 1 << 15  # entries of a head that a slope is read from; a larger map is read in some of its rows
FEWEST_ROWS = 4


@dataclass(frozen=True)
class Fit:
    """`logits = slope[head] · scores + added`, with `added` known up to a constant per row."""

    slope: Tensor  # [heads]
    added: Tensor  # like the logits; 0 where nothing was added, very negative where a key is hidden
    residual: float  # largest part of `added`, relative to the logits, that is neither 0 nor shared by the samples
    fixed: bool  # the same `added` in every sample: a bias, not content


def fit_scale(scores: Tensor, logits: Tensor) -> Fit:
    """Slope of logit against q·k per head, from differences within rows, so that a constant per row does not count.

    `scores` and `logits` are `[batch, heads, query, key]`. The slope is the median over pairs of keys: exact while
    fewer than half of the pairs carry a mask fill or a bias. When a bias stands in the way, differences between
    samples (which share it) are tried.
    """
    scores, logits = scores.double(), logits.double()
    heads, rows = scores.shape[1], _some_rows(scores.shape)
    slopes, shared = [], []
    for head in range(heads):
        s, g = scores[:, head, rows], logits[:, head, rows]
        pairs = _pairs(s, g)
        slope = _median_ratio(*pairs)
        if slope is not None and _clean(*pairs, slope):
            slopes.append(slope)
            shared.append(False)
            continue
        paired = _slope_between_samples(s, g)
        slopes.append(paired if paired is not None else (slope if slope is not None else float("nan")))
        shared.append(paired is not None)
    slope = torch.tensor(slopes, dtype=torch.float64)
    added = logits - torch.nan_to_num(slope)[None, :, None, None] * scores
    added = _centre(added)
    seen = added > -HIDDEN_NATS
    spread = logits.masked_fill(~seen, 0.0).abs().amax().clamp_min(1e-12)
    loose = added.masked_fill(~seen, 0.0)
    fixed = all(shared) and bool(shared)
    if fixed and loose.shape[0] > 1:
        loose = loose - loose[:1]
        loose = torch.where(seen & seen[:1], loose, torch.zeros_like(loose))
        loose = loose - loose.median(-1, keepdim=True).values
    residual = float(loose.abs().amax() / spread)
    return Fit(slope, added, residual, fixed)


def seen_keys(weights: Tensor, added: Tensor | None, logits: Tensor | None, *, dropped: bool) -> Tensor:
    """The mask really used, `[batch, heads, query, key]`, True = seen.

    From the additive term where it is known, else from the logits; and from weights that are exactly zero though the
    logit is not low (a mask multiplied in after the softmax), unless dropout made the zeros.
    """
    if added is not None:
        seen = ~(added < -HIDDEN_NATS) & ~torch.isneginf(torch.nan_to_num(added, nan=0.0, neginf=float("-inf")))
    elif logits is not None:
        best = logits.amax(-1, keepdim=True)
        seen = ~((logits < best - 2 * HIDDEN_NATS) | torch.isneginf(logits))
    else:
        return weights != 0
    empty = torch.zeros_like(seen)
    if logits is not None:
        # A row that is hidden as a whole may be filled by one finite number: nothing in it stands out.
        bottom = logits.double() < floor_of(logits.dtype)
        empty = bottom.all(-1, keepdim=True).expand_as(seen)
    seen = seen & ~empty
    if not dropped:
        seen = seen & ~((weights == 0) & seen & (weights.sum(-1, keepdim=True) != 0))
    return seen


def floor_of(dtype: torch.dtype) -> float:
    """Logits below this were filled in, not computed."""
    # Half of the smallest finite fill in use: finfo.min of the type, and -1e9 or -1e4 written by hand.
    return -0.5e4 if dtype == torch.float16 else -0.5e8


def _centre(added: Tensor) -> Tensor:
    """Remove the constant of each row: the level that most seen keys of the row share."""
    top = added.amax(-1, keepdim=True)
    near = torch.where(added > top - HIDDEN_NATS, added, torch.full_like(added, float("nan")))
    level = near.nanmedian(-1, keepdim=True).values
    level = torch.where(torch.isfinite(level), level, torch.zeros_like(level))
    return added - level


def _some_rows(shape: torch.Size) -> Tensor:
    """Rows spread evenly, as many as are enough to tell a slope: all samples (windows) show each of them."""
    samples, _, queries, keys = shape
    count = max(FEWEST_ROWS, ENOUGH // max(samples * keys, 1))
    if count >= queries:
        return torch.arange(queries)
    return torch.linspace(0, queries - 1, count).long().unique()


def _pairs(s: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Differences between keys of a row, for every pair with a finite and comparable logit."""
    best = torch.where(torch.isfinite(g), g, torch.full_like(g, -1e300)).amax(-1, keepdim=True)
    ok = torch.isfinite(g) & torch.isfinite(s) & (g > best - 500) & ~_fills(g)
    keys = s.shape[-1]
    near = [(key, key + step) for step in range(1, 9) for key in range(keys - step)]
    one, two = torch.tensor(near, dtype=torch.long).reshape(-1, 2).unbind(1)
    both = ok[..., one] & ok[..., two]
    return (s[..., two] - s[..., one])[both], (g[..., two] - g[..., one])[both]


def _fills(g: Tensor) -> Tensor:
    """Entries that hold the very number of many others: filled in by a mask (of weak effect, perhaps), not computed."""
    finite = g[torch.isfinite(g)]
    if finite.numel() < 8:
        return torch.zeros_like(g, dtype=torch.bool)
    values, counts = torch.unique(finite, return_counts=True)
    often = values[counts >= max(4, finite.numel() // 20)]
    return torch.isin(g, often) if 0 < often.numel() <= 4 else torch.zeros_like(g, dtype=torch.bool)


def _median_ratio(ds: Tensor, dl: Tensor) -> float | None:
    if ds.numel() == 0:
        return None
    wide = ds.abs() > 1e-3 * ds.abs().amax()
    if not wide.any():
        return None
    slope = float((dl[wide] / ds[wide]).median())
    return slope if slope != 0 else None  # a row filled by one number says nothing of the factor


def _clean(ds: Tensor, dl: Tensor, slope: float, *, tolerance: float = 1e-4) -> bool:
    """Whether a slope explains most of the differences."""
    if ds.numel() == 0:
        return False
    off = (dl - slope * ds).abs() > tolerance * dl.abs().amax().clamp_min(1e-9)
    return float(off.double().mean()) < 0.5


def _slope_between_samples(s: Tensor, g: Tensor) -> float | None:
    """The slope from differences between samples, which share a bias; None unless it explains nearly all of them."""
    if s.shape[0] < 2:
        return None
    finite = torch.isfinite(g) & (g > g.amax(-1, keepdim=True) - 500)
    s, g = torch.where(finite, s, 0.0), torch.where(finite, g, float("nan"))
    ds, dl = s[1:] - s[:-1], g[1:] - g[:-1]
    ds, dl = ds[..., 1:] - ds[..., :-1], dl[..., 1:] - dl[..., :-1]
    keep = torch.isfinite(dl)
    ds, dl = ds[keep], dl[keep]
    slope = _median_ratio(ds, dl)
    if slope is None:
        return None
    off = (dl - slope * ds).abs() > 1e-4 * dl.abs().amax().clamp_min(1e-9)
    return slope if float(off.double().mean()) < 0.3 else None
