"""Repairs of one attention call: see these keys, scale by this, normalise over keys, drop nothing, split heads by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from intently.mechanism import normalize
from intently.sites import Replacement, Site
from intently.sites.measure import HIDDEN_NATS, fit_scale
from intently.sites.site import Rows

# A repair changes a site that has just run; None leaves it as it is.
Repair = Callable[[Site], Replacement | None]


def apply_all(repairs: Sequence[Repair]) -> Repair:
    """Several repairs of one site, one after the other."""

    def repair(site: Site) -> Replacement | None:
        last: Replacement | None = None
        for each in repairs:
            change = each(site)
            if change is None:
                continue
            assert site.tensors is not None
            if last is not None and last.output is not None and change.output is None:
                continue  # an output already put in place stands
            tensors = site.tensors
            if change.weights is not None:
                tensors = replace(tensors, weights=change.weights)
            if change.logits is not None:
                tensors = replace(tensors, logits=change.logits)
            dropout = site.dropout if change.dropout is None else change.dropout
            site = replace(site, tensors=tensors, dropout=dropout)
            last = change if last is None else replace(
                change,
                rows=change.rows or last.rows,
                dropout=dropout,
            )  # fmt: skip
        return last

    return repair


def softmax(logits: Tensor) -> Tensor:
    """Softmax over keys in double precision; a row without any key gives zeros."""
    return normalize(logits.double())


def logits_without_mask(site: Site) -> Tensor:
    """The logits as they would be with every key seen: the scaled q·k plus any bias, the fills taken out."""
    tensors = site.tensors
    assert tensors is not None
    if tensors.scores is None or tensors.logits is None:
        base = tensors.logits if tensors.logits is not None else tensors.weights.double().log()
        top = base.amax(-1, keepdim=True)
        return torch.where(base < top - 2 * HIDDEN_NATS, torch.zeros_like(base), base).double()
    if site.scale is not None and site.scale.softcap:
        logits = tensors.logits.double()
        return torch.where(logits < -1e3, torch.zeros_like(logits), logits)
    fit = fit_scale(tensors.scores, tensors.logits)
    slope = torch.nan_to_num(fit.slope)[None, :, None, None]
    added = torch.where(fit.added < -HIDDEN_NATS, torch.zeros_like(fit.added), torch.nan_to_num(fit.added))
    if not fit.fixed and fit.residual < 0.5:
        added = torch.where(added.abs() < 1e-9, torch.zeros_like(added), added)
    return slope * tensors.scores.double() + added


def see(wanted: Callable[[Site], Tensor | None], *, clean: bool = False) -> Repair:
    """Let the call see exactly the wanted keys, bool broadcastable to `[batch, heads, query, key]`.

    `clean` also takes out what a faulty mask added to the logits without hiding anything.
    """

    def repair(site: Site) -> Replacement | None:
        mask = wanted(site)
        if mask is None or site.tensors is None:
            return None
        mask = mask.expand(site.tensors.weights.shape)
        logits = logits_without_mask(site)
        if clean and site.tensors.scores is not None and site.scale is not None and not site.scale.softcap:
            fit = fit_scale(site.tensors.scores, site.tensors.logits) if site.tensors.logits is not None else None
            if fit is not None:
                logits = torch.nan_to_num(fit.slope)[None, :, None, None] * site.tensors.scores.double()
        logits = logits.masked_fill(~mask, float("-inf"))
        return Replacement(softmax(logits), logits)

    return repair


def rescale(factor: float) -> Repair:
    """Multiply q·k by `factor`, all heads, in place of the model's own factor; mask and bias stay."""

    def repair(site: Site) -> Replacement | None:
        tensors = site.tensors
        if tensors is None or tensors.scores is None or tensors.logits is None or site.scale is None:
            return None
        inside = site.scale.inside or 1.0
        slope = torch.tensor([f / inside for f in site.scale.factors], dtype=torch.float64)[None, :, None, None]
        logits = tensors.logits.double() + (factor / inside - slope) * tensors.scores.double()
        return Replacement(softmax(logits), logits)

    return repair


def softmax_over_keys() -> Repair:
    """Normalise the call's own logits over the keys."""

    def repair(site: Site) -> Replacement | None:
        if site.tensors is None or site.tensors.logits is None:
            return None
        return Replacement(softmax(site.tensors.logits), site.tensors.logits)

    return repair


def drop_nothing() -> Repair:
    """Use the weights as the softmax made them, without dropout."""

    def repair(site: Site) -> Replacement | None:
        if site.tensors is None or site.tensors.logits is None:
            return None
        return Replacement(softmax(site.tensors.logits), site.tensors.logits, dropout=0.0)

    return repair


def safe_rows() -> Repair:
    """Give a row that sees nothing the output 0, and let no NaN of a hidden key through."""

    def repair(site: Site) -> Replacement | None:
        tensors = site.tensors
        if tensors is None or tensors.logits is None:
            return None
        logits = torch.nan_to_num(tensors.logits.double(), nan=float("-inf"), posinf=1e300)
        return Replacement(softmax(logits.clamp_min(-1e300).masked_fill(torch.isneginf(logits), float("-inf"))), logits)

    return repair


def as_in(other: Site) -> Repair:
    """Mask, scale and normalisation of another run of the same site."""

    def repair(site: Site) -> Replacement | None:
        tensors = site.tensors
        if tensors is None or tensors.scores is None or other.tensors is None or other.tensors.logits is None:
            return None
        if other.tensors.logits.shape != tensors.weights.shape:
            return None
        base = other.tensors.logits.double()
        if other.tensors.scores is not None and other.scale is not None and not other.scale.softcap:
            fit = fit_scale(other.tensors.scores, other.tensors.logits)
            base = torch.nan_to_num(fit.slope)[None, :, None, None] * tensors.scores.double() + fit.added
        return Replacement(softmax(base), base, dropout=0.0)

    return repair


def split_heads(wanted: Callable[[Site], Tensor | None], length: int | None, broken: Site) -> Repair:
    """Attention between tokens: rows taken apart by token first and by head second, and put back together that way.

    `broken` is the call as it was found: what is wrong with it, and its factor. A batch of one shows neither.
    """
    rows = broken.rows
    slope = broken.scale.factors[0] / (broken.scale.inside or 1.0) if broken.scale else broken.head_dim**-0.5

    def repair(site: Site) -> Replacement | None:
        tensors = site.tensors
        if tensors is None or tensors.query is None or tensors.key is None or tensors.value is None:
            return None
        query, key, value = tensors.query.double(), tensors.key.double(), tensors.value.double()
        if rows.over_batch:
            total = query.shape[0] * query.shape[1]
            positions = length or query.shape[0]
            if total % positions:
                return None
            turned = [
                t.reshape(positions, total // positions, *t.shape[-2:]).permute(2, 1, 0, 3) for t in (query, key, value)
            ]
            output = _attend(turned[0], turned[1], turned[2], slope, None)
            output = output.permute(2, 1, 0, 3).reshape(*query.shape[:-1], value.shape[-1])
            return Replacement(output=output, rows=Rows())
        scrambled = rows.scrambled
        parts = [_by_token(t) if n in scrambled else t for n, t in (("query", query), ("key", key), ("value", value))]
        mask = wanted(site)
        mask = site.visible if mask is None else mask
        output = _attend(parts[0], parts[1], parts[2], slope, mask)
        if "output" in scrambled:
            batch, heads, queries, width = output.shape
            output = output.transpose(1, 2).reshape(batch, heads, queries, width)
        return Replacement(output=output, rows=Rows())

    return repair


def _by_token(tensor: Tensor) -> Tensor:
    """Undo a view `[batch, heads, token, width]` of memory that is `[batch, token, heads, width]`."""
    batch, heads, tokens, width = tensor.shape
    return tensor.reshape(batch, tokens, heads, width).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, slope: float, mask: Tensor | None) -> Tensor:
    logits = slope * (query @ key.mT)
    if mask is not None:
        logits = logits.masked_fill(~mask.expand(logits.shape), float("-inf"))
    return softmax(logits) @ value
