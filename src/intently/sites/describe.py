"""Reads scale, mask, bias and row sums off the stage tensors of a call."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from intently.masks import recognise
from intently.sites import measure
from intently.sites.site import Scale, Site

# Above this many entries of the map only some query rows are described, so that nothing of the size of the map is made.
ENTRIES = 1 << 21


def described(site: Site, *, dropped: bool, path_scale: tuple[float, bool, bool, float | None] | None = None) -> Site:
    """Read scale, mask, bias and row sums off the stage tensors."""
    tensors = site.tensors
    assert tensors is not None
    scores, logits, weights = tensors.scores, tensors.logits, tensors.weights.detach()
    sampled = None
    per_row = weights.shape[0] * weights.shape[1] * weights.shape[-1]
    if weights.numel() > ENTRIES:
        count = max(1, ENTRIES // per_row)
        sampled = torch.linspace(0, weights.shape[-2] - 1, count).long().unique()
        weights = weights[..., sampled, :]
        scores = None if scores is None else scores[..., sampled, :]
        logits = None if logits is None else logits[..., sampled, :]
    scale, added, bias = site.scale, None, "none"
    inside, normed, learned, cap = path_scale or (
        (scale.inside, scale.normed, scale.learned, scale.softcap) if scale else (1.0, False, False, None)
    )
    if scores is not None and logits is not None:
        linear = logits.double()
        if cap:
            linear = cap * torch.atanh((linear / cap).clamp(-1, 1)).nan_to_num(posinf=1e30, neginf=-1e30)
            linear = torch.where(logits.abs() < abs(cap), linear, logits.double())
        fit = tensors.fit if not cap and sampled is None else measure.fit_scale(scores, linear)
        factors = tuple(float(s) * inside for s in fit.slope)
        scale = Scale(factors, fit.residual < 1e-3 or fit.fixed, normed, learned, cap, inside)
        added = fit.added
        near = added.masked_fill(added < -measure.HIDDEN_NATS, 0.0)
        if fit.residual >= 1e-3 or fit.fixed:
            bias = f"additive, up to {float(near.abs().amax()):.3g}" + (
                ", the same in every sample" if fit.fixed else ""
            )
    visible = measure.seen_keys(weights, added, logits, dropped=dropped)
    recognised = recognise(visible) if sampled is None else None
    return replace(
        site,
        scale=scale,
        visible=visible,
        mask=recognised.phrase
        if recognised is not None
        else f"{float(visible.double().mean()):.0%} of keys seen (rows sampled)",
        bias=bias,
        row_sum=weights.sum(-1),
        normalized_over=_normalized_over(weights, dropped),
        negative=bool((weights < 0).any()),
        sampled_rows=None if sampled is None else len(sampled),
    )


def _normalized_over(weights: Tensor, dropped: bool) -> str:
    """The axis whose sums are 1."""

    def ones(axis: int) -> bool:
        total = weights.sum(axis)
        plain = total[total != 0]
        return bool(plain.numel()) and bool(((plain - 1).abs() < 1e-2).all())

    if dropped or ones(-1) or not torch.isfinite(weights).all():
        return "keys"
    for axis, name in ((-2, "queries"), (1, "heads"), (0, "batch")):
        if weights.shape[axis] > 1 and ones(axis):
            return name
    return "nothing"
