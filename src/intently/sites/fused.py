"""The call of a fused kernel: `F.scaled_dot_product_attention` and `flex_attention`, whose stages are named arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from intently.masks import recognise
from intently.report import Source
from intently.sites import measure
from intently.sites.assemble import lines_of
from intently.sites.call import Call
from intently.sites.describe import ENTRIES
from intently.sites.factors import path_factor
from intently.sites.kernels import kernel_of, refused_for
from intently.sites.layout import Layout, is_folded, order_of
from intently.sites.origin import entries_of, features_of, samples_of, varies
from intently.sites.projection import projections_of
from intently.sites.provenance import Node
from intently.sites.reads import reads_of
from intently.sites.rotation import measured
from intently.sites.site import Rows, Scale, Site, Tensors
from intently.sites.trace_types import Sizes
from intently.sites.uncut import uncut


def assemble_fused(
    named: Mapping[str, Any],
    nodes: Mapping[str, Node],
    result: Tensor,
    sizes: Sizes,
    *,
    keep: bool,
    path: str,
    source: Source | None,
) -> Call:
    """The site of one call of `F.scaled_dot_product_attention`."""
    query, key, value = (named[n].detach() for n in ("query", "key", "value"))
    mask, causal = named.get("attn_mask"), bool(named.get("is_causal", False))
    dropout = float(named.get("dropout_p", 0.0) or 0.0)
    scale = named.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    asked = {
        "query": query, "key": key, "value": value, "mask": mask, "dropout": dropout, "causal": causal, "scale": named.get("scale"),
        "enable_gqa": bool(named.get("enable_gqa", False)),
    }  # fmt: skip
    return _from_parts(
        query, key, value, nodes, result, sizes, keep=keep, path=path, source=source, kind="fused", kernel=f"sdpa {kernel_of(asked)}",
        refused=refused_for(asked), scale=scale, mask=mask, causal=causal, dropout=dropout, softcap=None,
    )  # fmt: skip


def assemble_flex(
    query: Tensor, key: Tensor, value: Tensor, logits_of: Callable[[Tensor], Tensor], scale: float, nodes: Mapping[str, Node],
    result: Tensor, sizes: Sizes, *, keep: bool, path: str, source: Source | None,
) -> Call:  # fmt: skip
    """The site of one call of `flex_attention`, its score and mask functions already evaluated by `logits_of`."""
    return _from_parts(
        query, key, value, nodes, result, sizes, keep=keep, path=path, source=source, kind="flex", kernel="flex",
        scale=scale, mask=None, causal=False, dropout=0.0, softcap=None, logits_of=logits_of,
    )  # fmt: skip


def _from_parts(
    query: Tensor, key: Tensor, value: Tensor, nodes: Mapping[str, Node], result: Tensor, sizes: Sizes, *, keep: bool, path: str,
    source: Source | None, kind: str, kernel: str, scale: float, mask: Tensor | None, causal: bool, dropout: float,
    softcap: float | None, logits_of: Callable[[Tensor], Tensor] | None = None, refused: frozenset[str] = frozenset(),
) -> Call:  # fmt: skip
    lead = query.shape[:-2] if query.dim() > 2 else torch.Size([1])
    heads, kv_heads = (lead[-1], key.shape[-3]) if query.dim() > 3 else (1, 1)
    queries, keys = query.shape[-2], key.shape[-2]
    batch_of = _samples(nodes, query, sizes)
    over_queries = batch_of is not None and batch_of.dim() > 1 and varies(batch_of, -2)
    columns = features_of(nodes["query"]) if "query" in nodes else None
    head_of = None
    if columns is not None and columns.numel() == query.numel():
        head_of = columns.reshape(query.shape)[..., 0, 0].reshape(-1)
    order = order_of(
        tuple(lead),
        sizes.batch,
        None if batch_of is None or over_queries else batch_of[..., 0, 0].reshape(-1),
        None if over_queries else head_of,
    )

    def lay(tensor: Tensor, *, repeat: bool = True) -> Tensor:
        t = tensor if tensor.dim() > 2 else tensor[None]
        if repeat and t.dim() > 3 and t.shape[-3] != heads:
            t = t.repeat_interleave(heads // t.shape[-3], -3)
        return t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:])[order]

    def native(output: Tensor) -> Tensor:
        flat = torch.empty(order.numel(), *output.shape[-2:], dtype=output.dtype)
        flat[order.flatten()] = output.reshape(-1, *output.shape[-2:])
        return flat.reshape(*lead, *output.shape[-2:]).reshape(result.shape)

    def output_index(shape: torch.Size) -> tuple[Tensor | None, Tensor, Tensor] | None:
        full = (*lead, queries, value.shape[-1])
        token = torch.arange(queries)[:, None].expand(full).reshape(shape).clone()
        sample_at = torch.empty(order.numel(), dtype=torch.long)
        sample_at[order] = torch.arange(order.shape[0])[:, None].expand(order.shape)
        if order.shape[0] != sizes.batch:
            sample_at.zero_()  # windows or blocks besides the samples
        sample = sample_at.reshape(*lead, 1, 1).expand(full).reshape(shape).clone()
        found = features_of(nodes["value"]) if "value" in nodes else None
        if found is None or found.numel() != value.numel():
            return None, token, sample
        first = found.reshape(value.shape)[..., :1, :]
        if first.dim() > 3 and first.shape[-3] != heads:
            first = first.repeat_interleave(heads // first.shape[-3], -3)
        return first.expand(full).reshape(shape).clone(), token, sample

    whole = queries * keys * order.numel() <= ENTRIES
    tensors = visible = None
    q, k, v = lay(query), lay(key), lay(value)
    phrase, row_sum, bias = "", None, "none"
    if whole:
        scores = q @ k.mT
        logits = (
            logits_of(scores.reshape(*lead, queries, keys)).reshape(-1, queries, keys)[order]
            if logits_of
            else scores * scale
        )
        hidden, added = _mask_parts(mask, causal, lead, order, queries, keys)
        if added is not None:
            logits = logits + added
            bias = _bias_words(added, logits.dtype)
        if hidden is not None:
            logits = logits.masked_fill(hidden, float("-inf"))
        weights = torch.nan_to_num(
            torch.softmax(logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits, -1)
        )
        weights = weights.to(q.dtype)
        tensors = Tensors(
            scores=scores, logits=logits, weights=weights, output=result, query=q, key=k, value=v,
            aggregate=lambda w: native(w.to(v.dtype) @ v), restore=native,
            turned={
                n: measured(nodes[n], lambda t, like=x: lay(t.reshape(like.shape)), x.shape[-1])
                for n, x in (("query", query), ("key", key))
                if n in nodes
            },
            uncut={n: lay(t) for n, t in uncut({"key": key, "value": value}, nodes).items()},
            projections=projections_of({n: nodes.get(n) for n in ("query", "key", "value")}),
        )  # fmt: skip
        visible = logits > logits.amax(-1, keepdim=True) - 20 * measure.HIDDEN_NATS
        if added is not None:
            visible = visible & ~(added < added.amax(-1, keepdim=True) - measure.HIDDEN_NATS)
        visible = visible & ~torch.isneginf(logits) & ~(logits < measure.floor_of(logits.dtype)).all(-1, keepdim=True)
        phrase, row_sum = recognise(visible).phrase, weights.sum(-1)
    else:
        phrase = _mask_words(mask, causal, queries, keys)
    factor, normed, learned = 1.0, False, False
    for name in ("query", "key"):
        if name in nodes:
            f, n, p = path_factor(nodes[name])
            factor, normed, learned = factor * f, normed or n, learned or p
    side = nodes["attn_mask"].origins if "attn_mask" in nodes else frozenset()
    rows = (
        Rows(("query",), ())
        if over_queries
        else Rows((), _scrambled(nodes, {"query": query, "key": key, "value": value}))
    )
    kv_heads = _kv_heads(nodes, key) or (kv_heads if order.shape[1] == heads else order.shape[1])
    reads = None
    if "key" not in nodes or kv_heads < order.shape[1] or features_of(nodes["key"]) is None:
        entries = {
            n: entries_of(nodes[n], t.shape)
            for n, t in (("query", query), ("key", key), ("value", value))
            if n in nodes
        }
        laid = {n: lay(e) for n, e in entries.items() if e is not None}
        reads = reads_of(laid.get("query"), laid.get("key"), laid.get("value"), 1)
    site = Site(
        path=path, role="self", kind=kind, heads=order.shape[1], kv_heads=kv_heads,
        head_dim=query.shape[-1], value_dim=value.shape[-1], queries=queries, keys=keys,
        scale=Scale((scale * factor,) * order.shape[1], True, normed, learned, softcap, factor),
        mask=phrase, visible=visible, bias=bias, kernel=kernel, dtype=str(query.dtype).removeprefix("torch."), dropout=dropout,
        side=side, origins={n: nodes[n].origins for n in ("query", "key", "value") if n in nodes},
        lines=lines_of(source, source, source, source), row_sum=row_sum, rows=rows, reads=reads, tensors=tensors if keep else None,
        refused=refused, mask_given=mask is not None,
    )  # fmt: skip
    layout = Layout(order, (), result.shape, False, output_index)
    return Call(path, site, layout, None, native, folded=is_folded(queries, sizes))


def _mask_parts(
    mask: Tensor | None, causal: bool, lead: Sequence[int], order: Tensor, queries: int, keys: int
) -> tuple[Tensor | None, Tensor | None]:
    hidden = added = None
    if causal:
        hidden = ~torch.ones(queries, keys, dtype=torch.bool).tril()
    if mask is not None:
        m = mask.detach()
        m = m.expand(*lead, queries, keys) if m.dim() <= len(lead) + 2 else m.reshape(*lead, queries, keys)
        m = m.reshape(-1, queries, keys)[order]
        if m.dtype == torch.bool:
            hidden = ~m if hidden is None else hidden | ~m
        else:
            added = m
    return hidden, added


def _bias_words(added: Tensor, dtype: torch.dtype) -> str:
    near = added.masked_fill(added < added.amax(-1, keepdim=True) - measure.HIDDEN_NATS, 0.0)
    most = float(torch.nan_to_num(near).abs().amax())
    return "none" if most == 0 else f"additive, up to {most:.3g}"


def _mask_words(mask: Tensor | None, causal: bool, queries: int, keys: int) -> str:
    if mask is None:
        return "causal" if causal else "full"
    rows = torch.linspace(0, queries - 1, min(queries, max(1, ENTRIES // keys))).long().unique()
    m = mask.reshape(-1, *mask.shape[-2:])[0]
    m = m if m.shape[0] == 1 else m[rows]
    seen = m if m.dtype == torch.bool else m > m.amax(-1, keepdim=True) - measure.HIDDEN_NATS
    return f"{float(seen.double().mean()):.0%} of keys seen (rows sampled)"


def _samples(nodes: Mapping[str, Node], query: Tensor, sizes: Sizes) -> Tensor | None:
    """The sample of every entry of the queries."""
    if "query" not in nodes or not sizes.batch or sizes.batch < 2:
        return None
    found = samples_of(nodes["query"], sizes.batch)
    return found.reshape(query.shape) if found is not None and found.numel() == query.numel() else None


def _scrambled(nodes: Mapping[str, Node], operands: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Operands whose rows are no tokens."""
    names = []
    for name, tensor in operands.items():
        features = features_of(nodes[name]) if name in nodes else None
        if features is not None and features.numel() == tensor.numel() and varies(features.reshape(tensor.shape), -2):
            names.append(name)
    return tuple(names)


def _kv_heads(nodes: Mapping[str, Node], key: Tensor) -> int | None:
    features = features_of(nodes["key"]) if "key" in nodes and key.dim() > 2 else None
    if features is None or features.numel() != key.numel():
        return None
    return torch.unique(features.reshape(key.shape)[..., 0, 0]).numel()
