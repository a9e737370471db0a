"""Turns a product of weights and values into a call: axes sorted into batch, heads, query and key; stages laid out alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from intently.report import Source
from intently.sites.call import Call
from intently.sites.contraction import Contraction
from intently.sites.describe import described
from intently.sites.layout import Layout, is_folded, order_of, output_axes, query_axis, restorer, value_rows
from intently.sites.lookup import Lookup
from intently.sites.origin import entries_of, features_of
from intently.sites.projection import projections_of
from intently.sites.provenance import Node
from intently.sites.reads import reads_of
from intently.sites.site import Reads, Site, Tensors
from intently.sites.sources import Sources
from intently.sites.trace_types import Pending, Sizes


def assemble(
    made: Contraction,
    index: int,
    operands: Sequence[Node],
    pending: Pending,
    result: Tensor,
    sizes: Sizes,
    *,
    keep: bool,
    path: str,
    source: Source | None,
) -> Call:
    """The site of one product of weights (operand `index`) with values."""
    weights = made.operands[index]
    axes = made.labels[index]
    key_axes = made.summed(index)
    # A product that also sums over heads (merged with the output projection) has more than one summed axis.
    key_axis = max(key_axes, key=lambda a: (made.size(a) in sizes.lengths, made.size(a)))
    free = made.only_in(index)
    lookup = Lookup(pending, operands[index], weights.shape)
    query_label = query_axis(free, made, sizes, made.size(key_axis))
    lead = [a for a in axes if a not in (key_axis, query_label)]
    perm = tuple(axes.index(a) for a in [*lead, *([query_label] if query_label else []), key_axis])
    permuted = torch.Size([weights.shape[i] for i in perm])
    lead_sizes = permuted[: len(lead)]
    sources = Sources(pending, sizes, lookup)
    batch_of = sources.batch_index()
    if batch_of is not None:
        moved = batch_of.permute(perm)
        moved = moved if query_label else moved.unsqueeze(-2)
        over_queries = moved.shape[-2] > 1 and bool((moved != moved[..., :1, :]).any())
        batch_of = None if over_queries else moved[..., 0, 0].reshape(-1)
    else:
        over_queries = False
    head_of = sources.head_index()
    if head_of is not None:
        moved = head_of.permute(perm)
        head_of = moved[(*([slice(None)] * len(lead)), *([0] * (moved.dim() - len(lead))))].reshape(-1)
    order = order_of(lead_sizes, sizes.batch, batch_of, head_of)
    value = next(i for i in range(len(made.operands)) if i != index)
    columns = features_of(operands[value])
    layout = Layout(
        order,
        perm,
        permuted,
        query_label is None,
        output_axes(
            made, value, query_label, lead, order if order.shape[0] == sizes.batch else None, columns, key_axis
        ),
    )

    canonical = layout.canonical(weights)
    logits = lookup.logits()
    logits = None if logits is None else layout.canonical(logits)
    scores = lookup.scores()
    scores = None if scores is None else layout.canonical(scores)

    def aggregate(changed: Tensor) -> Tensor:
        chosen = list(made.operands)
        chosen[index] = layout.native(changed.to(weights.dtype))
        total = made.compute(*chosen) * made.factor
        total = total if made.added is None else total + made.added
        return total.reshape(result.shape)

    query_rows, key_rows = sources.operand_rows(layout)
    rows = sources.rows(
        over_queries=over_queries, value=operands[value], layout=layout, key_axis=made.labels[value].index(key_axis)
    )
    value_free = [a for a in made.labels[value] if a not in axes and a in made.output]
    values = value_rows(made, value, key_axis, lead, order, value_free)
    path_scale = sources.path_scale()
    tensors = Tensors(
        scores=scores,
        logits=logits,
        weights=canonical,
        output=result,
        aggregate=aggregate,
        query=query_rows,
        key=key_rows,
        value=values,
        turned=sources.turned(layout) if keep else {},
        restore=restorer(made, lead, query_label, order, lead_sizes, value_free),
        projections=projections_of({"query": sources.operand(0), "key": sources.operand(1), "value": operands[value]}),
    )
    kv_heads = sources.kv_heads(order)
    reads: Reads | None = None
    summed = max(
        sources.summed_heads(),
        math.prod(made.size(a) for a in key_axes if a not in made.labels[value] and a != key_axis),
    )
    shared = kv_heads is None or kv_heads < order.shape[1]
    if (shared or summed > 1) and scores is not None and order.shape[1] > 1 - (summed > 1):
        entries = entries_of(operands[value], made.operands[value].shape)
        held = [entries if i == value else t for i, t in enumerate(made.operands)]
        meeting = None
        if entries is not None:
            meeting = value_rows(replace(made, operands=tuple(held)), value, key_axis, lead, order, value_free)
        reads = reads_of(*sources.entry_rows(layout), meeting, summed)
    site = Site(
        path=path,
        role="self",
        kind="dot" if scores is not None else "additive",
        heads=order.shape[1],
        kv_heads=kv_heads or order.shape[1],
        head_dim=sources.width() or (query_rows.shape[-1] if query_rows is not None else 0),
        value_dim=math.prod(made.size(a) for a in value_free) if value_free else 1,
        queries=canonical.shape[-2],
        keys=canonical.shape[-1],
        scale=None,
        mask="",
        visible=None,
        bias="none",
        kernel="written out",
        dtype=str(weights.dtype).removeprefix("torch."),
        dropout=pending.dropout,
        side=lookup.side,
        origins={
            "query": sources.origins(0),
            "key": sources.origins(1),
            "value": operands[value].origins,
        },
        lines=lines_of(sources.score_source(), pending.source, source, pending.dropout_source),
        row_sum=None,
        rows=rows,
        reads=reads,
        partial=pending.how == "exp" and _unfinished(canonical),
        made_by=pending.how.strip("_"),
        sink=pending.node.shape.numel() > weights.numel()
        or (pending.how == "exp" and bool((canonical.sum(-1) < 1 - 1e-6).any())),
        tensors=tensors,
    )
    site = described(site, dropped=pending.dropout > 0, path_scale=path_scale)
    site = replace(site, partial=site.partial and site.normalized_over == "nothing")
    if not keep:
        site = replace(site, tensors=None)
    return Call(path, site, layout, pending, layout.native, folded=is_folded(site.queries, sizes))


def _unfinished(weights: Tensor) -> bool:
    """Whether exponentials meet the values before they are divided by any sum: no axis sums to 1, and rows may exceed it."""
    sums = weights.sum(-1)
    seen = sums[sums != 0]
    return bool(seen.numel()) and bool(((seen - 1).abs() > 1e-3).any()) and bool((weights.amax(-1) > 0).any())


def lines_of(
    score: Source | None, normalize: Source | None, aggregate: Source | None, dropout: Source | None
) -> Mapping[str, Source]:
    named = {
        "score": score,
        "scale": score,
        "mask": normalize,
        "normalize": normalize,
        "aggregate": aggregate,
        "dropout": dropout,
    }
    return {k: v for k, v in named.items() if v is not None}
