"""Turns a product of weights and values into a Site: axes sorted into batch, heads, query and key; mask, scale and rows read off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from intently.masks import recognise
from intently.report import Source
from intently.sites import measure
from intently.sites.contraction import Contraction
from intently.sites.ops import CONTRACTIONS, COPIES, MOVES, NORMS, PER_POSITION
from intently.sites.provenance import Follow, Node
from intently.sites.site import Rows, Scale, Site, Tensors

if TYPE_CHECKING:
    from intently.sites.trace import Pending, Sizes

# Above this many entries of the map only some query rows are described, so that nothing of the size of the map is made.
ENTRIES = 1 << 21


@dataclass(frozen=True)
class Replacement:
    """What an edit puts in the place of a call's result: other logits and weights, or another output.

    `output` is `[batch, heads, query, value width]`; `scores` replaces the recorded q·k where the edit moved it.
    """

    weights: Tensor | None = None
    logits: Tensor | None = None
    output: Tensor | None = None
    scores: Tensor | None = None
    rows: Rows | None = None
    dropout: float | None = None


@dataclass
class Call:
    """A site under construction: later calls may still show a division by the row sum, and where the heads are merged."""

    path: str
    site: Site
    layout: Layout
    pending: Pending | None
    native: Callable[[Tensor], Tensor]
    key: str = ""
    node: Node | None = None
    batch: int | None = None
    _rows: Rows = field(default_factory=Rows)

    def replace(self, change: Replacement, result: Tensor) -> Tensor:
        """The call's output after an edit, in the model's layout; the site then describes the edited call."""
        site, tensors = self.site, self.site.tensors
        assert tensors is not None
        if change.output is not None:
            assert tensors.restore is not None
            output = tensors.restore(change.output).to(result.dtype).reshape(result.shape)
            kept = replace(tensors, output=output, scores=None, logits=None)  # they describe the call that was replaced
        else:
            assert change.weights is not None
            weights = change.weights.to(tensors.weights.dtype)
            factor = tensors.weights.sum(-1, keepdim=True) if site.deferred else 1.0
            output = tensors.aggregate(weights * factor).to(result.dtype).reshape(result.shape)
            kept = replace(tensors, weights=weights, logits=change.logits, output=output)
        self.site = _described(replace(site, tensors=kept, rows=change.rows or site.rows), dropped=False)
        self.site = replace(self.site, dropout=site.dropout if change.dropout is None else change.dropout)
        return output

    def merged_at(self, node: Node) -> None:
        """Check that the heads of the output lie side by side, token by token, where a projection reads them."""
        if self.node is None or self.site.rows.over_batch:
            return
        shape = self.node.shape
        positions = self.layout.output_index(shape)
        if positions is None:
            return
        feature, token = positions
        merged = Follow({self.node: feature}).to(node)
        tokens = Follow({self.node: token}).to(node)
        if merged is None or tokens is None:
            return
        flat = merged.reshape(-1, merged.shape[-1])
        ours = tokens >= 0  # other heads of the same layer may stand beside this call's
        first = torch.where(ours, tokens, tokens.max()).amin(-1, keepdim=True)
        mixed = bool((flat != flat[:1]).any()) or bool(((tokens != first) & ours).any())
        if mixed and "output" not in self.site.rows.scrambled:
            rows = self.site.rows
            self.site = replace(self.site, rows=replace(rows, scrambled=(*rows.scrambled, "output")))

    def divided_by(self, total: Tensor | None) -> None:
        """The output was divided by a sum of the weights: normalised after the product."""
        sums = self.site.row_sum
        if sums is None:
            return
        over_keys = total is None or total.numel() in (sums.numel(), 1)
        tensors = self.site.tensors
        if tensors is not None:
            whole = tensors.weights / tensors.weights.sum(-1, keepdim=True).clamp_min(1e-300)
            tensors = replace(tensors, weights=whole if over_keys else tensors.weights)
        self.site = replace(
            self.site,
            deferred=True,
            row_sum=torch.where(sums > 0, torch.ones_like(sums), sums) if over_keys else sums,
            normalized_over="keys" if over_keys else "another axis",
            tensors=tensors,
        )

    def finished(self, *, numbered: bool) -> Site:
        return replace(self.site, path=self.key if numbered else self.path, key_name=self.key, role=_role(self.site))


def _role(site: Site) -> str:
    """`cross` when keys depend on another set of the model's arguments than queries, or stand at other positions."""
    query, key = (_content(site.origins.get(n, frozenset())) for n in ("query", "key"))
    if query != key:
        return "cross"
    return "self" if site.queries == site.keys or site.keys > site.queries == 1 else "cross"


def _content(origins: frozenset[str]) -> frozenset[str]:
    return frozenset(o for o in origins if "mask" not in o and "position" not in o)


@dataclass(frozen=True)
class Layout:
    """How the model's axes map to `[batch, heads, query, key]`.

    `order[batch, head]` is the position among the flattened leading axes (everything but query and key).
    """

    order: Tensor
    perm: tuple[int, ...]  # weights' axes: leading ones, query, key
    shape: torch.Size  # of the weights in the model's layout, permuted
    squeezed_query: bool
    output_axes: Callable[[torch.Size], tuple[Tensor, Tensor] | None]

    def canonical(self, tensor: Tensor) -> Tensor:
        """Weights-shaped tensor to `[batch, heads, query, key]`."""
        moved = tensor.permute(self.perm)
        if self.squeezed_query:
            moved = moved.unsqueeze(-2)
        flat = moved.reshape(-1, *moved.shape[-2:])
        return flat[self.order]

    def native(self, tensor: Tensor) -> Tensor:
        """Back from `[batch, heads, query, key]`."""
        flat = torch.empty(self.order.numel(), *tensor.shape[-2:], dtype=tensor.dtype, device=tensor.device)
        flat[self.order.flatten()] = tensor.reshape(-1, *tensor.shape[-2:])
        shaped = flat.reshape(self.shape)
        inverse = [self.perm.index(i) for i in range(len(self.perm))]
        return shaped.permute(inverse)

    def output_index(self, shape: torch.Size) -> tuple[Tensor, Tensor] | None:
        """For every entry of the output: its feature (head and value column) and its query."""
        return self.output_axes(shape)


# -- weights times values -------------------------------------------------------------------------------------------


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
    key_axis = max(key_axes, key=made.size)
    free = made.only_in(index)
    lookup = _Lookup(pending, operands[index], weights.shape)
    query_axis = _query_axis(free, made, sizes, made.size(key_axis))
    lead = [a for a in axes if a not in (key_axis, query_axis)]
    perm = tuple(axes.index(a) for a in [*lead, *([query_axis] if query_axis else []), key_axis])
    permuted = torch.Size([weights.shape[i] for i in perm])
    lead_sizes = permuted[: len(lead)]
    sources = _Sources(pending, sizes, lookup)
    batch_of = sources.batch_index()
    if batch_of is not None:
        moved = batch_of.permute(perm)
        moved = moved if query_axis else moved.unsqueeze(-2)
        over_queries = moved.shape[-2] > 1 and bool((moved != moved[..., :1, :]).any())
        batch_of = None if over_queries else moved[..., 0, 0].reshape(-1)
    else:
        over_queries = False
    order = _order(lead_sizes, sizes.batch, batch_of)
    value = next(i for i in range(len(made.operands)) if i != index)
    layout = Layout(order, perm, permuted, query_axis is None, _output_axes(made, index, value, lead, query_axis, order))

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
    rows = sources.rows(over_queries=over_queries, value=operands[value], layout=layout, key_axis=made.labels[value].index(key_axis))
    value_free = [a for a in made.labels[value] if a not in axes and a in made.output]
    value_rows = _value_rows(made, value, key_axis, lead, order, value_free)
    path_scale = sources.path_scale()
    tensors = Tensors(
        scores=scores,
        logits=logits,
        weights=canonical,
        output=result,
        aggregate=aggregate,
        query=query_rows,
        key=key_rows,
        value=value_rows,
        restore=_restorer(made, lead, query_axis, order, lead_sizes, value_free),
    )
    site = Site(
        path=path,
        role="self",
        kind="dot" if scores is not None else "additive",
        heads=order.shape[1],
        kv_heads=sources.kv_heads(order) or order.shape[1],
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
        lines=_lines(sources.score_source(), pending.source, source, pending.dropout_source),
        row_sum=None,
        rows=rows,
        sink=pending.node.shape.numel() > weights.numel() or (pending.how == "exp" and bool((canonical.sum(-1) < 1 - 1e-6).any())),
        tensors=tensors,
    )
    site = _described(site, dropped=pending.dropout > 0, path_scale=path_scale)
    if not keep:
        site = replace(site, tensors=None)
    return Call(path, site, layout, pending, layout.native, batch=sizes.batch)


def _query_axis(free: Sequence[str], made: Contraction, sizes: Sizes, keys: int) -> str | None:
    if not free:
        return None
    for wanted in (lambda a: made.size(a) in sizes.lengths, lambda a: made.size(a) == keys):
        chosen = [a for a in free if wanted(a)]
        if chosen:
            return chosen[-1]
    return free[-1]


def _order(lead: Sequence[int], batch: int | None, batch_of: Tensor | None) -> Tensor:
    """Positions of the flattened leading axes as `[batch, head]`."""
    total = math.prod(lead)
    flat = torch.arange(total)
    if batch_of is not None and batch_of.numel() == total:
        samples, counts = torch.unique(batch_of, return_counts=True)
        if (counts == counts[0]).all() and (samples >= 0).all():
            return torch.stack([flat[batch_of == s] for s in samples])
    if batch is not None and batch in lead:
        axis = list(lead).index(batch)
        return flat.reshape(tuple(lead)).movedim(axis, 0).reshape(batch, -1)
    if batch is not None and total % batch == 0:
        return flat.reshape(batch, -1)
    if len(lead) > 1:
        return flat.reshape(lead[0], -1)
    return flat.reshape(1, -1)


def _output_axes(
    made: Contraction, index: int, value: int, lead: Sequence[str], query: str | None, order: Tensor
) -> Callable[[torch.Size], tuple[Tensor, Tensor] | None]:
    def positions(shape: torch.Size) -> tuple[Tensor, Tensor] | None:
        sizes = [made.size(a) for a in made.output]
        if math.prod(sizes) != math.prod(shape):
            return None
        head_at = torch.empty(order.numel(), dtype=torch.long)
        head_at[order.flatten()] = torch.arange(order.shape[1]).repeat(order.shape[0])
        lead_sizes = [made.size(a) for a in lead]

        def spread(axes: Sequence[str], values: Tensor) -> Tensor:
            """An index over some axes, laid out over the output's axes."""
            kept = [a for a in axes if a in made.output]
            if len(kept) != len(axes):
                return torch.full(sizes, -1)
            arranged = values.permute([list(axes).index(a) for a in made.output if a in axes])
            shaped = [made.size(a) if a in axes else 1 for a in made.output]
            return arranged.reshape(shaped).expand(sizes)

        columns = [a for a in made.labels[value] if a in made.output and a not in made.labels[index]]
        width = math.prod(made.size(a) for a in columns)
        head = spread(lead, head_at.reshape(lead_sizes)) if lead else torch.zeros(sizes, dtype=torch.long)
        column = spread(columns, torch.arange(width).reshape([made.size(a) for a in columns])) if columns else torch.zeros_like(head)
        token = spread([query], torch.arange(made.size(query))) if query else torch.zeros(sizes, dtype=torch.long)
        return (head * width + column).reshape(shape), token.reshape(shape).clone()

    return positions


def _restorer(
    made: Contraction, lead: Sequence[str], query: str | None, order: Tensor, lead_sizes: Sequence[int], columns: Sequence[str]
) -> Callable[[Tensor], Tensor]:
    def restore(output: Tensor) -> Tensor:
        flat = torch.empty(order.numel(), *output.shape[-2:], dtype=output.dtype)
        flat[order.flatten()] = output.reshape(-1, *output.shape[-2:])
        named = [*lead, *([query] if query else []), *columns]
        column_sizes = [made.size(a) for a in columns]
        queries = [output.shape[-2]] if query else []
        shaped = flat.reshape(*lead_sizes, *queries, *column_sizes)
        wanted = [a for a in made.output if a in named]
        return shaped.permute([named.index(a) for a in wanted])

    return restore


def _value_rows(made: Contraction, value: int, key: str, lead: Sequence[str], order: Tensor, columns: Sequence[str]) -> Tensor | None:
    """The values as `[batch, heads, key, width]`, heads that share them repeated."""
    tensor, axes = made.operands[value], list(made.labels[value])
    if set(axes) - {key, *lead, *columns}:
        return None
    wanted = [a for a in lead if a in axes]
    moved = tensor.permute([axes.index(a) for a in [*wanted, key, *columns]])
    shape = [made.size(a) if a in axes else 1 for a in lead]
    held = [tensor.shape[axes.index(a)] if a in axes else 1 for a in lead]
    moved = moved.reshape(*held, moved.shape[len(wanted)], -1)
    moved = moved.expand(*[made.size(a) for a in lead] if lead else [], *moved.shape[-2:]) if shape else moved
    return moved.reshape(-1, *moved.shape[-2:])[order]


def _lines(score: Source | None, normalize: Source | None, aggregate: Source | None, dropout: Source | None) -> Mapping[str, Source]:
    named = {"score": score, "scale": score, "mask": normalize, "normalize": normalize, "aggregate": aggregate, "dropout": dropout}
    return {k: v for k, v in named.items() if v is not None}


class _Lookup:
    """Logits and q·k laid out like the weights that met the values: moves between them are replayed on indices."""

    def __init__(self, pending: Pending, node: Node, shape: torch.Size):
        self._pending = pending
        self._shape = shape
        start = pending.node
        self._index: Tensor | None = None
        if pending.how != "joined":
            steps = torch.arange(math.prod(start.shape)).reshape(start.shape)
            index = Follow({start: steps}).to(node)
            if index is not None and index.numel() == math.prod(shape):
                self._index = index.reshape(shape)
        self.side = _side(node, start) | self._score_side()

    def _score_side(self) -> frozenset[str]:
        stops = [s.node for s in self._pending.scores]
        return _side_between(self._pending.logits_node, stops or [_projected(self._pending.logits_node)])

    def from_logits(self, values: Tensor) -> Tensor | None:
        """Something shaped like the softmax's input, laid out like the weights."""
        if self._index is None or values.numel() != math.prod(self._pending.node.shape):
            return None
        return values.reshape(-1)[self._index]

    def logits(self) -> Tensor | None:
        logits = self._pending.logits.detach()
        if logits.shape != self._pending.node.shape:
            return None
        return self.from_logits(logits)

    def from_scores(self, values: Sequence[Tensor]) -> Tensor | None:
        """Something shaped like each product of queries and keys, laid out like the weights."""
        seeds, offset = {}, 0
        for score, value in zip(self._pending.scores, values, strict=True):
            seeds[score.node] = torch.arange(offset, offset + value.numel()).reshape(score.node.shape)
            offset += value.numel()
        if not seeds:
            return None
        index = Follow(seeds).to(self._pending.logits_node)
        if index is None or (index < 0).any():
            return None
        everything = torch.cat([v.reshape(-1) for v in values])
        return self.from_logits(everything[index.expand(self._pending.node.shape)])

    def scores(self) -> Tensor | None:
        values = []
        for score in self._pending.scores:
            if any(t.numel() == 0 for t in score.contraction.operands):
                return None
            values.append(score.contraction.compute(*[t.detach() for t in score.contraction.operands]).reshape(score.node.shape))
        return self.from_scores(values) if values else None


def _projected(node: Node) -> Node:
    """The projection that logits without a product of queries and keys come from."""
    while node.inputs and node.name not in PER_POSITION and node.name not in CONTRACTIONS and node.leaf is None:
        node = node.inputs[0]
    return node


def _side(node: Node, stop: Node) -> frozenset[str]:
    return _side_between(node, [stop])


def _side_between(node: Node, stops: Iterable[Node]) -> frozenset[str]:
    """Arguments that enter on the way from `stops` to `node` from beside it."""
    stopped = set(stops)
    reaches: dict[Node, bool] = {}

    def passes(n: Node) -> bool:
        stack = [n]
        while stack:
            current = stack[-1]
            if current in reaches:
                stack.pop()
                continue
            if current in stopped:
                reaches[current] = True
                stack.pop()
                continue
            waiting = [i for i in current.inputs if i not in reaches]
            if waiting:
                stack.extend(waiting)
                continue
            reaches[current] = any(reaches[i] for i in current.inputs)
            stack.pop()
        return reaches[n]

    side: set[str] = set()
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        if current in seen or current in stopped:
            continue
        seen.add(current)
        for source in current.inputs:
            if passes(source):
                todo.append(source)
            else:
                side |= source.origins
    return frozenset(side)


class _Sources:
    """Where queries and keys came from: the projection and the hidden states behind them."""

    def __init__(self, pending: Pending, sizes: Sizes, lookup: _Lookup):
        self._pending = pending
        self._sizes = sizes
        self._lookup = lookup
        self._oriented: bool | None = None

    @property
    def _score(self) -> Any:
        return self._pending.scores[0] if self._pending.scores else None

    def score_source(self) -> Source | None:
        return self._score.source if self._score else None

    def query_side(self) -> int:
        """Which operand of the product holds the queries: the one whose free axis is not the keys'."""
        return 0 if self._oriented is not False else 1

    def orient(self, layout: Layout) -> None:
        """Find which operand is the query: its free axis runs along the weights' query axis."""
        score = self._score
        if score is None or self._oriented is not None:
            return
        made: Contraction = score.contraction
        for operand in (0, 1):
            for axis in made.only_in(operand):
                if made.size(axis) < 2:
                    continue
                index = torch.arange(made.size(axis)).reshape([made.size(a) if a == axis else 1 for a in made.output])
                spread = index.expand([made.size(a) for a in made.output]).reshape(score.node.shape)
                placed = self._from_first_score(spread)
                if placed is None:
                    continue
                placed = layout.canonical(placed)
                along_keys = placed.shape[-1] > 1 and bool((placed != placed[..., :1]).any())
                along_queries = placed.shape[-2] > 1 and bool((placed != placed[..., :1, :]).any())
                if along_keys and not along_queries:
                    self._oriented = operand == 1
                    return
                if along_queries and not along_keys:
                    self._oriented = operand == 0
                    return

    def _from_first_score(self, values: Tensor) -> Tensor | None:
        filled = [values if s is self._score else torch.full(s.node.shape, -1) for s in self._pending.scores]
        return self._lookup.from_scores(filled)

    def origins(self, side: int) -> frozenset[str]:
        """Arguments that reach the queries (0) or the keys (1)."""
        if self._score is None:
            return self._pending.logits_node.origins
        operand = side if self.query_side() == 0 else 1 - side
        return self._score.operands[operand].origins

    def width(self) -> int:
        if self._score is None:
            return 0
        made: Contraction = self._score.contraction
        return math.prod(made.size(a) for a in made.summed(0) if a in made.labels[1])

    # rows as tokens

    def _projection(self, node: Node) -> Node | None:
        """The nearest projection behind an operand."""
        todo, seen = [node], set()
        while todo:
            current = todo.pop(0)
            if current in seen:
                continue
            seen.add(current)
            if current.name in ("linear", "addmm") or "projection" in current.facts:
                return current
            if "product" in current.facts and current is not node:
                continue
            todo.extend(i for i in current.inputs if i.leaf is None)
            if len(seen) > 200:
                return None
        return None

    def _hidden(self, projection: Node) -> Node | None:
        """The hidden states that a projection reads, with their batch axis apart."""
        data = [i for i in projection.inputs if i.leaf is None or i.leaf.startswith("argument")]
        data = [i for i in data if i.origins] or data
        node = data[0] if data else None
        while node is not None and len(node.shape) < 3 and (node.name in MOVES or node.name in COPIES) and node.inputs:
            node = node.inputs[0]
        return node

    def batch_index(self) -> Tensor | None:
        """The sample of every entry, laid out like the weights; None where it cannot be told."""
        score, batch = self._score, self._sizes.batch
        if score is None or batch is None or batch < 2:
            return None
        for operand in (0, 1):
            node = score.operands[operand]
            found = self._follow_batch(node)
            if found is None:
                continue
            made: Contraction = score.contraction
            tensor = made.operands[operand]
            if found.numel() != tensor.numel():
                continue
            found = found.reshape(tensor.shape)
            axes = made.labels[operand]
            for axis in made.summed(operand):
                if (found != found.narrow(axes.index(axis), 0, 1)).any():
                    return None
            kept = [a for a in made.output if a in axes]
            taken = found
            for axis in sorted((axes.index(a) for a in made.summed(operand)), reverse=True):
                taken = taken.select(axis, 0)
            left = [a for a in axes if a in made.output]
            taken = taken.permute([left.index(a) for a in kept])
            taken = taken.reshape([taken.shape[kept.index(a)] if a in kept else 1 for a in made.output])
            spread = taken.expand([made.size(a) for a in made.output]).reshape(score.node.shape)
            placed = self._from_first_score(spread)
            if placed is not None:
                return placed
        return None

    def _follow_batch(self, node: Node) -> Tensor | None:
        projection = self._projection(node)
        hidden = self._hidden(projection) if projection is not None else None
        batch = self._sizes.batch
        if hidden is None or batch is None or batch not in hidden.shape[:-1]:
            return None
        axis = list(hidden.shape[:-1]).index(batch)
        seed = torch.arange(batch).reshape([batch if i == axis else 1 for i in range(len(hidden.shape))]).expand(hidden.shape)
        return Follow({hidden: seed}).to(node)

    def _features(self, node: Node) -> Tensor | None:
        """The column of the projection that each entry of an operand is."""
        projection = self._projection(node)
        if projection is None or projection.name not in ("linear", "addmm") and len(projection.shape) < 2:
            return None
        if "projection" in projection.facts:
            data, output = projection.facts["projection"]
            made_new = [i for i, a in enumerate(output) if a not in data]
            if len(output) != len(projection.shape) or not made_new:
                return None
            sizes = [projection.shape[i] if i in made_new else 1 for i in range(len(output))]
            seed = torch.arange(math.prod(sizes)).reshape(sizes).expand(projection.shape)
        else:
            seed = torch.arange(projection.shape[-1]).expand(projection.shape)
        return Follow({projection: seed}).to(node)

    def rows(self, *, over_queries: bool, value: Node, layout: Layout, key_axis: int) -> Rows:
        over_batch = ("query",) if over_queries else ()
        scrambled = []
        score = self._score
        if score is not None:
            made: Contraction = score.contraction
            self.orient(layout)
            for side, name in ((0, "query"), (1, "key")):
                operand = side if self.query_side() == 0 else 1 - side
                free = [a for a in made.only_in(operand)]
                features = self._features(score.operands[operand])
                tensor = made.operands[operand]
                if features is None or not free or features.numel() != tensor.numel():
                    continue
                axis = made.labels[operand].index(max(free, key=made.size))
                if _varies(features.reshape(tensor.shape), axis):
                    scrambled.append(name)
        features = self._features(value)
        if features is not None and key_axis < features.dim() and _varies(features, key_axis):
            scrambled.append("value")
        return Rows(over_batch, tuple(scrambled) if not over_queries else ())

    def kv_heads(self, order: Tensor) -> int | None:
        score = self._score
        if score is None:
            return None
        operand = 1 if self.query_side() == 0 else 0
        made: Contraction = score.contraction
        features = self._features(score.operands[operand])
        tensor = made.operands[operand]
        if features is None or features.numel() != tensor.numel():
            return None
        summed = [made.labels[operand].index(a) for a in made.summed(operand)]
        flat = features.reshape(tensor.shape).movedim(summed, list(range(-len(summed), 0)))
        distinct = torch.unique(flat.reshape(-1, math.prod(flat.shape[-len(summed) :]))[:, 0])
        return distinct.numel() if order.shape[1] % distinct.numel() == 0 else None

    def operand_rows(self, layout: Layout) -> tuple[Tensor | None, Tensor | None]:
        """Queries and keys as `[batch, heads, position, width]`."""
        self.orient(layout)
        found = []
        for side in (0, 1):
            operand = side if self.query_side() == 0 else 1 - side
            rows, offset, index = [], 0, []
            for score in self._pending.scores:
                made: Contraction = score.contraction
                tensor, axes = made.operands[operand].detach(), list(made.labels[operand])
                kept = [a for a in axes if a in made.output]
                summed = [a for a in axes if a not in made.output]
                rows.append(tensor.permute([axes.index(a) for a in [*kept, *summed]]).reshape(-1, math.prod(made.size(a) for a in summed)))
                number = torch.arange(offset, offset + rows[-1].shape[0]).reshape([tensor.shape[axes.index(a)] for a in kept])
                offset += rows[-1].shape[0]
                number = number.permute([kept.index(a) for a in made.output if a in kept])
                held = iter(number.shape)
                number = number.reshape([next(held) if a in kept else 1 for a in made.output])
                index.append(number.expand([made.size(a) for a in made.output]).reshape(score.node.shape))
            placed = self._lookup.from_scores(index) if index else None
            if placed is None or len({r.shape[-1] for r in rows}) != 1:
                found.append(None)
                continue
            placed = layout.canonical(placed)
            chosen = placed[..., 0] if side == 0 else placed[..., 0, :]
            found.append(torch.cat(rows)[chosen])
        return found[0], found[1]

    def path_scale(self) -> tuple[float, bool, bool, float | None]:
        """The factor put on q and k before their product; whether a norm or a parameter takes part; a softcap after it."""
        score = self._score
        if score is None:
            return 1.0, False, False, None
        factor, normed, learned = 1.0, False, False
        for node in score.operands:
            f, n, p = path_factor(node)
            factor, normed, learned = factor * f, normed or n, learned or p
        cap, after_learned = _after(self._pending.logits_node, score.node)
        return factor, normed, learned or after_learned, cap


def _varies(index: Tensor, axis: int) -> bool:
    return bool((index != index.narrow(axis, 0, 1)).any())


def path_factor(node: Node) -> tuple[float, bool, bool]:
    """Numbers multiplied in on the way from the projection to an operand; whether it is normed; whether a parameter scales it."""
    factor, normed, learned = 1.0, False, False
    seen: set[Node] = set()
    while node is not None and node not in seen and node.leaf is None:
        seen.add(node)
        if node.name in NORMS:
            normed = True
        if node.name in PER_POSITION or "projection" in node.facts or "product" in node.facts:
            break
        if node.name in ("mul", "div") and node.call is not None:
            number, parameter = _number_in(node)
            if number is not None:
                factor *= number if node.name == "mul" else (1 / number if number else math.inf)
                learned = learned or parameter
            else:
                others = [i for i in node.inputs[1:] if i.leaf is None]
                normed = normed or any(_is_norm(i) for i in others)
                learned = learned or any(i.leaf is not None and i.leaf.startswith("parameter") for i in node.inputs[1:])
        node = next((i for i in node.inputs if i.leaf is None and i.origins), node.inputs[0] if node.inputs else None)  # type: ignore[assignment]
    return factor, normed, learned


def _number_in(node: Node) -> tuple[float | None, bool]:
    assert node.call is not None
    for value in node.call.args:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value), False
        if isinstance(value, Node) and value.value is not None and value.shape.numel() == 1:
            return value.value, bool(value.leaf and value.leaf.startswith("parameter"))
    return None, False


def _is_norm(node: Node, depth: int = 6) -> bool:
    if node.name in ("rsqrt", "sqrt", "norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "std"):
        return True
    return depth > 0 and any(_is_norm(i, depth - 1) for i in node.inputs if i.leaf is None)


def _after(node: Node, stop: Node) -> tuple[float | None, bool]:
    """A softcap (`c · tanh(x / c)`) and learned factors between the product and the softmax."""
    cap, learned, outer = None, False, 1.0
    seen: set[Node] = set()
    while node is not stop and node not in seen:
        seen.add(node)
        if node.name == "tanh":
            cap = outer
        if node.name == "mul" and node.call is not None:
            number, parameter = _number_in(node)
            if number is not None and cap is None:
                outer = number
            learned = learned or parameter or any(i.leaf is not None and i.leaf.startswith("parameter") for i in node.inputs)
        chain = [i for i in node.inputs if "score" in i.facts or i is stop]
        if not chain:
            break
        node = chain[0]
    return cap, learned


# -- describing -----------------------------------------------------------------------------------------------------


def _described(site: Site, *, dropped: bool, path_scale: tuple[float, bool, bool, float | None] | None = None) -> Site:
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
        fit = measure.fit_scale(scores, linear)
        factors = tuple(float(s) * inside for s in fit.slope)
        scale = Scale(factors, fit.residual < 1e-3 or fit.fixed, normed, learned, cap, inside)
        added = fit.added
        near = added.masked_fill(added < -measure.HIDDEN_NATS, 0.0)
        if fit.residual >= 1e-3 or fit.fixed:
            bias = f"additive, up to {float(near.abs().amax()):.3g}" + (", the same in every sample" if fit.fixed else "")
    visible = measure.seen_keys(weights, added, logits, dropped=dropped)
    recognised = recognise(visible) if sampled is None else None
    return replace(
        site,
        scale=scale,
        visible=visible,
        mask=recognised.phrase if recognised is not None else f"{float(visible.double().mean()):.0%} of keys seen (rows sampled)",
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


# -- fused kernels --------------------------------------------------------------------------------------------------

_KERNELS = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


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
    try:
        kernel = _KERNELS.get(int(torch._fused_sdp_choice(query, key, value, mask, dropout, causal, scale=named.get("scale"), enable_gqa=bool(named.get("enable_gqa", False)))), "math")  # fmt: skip
    except (RuntimeError, TypeError):
        kernel = "math"
    return _from_parts(
        query, key, value, nodes, result, sizes, keep=keep, path=path, source=source, kind="fused", kernel=f"sdpa {kernel}",
        scale=scale, mask=mask, causal=causal, dropout=dropout, softcap=None,
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
    softcap: float | None, logits_of: Callable[[Tensor], Tensor] | None = None,
) -> Call:  # fmt: skip
    lead = query.shape[:-2] if query.dim() > 2 else torch.Size([1])
    heads, kv_heads = (lead[-1], key.shape[-3]) if query.dim() > 3 else (1, 1)
    queries, keys = query.shape[-2], key.shape[-2]
    features = _FusedRows(nodes, sizes)
    batch_of = features.batch(query)
    over_queries = batch_of is not None and batch_of.dim() > 1 and _varies(batch_of, -2)
    order = _order(tuple(lead), sizes.batch, None if batch_of is None or over_queries else batch_of[..., 0, 0].reshape(-1))

    def lay(tensor: Tensor, *, repeat: bool = True) -> Tensor:
        t = tensor if tensor.dim() > 2 else tensor[None]
        if repeat and t.dim() > 3 and t.shape[-3] != heads:
            t = t.repeat_interleave(heads // t.shape[-3], -3)
        return t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:])[order]

    def native(output: Tensor) -> Tensor:
        flat = torch.empty(order.numel(), *output.shape[-2:], dtype=output.dtype)
        flat[order.flatten()] = output.reshape(-1, *output.shape[-2:])
        return flat.reshape(*lead, *output.shape[-2:]).reshape(result.shape)

    def output_index(shape: torch.Size) -> tuple[Tensor, Tensor] | None:
        width = value.shape[-1]
        head_at = torch.empty(order.numel(), dtype=torch.long)
        head_at[order.flatten()] = torch.arange(order.shape[1]).repeat(order.shape[0])
        head = head_at.reshape(*lead, 1, 1)
        column = torch.arange(width)
        token = torch.arange(queries)[:, None]
        full = (*lead, queries, width)
        return (head * width + column).expand(full).reshape(shape), token.expand(full).reshape(shape).clone()

    whole = queries * keys * order.numel() <= ENTRIES
    tensors = visible = None
    q, k, v = lay(query), lay(key), lay(value)
    phrase, row_sum, bias = "", None, "none"
    if whole:
        scores = q @ k.mT
        logits = logits_of(scores.reshape(*lead, queries, keys)).reshape(-1, queries, keys)[order] if logits_of else scores * scale
        hidden, added = _mask_parts(mask, causal, lead, order, queries, keys)
        if added is not None:
            logits = logits + added
            bias = _bias_words(added, logits.dtype)
        if hidden is not None:
            logits = logits.masked_fill(hidden, float("-inf"))
        weights = torch.nan_to_num(torch.softmax(logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits, -1))
        weights = weights.to(q.dtype)
        tensors = Tensors(
            scores=scores, logits=logits, weights=weights, output=result, query=q, key=k, value=v,
            aggregate=lambda w: native(w.to(v.dtype) @ v), restore=native,
        )  # fmt: skip
        visible = logits > logits.amax(-1, keepdim=True) - 20 * measure.HIDDEN_NATS
        if added is not None:
            visible = visible & ~(added < added.amax(-1, keepdim=True) - measure.HIDDEN_NATS)
        visible = visible & ~torch.isneginf(logits) & ~(logits < measure._floor(logits.dtype)).all(-1, keepdim=True)
        phrase, row_sum = recognise(visible).phrase, weights.sum(-1)
    else:
        phrase = _mask_words(mask, causal, queries, keys)
    factor, normed, learned = 1.0, False, False
    for name in ("query", "key"):
        if name in nodes:
            f, n, p = path_factor(nodes[name])
            factor, normed, learned = factor * f, normed or n, learned or p
    side = nodes["attn_mask"].origins if "attn_mask" in nodes else frozenset()
    rows = Rows(("query",), ()) if over_queries else Rows((), features.scrambled({"query": query, "key": key, "value": value}))
    site = Site(
        path=path, role="self", kind=kind, heads=order.shape[1],
        kv_heads=features.kv_heads(key) or (kv_heads if order.shape[1] == heads else order.shape[1]),
        head_dim=query.shape[-1], value_dim=value.shape[-1], queries=queries, keys=keys,
        scale=Scale((scale * factor,) * order.shape[1], True, normed, learned, softcap, factor),
        mask=phrase, visible=visible, bias=bias, kernel=kernel, dtype=str(query.dtype).removeprefix("torch."), dropout=dropout,
        side=side, origins={n: nodes[n].origins for n in ("query", "key", "value") if n in nodes},
        lines=_lines(source, source, source, source), row_sum=row_sum, rows=rows, tensors=tensors if keep else None,
    )  # fmt: skip
    layout = Layout(order, (), result.shape, False, output_index)
    return Call(path, site, layout, None, native, batch=sizes.batch)


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


class _FusedRows:
    """The same questions about rows and samples for the operands of a fused call."""

    def __init__(self, nodes: Mapping[str, Node], sizes: Sizes):
        self._nodes = nodes
        self._sources = _Sources.__new__(_Sources)
        self._sources._sizes = sizes

    def batch(self, query: Tensor) -> Tensor | None:
        if "query" not in self._nodes or not self._sources._sizes.batch or self._sources._sizes.batch < 2:
            return None
        found = self._sources._follow_batch(self._nodes["query"])
        return found.reshape(query.shape) if found is not None and found.numel() == query.numel() else None

    def scrambled(self, operands: Mapping[str, Tensor]) -> tuple[str, ...]:
        names = []
        for name, tensor in operands.items():
            if name not in self._nodes:
                continue
            features = self._sources._features(self._nodes[name])
            if features is not None and features.numel() == tensor.numel() and _varies(features.reshape(tensor.shape), -2):
                names.append(name)
        return tuple(names)

    def kv_heads(self, key: Tensor) -> int | None:
        if "key" not in self._nodes or key.dim() < 3:
            return None
        features = self._sources._features(self._nodes["key"])
        if features is None or features.numel() != key.numel():
            return None
        return torch.unique(features.reshape(key.shape)[..., 0, 0]).numel()


__all__ = ["Call", "F", "Replacement", "assemble", "assemble_flex", "assemble_fused"]
