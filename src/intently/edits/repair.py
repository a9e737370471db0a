"""Repairs of one attention call: see these keys, scale by this, normalise over keys, drop nothing, split or regroup heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from intently.mechanism import normalize
from intently.sites import Replacement, Site
from intently.sites.measure import HIDDEN_NATS, fit_scale, floor_of
from intently.sites.rotation import Rotation
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


def weights_for(site: Site, logits: Tensor) -> Tensor:
    """Weights of other logits at a site: what its softmax spent besides the keys (a sink) takes its part again."""
    tensors = site.tensors
    if not site.sink or tensors is None or tensors.logits is None or site.deferred:
        return softmax(logits)
    before, weights = tensors.logits.double(), tensors.weights.double()
    known = (weights > 0) & torch.isfinite(before)
    top = torch.where(known, before, float("-inf")).argmax(-1, keepdim=True)
    total = before.gather(-1, top) - weights.gather(-1, top).log()  # log of the whole sum
    share = (1 - weights.sum(-1, keepdim=True)).clamp_min(0)
    beside = torch.where(share > 0, total + share.log(), float("-inf"))
    everything = torch.cat([logits.double(), beside.nan_to_num(nan=float("-inf"), neginf=float("-inf"))], -1)
    return softmax(everything)[..., :-1]


def logits_without_mask(site: Site, *, plain: Tensor | None = None) -> Tensor:
    """The logits as they would be with every key seen: the scaled q·k plus any bias, the fills taken out.

    With `plain` nothing but the scaled q·k is left, by the factor that those pairs `[batch, heads, query, key]` show.
    """
    tensors = site.tensors
    assert tensors is not None
    if tensors.scores is None or tensors.logits is None:
        base = tensors.logits if tensors.logits is not None else tensors.weights.double().log()
        top = base.amax(-1, keepdim=True)
        return torch.where(base < top - 2 * HIDDEN_NATS, torch.zeros_like(base), base).double()
    if site.scale is not None and site.scale.softcap:
        cap, logits = site.scale.softcap, tensors.logits.double()
        known = _slope(site, torch.full((logits.shape[1],), math.nan, dtype=torch.float64))
        capped = cap * torch.tanh(known * tensors.scores.double() / cap)
        return capped if plain is not None else torch.where(logits < -1e3, capped, logits)
    if plain is not None:
        # What was added to the other pairs differs by sample, and must not enter the factor.
        fit = fit_scale(tensors.scores, tensors.logits.masked_fill(~plain, float("-inf")))
        return _slope(site, fit.slope) * tensors.scores.double()
    fit = tensors.fit
    slope = _slope(site, fit.slope)
    # A row filled as a whole by one number shows no bias of its own.
    filled = (tensors.logits.double() < floor_of(tensors.logits.dtype)).all(-1, keepdim=True)
    added = torch.where((fit.added < -HIDDEN_NATS) | filled, torch.zeros_like(fit.added), torch.nan_to_num(fit.added))
    return slope * tensors.scores.double() + added


def _slope(site: Site, fitted: Tensor) -> Tensor:
    """The factor of each head; where no row shows it, the one the call states, else 1/√width."""
    assert site.scale is not None
    inside = site.scale.inside or 1.0
    stated = [f / inside if math.isfinite(f) and f else site.head_dim**-0.5 / inside for f in site.scale.factors]
    return torch.where(torch.isfinite(fitted), fitted, torch.tensor(stated, dtype=torch.float64))[None, :, None, None]


def see(wanted: Callable[[Site], Tensor | None], *, clean: bool = False) -> Repair:
    """Let the call see exactly the wanted keys, bool broadcastable to `[batch, heads, query, key]`.

    `clean` also takes out what a faulty mask added to the logits without hiding anything.
    """

    def repair(site: Site) -> Replacement | None:
        mask = wanted(site)
        if mask is None or site.tensors is None or not _fits(mask, site.tensors.weights.shape[0]):
            return None
        mask = mask.expand(site.tensors.weights.shape)
        logits = logits_without_mask(site, plain=mask if clean else None)
        logits = logits.masked_fill(~mask, float("-inf"))
        return Replacement(weights_for(site, logits), logits)

    return repair


def _fits(mask: Tensor, samples: int) -> bool:
    """Whether a mask speaks of this many samples (a call may hold windows, or one sample of several)."""
    return mask.dim() < 4 or mask.shape[0] in (1, samples)


def rescale(factor: float) -> Repair:
    """Multiply q·k by `factor`, all heads, in place of the model's own factor; mask and bias stay."""

    def repair(site: Site) -> Replacement | None:
        tensors = site.tensors
        if tensors is None or tensors.scores is None or tensors.logits is None or site.scale is None:
            return None
        inside = site.scale.inside or 1.0
        slope = torch.tensor([f / inside for f in site.scale.factors], dtype=torch.float64)[None, :, None, None]
        logits = tensors.logits.double() + (factor / inside - slope) * tensors.scores.double()
        return Replacement(weights_for(site, logits), logits)

    return repair


def norm_queries_and_keys() -> Repair:
    """Put queries and keys of root mean square 1 in the place of the model's, scaled by 1/√width; mask and bias stay."""

    def repair(site: Site) -> Replacement | None:
        tensors = site.tensors
        if tensors is None or tensors.scores is None or tensors.logits is None or site.scale is None:
            return None
        if tensors.query is None or tensors.key is None:
            return None
        query, key = (F.normalize(t.double(), dim=-1) for t in (tensors.query, tensors.key))
        scores = query @ key.mT * math.sqrt(query.shape[-1])
        if scores.shape != tensors.scores.shape:
            return None
        slope = _slope(site, tensors.fit.slope)
        logits = tensors.logits.double() + scores - slope * tensors.scores.double()
        return Replacement(softmax(logits), logits)

    return repair


def float32_inside(logits_of: Callable[[Site], Tensor | None]) -> Repair:
    """Scores, softmax and weighted sum wider than the operands, rounded once at the end."""

    def repair(site: Site) -> Replacement | None:
        logits, tensors = logits_of(site), site.tensors
        if logits is None or tensors is None or tensors.value is None:
            return None
        return Replacement(output=(softmax(logits).float() @ tensors.value.float()))

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
        logits = torch.nan_to_num(tensors.logits.double(), nan=float("-inf"), posinf=1e300, neginf=float("-inf"))
        return Replacement(softmax(logits.clamp_min(-1e300).masked_fill(torch.isneginf(logits), float("-inf"))), logits)

    return repair


def as_in(other: Site) -> Repair:
    """Factor, cap, bias, sink and mask of another run of the same call, on a batch of the same shape."""

    def repair(site: Site) -> Replacement | None:
        tensors, model = site.tensors, other.tensors
        if tensors is None or tensors.scores is None or site.scale is None or model is None or model.logits is None:
            return None
        if model.logits.shape != tensors.weights.shape:
            return None
        logits = model.logits.double()
        if model.scores is not None and other.scale is not None:
            # What one run puts on q or k before their product, the other may put on it afterwards.
            logits = _with_scores(
                other, tensors.scores.double() * (other.scale.inside or 1.0) / (site.scale.inside or 1.0)
            )
        cap = other.scale.softcap if other.scale is not None else None
        return Replacement(weights_for(other, logits), logits, dropout=0.0, softcap=cap)

    return repair


def softcapped(cap: Callable[[], float]) -> Repair:
    """Cap the scaled q·k at c · tanh(x / c); mask and bias stay. The cap is read when the call runs."""

    def repair(site: Site) -> Replacement | None:
        tensors = site.tensors
        if tensors is None or tensors.scores is None or tensors.logits is None or site.scale is None:
            return None
        scaled = _slope(site, tensors.fit.slope) * tensors.scores.double()
        capped = cap() * torch.tanh(scaled / cap())
        return replace(_replaced(site, tensors.logits.double() + capped - scaled), softcap=cap())

    return repair


def multiplied(factor: Callable[[], Tensor]) -> Repair:
    """Multiply the scaled q·k by one more factor, a number or one for each head; mask and bias stay."""

    def repair(site: Site) -> Replacement | None:
        tensors = site.tensors
        if tensors is None or tensors.scores is None or tensors.logits is None or site.scale is None:
            return None
        scores = tensors.scores.double()
        return _replaced(site, _with_scores(site, scores * factor().detach().double().reshape(1, -1, 1, 1)))

    return repair


def _replaced(site: Site, logits: Tensor) -> Replacement:
    return Replacement(weights_for(site, logits), logits)


def biased(bias: Callable[[Site], Tensor | None]) -> Repair:
    """Add a bias, broadcastable to `[batch, heads, query, key]`, to the logits; None where it does not fit the call."""

    def repair(site: Site) -> Replacement | None:
        added = bias(site)
        if added is None or site.tensors is None or site.tensors.logits is None:
            return None
        return _replaced(site, site.tensors.logits.double() + added)

    return repair


def with_sink(sink: Callable[[], Tensor]) -> Repair:
    """Let the softmax see one more logit a head, to which no value belongs."""

    def repair(site: Site) -> Replacement | None:
        if site.tensors is None or site.tensors.logits is None:
            return None
        logits = site.tensors.logits.double()
        beside = (
            sink().detach().double().reshape(1, -1, 1, 1).expand(*logits.shape[:1], logits.shape[1], logits.shape[2], 1)
        )
        return Replacement(softmax(torch.cat([logits, beside], -1))[..., :-1], logits)

    return repair


def regroup() -> Repair:
    """Each query head reads the head of the keys and of the values that it is meant to; factor, mask and bias stay."""

    def repair(site: Site) -> Replacement | None:
        tensors, reads = site.tensors, site.reads
        if tensors is None or tensors.scores is None or tensors.logits is None or reads is None or site.scale is None:
            return None
        if tensors.query is None or tensors.key is None or tensors.value is None or not reads.grouped:
            return None
        sources = []
        for own in (reads.keys, reads.values):
            if any(wanted not in own for wanted in reads.meant(own)):
                return None
            sources.append([own.index(wanted) for wanted in reads.meant(own)])
        scores = tensors.query.double() @ tensors.key.double()[:, sources[0]].mT
        logits = _with_scores(site, scores)
        meant = replace(reads, keys=reads.meant(reads.keys), values=reads.meant(reads.values))
        weights = weights_for(site, logits)
        return Replacement(weights, logits, weights @ tensors.value.double()[:, sources[1]], reads=meant)

    return repair


def turn_again(wanted: Callable[[Site], tuple[Tensor, Tensor] | None]) -> Repair:
    """Turn queries and keys by the wanted maps, `[batch, heads, position, width, width]` each, in place of their own."""

    def repair(site: Site) -> Replacement | None:
        tensors, maps = site.tensors, wanted(site)
        query, key = site.rotation("query"), site.rotation("key")
        if maps is None or tensors is None or tensors.scores is None or tensors.logits is None or site.scale is None:
            return None
        if tensors.query is None or tensors.key is None or query is None or key is None:
            return None
        turned = []
        for rows, now, right in zip((tensors.query, tensors.key), (query, key), maps, strict=True):
            before = torch.linalg.solve(now.maps, rows.double()[..., None])
            turned.append((right @ before)[..., 0])
        scores = turned[0] @ turned[1].mT
        logits = _with_scores(site, scores)
        found = {n: (lambda m=m: Rotation(m)) for n, m in zip(("query", "key"), maps, strict=True)}
        return Replacement(weights_for(site, logits), logits, scores=scores, turned=found)

    return repair


def turn_on(query: Tensor, key: Tensor) -> Repair:
    """Turn queries and keys further, by maps `[batch, heads, position, width, width]`, from where they are."""

    def repair(site: Site) -> Replacement | None:
        tensors = site.tensors
        if tensors is None or tensors.scores is None or tensors.logits is None or site.scale is None:
            return None
        if tensors.query is None or tensors.key is None or tensors.key.shape[:3] != key.shape[:3]:
            return None
        turned = [(m @ t.double()[..., None])[..., 0] for m, t in ((query, tensors.query), (key, tensors.key))]
        scores = turned[0] @ turned[1].mT
        logits = _with_scores(site, scores)
        return Replacement(weights_for(site, logits), logits, scores=scores)

    return repair


def _with_scores(site: Site, scores: Tensor) -> Tensor:
    """The call's logits for other q·k: the same factor and cap, the same mask and bias added."""
    tensors, scale = site.tensors, site.scale
    assert tensors is not None and tensors.scores is not None and tensors.logits is not None and scale is not None
    slope = _slope(site, tensors.fit.slope)
    if not scale.softcap:
        return tensors.logits.double() + slope * (scores - tensors.scores.double())
    slope = torch.tensor(scale.factors, dtype=torch.float64)[None, :, None, None] / (scale.inside or 1.0)
    before, after = (scale.softcap * torch.tanh(slope * s.double() / scale.softcap) for s in (tensors.scores, scores))
    return tensors.logits.double() + after - before


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
        parts = [
            _by_token(t, site.heads if n == "query" else site.kv_heads) if n in scrambled else t
            for n, t in (("query", query), ("key", key), ("value", value))
        ]
        mask = wanted(site)
        mask = site.visible if mask is None else mask
        if mask is not None and not _fits(mask, query.shape[0]):
            return None
        output = _attend(parts[0], parts[1], parts[2], slope, mask)
        if "output" in scrambled:
            batch, heads, queries, width = output.shape
            output = output.transpose(1, 2).reshape(batch, heads, queries, width)
        return Replacement(output=output, rows=Rows())

    return repair


def attend_to(memory: Callable[[Site], Tensor | None], kept: Callable[[Site], Tensor | None]) -> Repair:
    """Keys and values made of other hidden states, `[batch, position, width]`, by the call's own projections.

    `kept` says which of them are real, bool `[batch, position]`, or which a query sees, bool broadcastable to
    `[batch, heads, query, position]`; all where it gives None.
    """

    def repair(site: Site) -> Replacement | None:
        hidden, tensors = memory(site), site.tensors
        if hidden is None or tensors is None or tensors.query is None or site.scale is None:
            return None
        made = []
        for name, operand in (("key", tensors.key), ("value", tensors.value)):
            projection = tensors.projections.get(name)
            made.append(projection.remade(operand, hidden) if projection is not None and operand is not None else None)
        key, value = made
        if key is None or value is None:
            return None
        mask = kept(site)
        return _attending(site, key, value, mask[:, None, None, :] if mask is not None and mask.dim() == 2 else mask)

    return repair


def see_uncut(wanted: Callable[[Site], Tensor | None]) -> Repair:
    """Let the call see exactly the wanted ones of all keys that stood there before it was handed the first ones alone.

    `wanted` is asked for a site with all of these keys.
    """

    def repair(site: Site) -> Replacement | None:
        whole = site.tensors.uncut if site.tensors is not None else {}
        if not whole:
            return None
        mask = wanted(replace(site, keys=whole["key"].shape[-2]))
        return _attending(site, whole["key"], whole["value"], mask) if mask is not None else None

    return repair


def _attending(site: Site, key: Tensor, value: Tensor, mask: Tensor | None) -> Replacement:
    """The output of a call's queries over other keys and values, by the factor that the call has."""
    assert site.tensors is not None and site.tensors.query is not None and site.scale is not None
    inside = site.scale.inside or 1.0
    factors = [f if math.isfinite(f) and f else site.head_dim**-0.5 for f in site.scale.factors]
    slope = torch.tensor([f / inside for f in factors], dtype=torch.float64)[None, :, None, None]
    logits = slope * (site.tensors.query.double() @ key.double().mT)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return Replacement(output=softmax(logits) @ value.double())


def silence() -> Repair:
    """Give the call the output 0."""

    def repair(site: Site) -> Replacement | None:
        tensors = site.tensors
        if tensors is None or tensors.query is None or tensors.value is None:
            return None
        return Replacement(output=tensors.query.new_zeros(*tensors.query.shape[:-1], tensors.value.shape[-1]))

    return repair


def _by_token(tensor: Tensor, own_heads: int) -> Tensor:
    """Undo a view `[batch, heads, token, width]` of memory that is `[batch, token, heads, width]`.

    `own_heads` is the number before heads that share keys and values were repeated.
    """
    batch, heads, tokens, width = tensor.shape
    group = heads // own_heads if own_heads and heads % own_heads == 0 else 1
    own = tensor[:, ::group]
    apart = own.reshape(batch, tokens, own.shape[1], width).transpose(1, 2)
    return apart.repeat_interleave(group, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, slope: float, mask: Tensor | None) -> Tensor:
    logits = slope * (query @ key.mT)
    if mask is not None:
        logits = logits.masked_fill(~mask.expand(logits.shape), float("-inf"))
    return softmax(logits) @ value
