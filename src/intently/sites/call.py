"""A call under construction: later operations may still divide it by a row sum or merge its heads; an edit may replace it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from intently.sites.describe import described
from intently.sites.layout import Layout
from intently.sites.origin import varies
from intently.sites.provenance import Follow, Node
from intently.sites.rotation import Rotation
from intently.sites.site import Reads, Rows, Site
from intently.sites.trace_types import Pending


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
    reads: Reads | None = None
    dropout: float | None = None
    turned: Mapping[str, Callable[[], Rotation | None]] | None = None  # where queries and keys were turned otherwise
    softcap: float | None = None  # the cap that the new logits were given


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
    replaced: bool = False
    folded: bool = False

    def replace(self, change: Replacement, result: Tensor, *, describe: bool) -> Tensor:
        """The call's output after an edit, in the model's layout; the site may then describe the edited call."""
        site, tensors = self.site, self.site.tensors
        assert tensors is not None
        self.replaced = True
        if change.output is not None and tensors.restore is not None:
            output = tensors.restore(change.output).to(result.dtype).reshape(result.shape)
            kept = replace(tensors, output=output, scores=None, logits=None)  # they describe the call that was replaced
        elif change.weights is None:
            return result  # the layer's output has no place for each head
        else:
            weights = change.weights.to(tensors.weights.dtype)
            factor = tensors.weights.sum(-1, keepdim=True) if site.deferred else 1.0
            output = tensors.aggregate(weights * factor).to(result.dtype).reshape(result.shape)
            kept = replace(tensors, weights=weights, logits=change.logits, output=output)
            if change.turned is not None:
                kept = replace(kept, turned=change.turned, scores=change.scores)
        if not describe:
            return output
        changed = replace(site, rows=change.rows or site.rows, reads=change.reads or site.reads, repaired=True)
        if change.softcap and changed.scale is not None:
            changed = replace(changed, scale=replace(changed.scale, softcap=change.softcap))
        self.site = described(replace(changed, tensors=kept), dropped=False)
        self.site = replace(self.site, dropout=site.dropout if change.dropout is None else change.dropout)
        return output

    def merged_at(self, node: Node, features: Sequence[int], groups: Sequence[int] = ()) -> None:
        """Check that the heads of the output lie side by side, token by token, where a projection reads them.

        `features` are the axes that it sums over; `groups` those along which it has weights of their own, each for
        some of the heads.
        """
        if self.node is None or self.site.rows.over_batch or self.replaced or self.folded:
            return
        shape = self.node.shape
        positions = self.layout.output_index(shape)
        if positions is None:
            return
        column, token, sample = positions
        tokens = Follow({self.node: token}).to(node)
        merged = Follow({self.node: column}).to(node) if column is not None else None
        if tokens is None:
            return
        last = list(range(-len(features), 0))
        tokens = tokens.movedim(list(features), last).flatten(-len(features))
        ours = tokens >= 0  # other heads of the same layer may stand beside this call's
        first = torch.where(ours, tokens, tokens.max()).amin(-1, keepdim=True)
        mixed = bool(((tokens != first) & ours).any())
        if merged is not None:
            read = [*groups, *features]
            flat = merged.movedim(read, list(range(-len(read), 0))).flatten(-len(read)).flatten(0, -2)
            known = flat[(flat >= 0).any(-1)]  # other calls' outputs may be stacked beside this one's
            first = known[:1]
            mixed = mixed or bool(((known != first) & (known >= 0) & (first >= 0)).any())
        samples = Follow({self.node: sample}).to(node)
        if samples is not None and samples.dim() == 3 and len(features) == 1:
            # Samples run along one of the two axes of positions, not along both.
            rows = samples.movedim(features[0], -1).amax(-1)
            mixed = mixed or (varies(rows, 0) and varies(rows, 1))
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
            partial=False,
            row_sum=torch.where(sums > 0, torch.ones_like(sums), sums) if over_keys else sums,
            normalized_over="keys" if over_keys else "another axis",
            tensors=tensors,
        )

    def finished(self, *, numbered: bool) -> Site:
        # Exponentials that nothing sums are never divided by their sum.
        partial = self.site.partial and (self.pending is None or self.pending.summed)
        return replace(self.site, path=self.key if numbered else self.path, key_name=self.key, partial=partial)


def role_of(site: Site) -> str:
    """`cross` when keys depend on another set of the model's arguments than queries, or stand at other positions."""
    query, key = (content_of(site.origins.get(n, frozenset())) for n in ("query", "key"))
    if query != key or (site.kind == "additive" and site.queries != site.keys):
        return "cross"
    return "self" if site.queries == site.keys or site.keys > site.queries == 1 else "cross"


def content_of(origins: frozenset[str]) -> frozenset[str]:
    """The arguments among these that carry content, rather than a mask or positions."""
    return frozenset(o for o in origins if "mask" not in o and "position" not in o)
