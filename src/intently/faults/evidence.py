"""What the faults look at: the grid of broken promises, and each site held against the mask and scale that were meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from intently.intent import Intent
from intently.masks import Mask
from intently.promises import Condition, Trial
from intently.promises.cells import same_as
from intently.report import Cell, Table, Witness
from intently.sites import Site
from intently.targets.stream import Batch, Stream
from intently.targets.target import Target

OWN_POSITIONS = 4  # as many positions of its own a model may add to a stream


def streams_of(target: Target, lengths: Mapping[str, int], site: Site) -> tuple[Stream | None, Stream | None]:
    """The streams along which a site's queries and keys run; None where a length fits none of them."""

    def running(count: int, origins: frozenset[str]) -> Stream | None:
        # What no content of a stream reaches does not run along it, whatever its length.
        reaching = [s for s in target.streams if not origins or s.argument in origins]
        fitting = [s for s in reaching if s.positions(lengths[s.argument]) == count]
        if not fitting and len(reaching) == 1:
            # A few positions of the model's own (a class token) may run beside the stream's.
            only = reaching[0]
            return only if 0 < count - only.positions(lengths[only.argument]) <= OWN_POSITIONS else None
        # Sources do not read the main stream: what it reaches besides them runs along it.
        return target.main if origins and target.main in fitting else (fitting or [None])[0]

    return (
        running(site.queries, site.origins.get("query", frozenset())),
        running(site.keys, site.origins.get("key", frozenset())),
    )


def kept_over(batch: Batch, stream: Stream | None, count: int, site: Site) -> Tensor | None:
    """bool `[batch, position]` over a call's positions: real ones, and those of the model's own (in front, or behind)."""
    kept = batch.kept.get(stream.argument) if stream is not None else None
    if kept is None or kept.shape[1] == count:
        return kept
    if not 0 < count - kept.shape[1] <= OWN_POSITIONS:
        return None
    own = torch.ones(kept.shape[0], count - kept.shape[1], dtype=torch.bool)
    front, behind = torch.cat([own, kept], 1), torch.cat([kept, own], 1)
    seen = site.visible.any(1).any(1) if site.visible is not None else None
    return behind if seen is not None and torch.equal(seen, behind) else front


def _shortened(batch: Batch, key: Stream | None, site: Site) -> bool:
    """Whether keys stand for a padded source at positions that are not its own (pooled, projected): which are pads is not known."""
    reaching = site.origins.get("key", frozenset())
    return key is None and any(a in reaching and not bool(kept.all()) for a, kept in batch.kept.items())


def wanted_mask(target: Target, intent: Intent, lengths: Mapping[str, int], batch: Batch, site: Site) -> Tensor | None:
    """Which keys a site is meant to see: bool `[batch or 1, 1, query, key]`; None where nothing is known of its mask."""
    if {s.argument for s in target.aside} & (
        site.origins.get("query", frozenset()) | site.origins.get("key", frozenset())
    ):
        return None  # a call of another tower
    query, key = streams_of(target, lengths, site)
    queries, keys = site.queries, site.keys
    structure: Tensor | None = None
    own = intent.mask_at(site.path)
    main = target.main
    if batch.first is not None and query is main and main.argument in site.origins.get("key", ()):
        # Beside the keys of the piece stand those of the pieces before.
        return _in_piece(own, batch.kept[main.argument], batch.first, site) if own is not None else None
    function = query is not None and query.part != ""
    if site.role == "cross" and (query is not key or query is None) and not function:
        parts = "#" in site.path and site.origins.get("query") == site.origins.get("key")
        # Several calls on one stream may each take some of its rows: which keys those are meant to see is not known.
        structure = None if parts or _shortened(batch, key, site) else intent.memory.matrix(queries, keys)
    elif query is not None and query is target.main and intent.mask is not None:
        if own is None:
            return None  # the intent goes by layer, and of which one this is is not known
        structure = own.matrix(queries, keys)
        if queries != query.positions(lengths[query.argument]) and not bool(structure.all()):
            return None  # how positions of the model's own stand in an order is not known
    elif query is not None and query is not target.main:
        encoder = intent.encoder
        if encoder is None and len(target.streams) > 1 and not target.known:
            encoder = (
                intent.memory
            )  # of a released encoder that nothing is read of, what it is meant to hide is not known
        structure = encoder.matrix(queries, keys) if encoder is not None else None
    elif own is not None and query is None and key is None and queries == keys and len(target.streams) == 1:
        # Positions besides the stream's own (a class token) stand before them: only a full mask speaks of those too.
        full = bool(own.matrix(queries).all())
        structure = torch.ones(queries, keys, dtype=torch.bool) if full else None
    if structure is None:
        return None
    structure = structure if structure.dim() == 4 else structure[None, None]
    kept = kept_over(batch, key, keys, site)
    if kept is not None:
        structure = structure & kept[:, None, None, :]
    return structure


def _in_piece(own: Mask, kept: Tensor, first: int, site: Site) -> Tensor | None:
    """The rows that the queries of a piece have in the whole mask, over the keys held: the latest ones, or room for more."""
    newest, keys = first + site.queries, site.keys
    if kept.shape[1] != newest:
        return None  # its queries are not the tokens of the piece
    rows = own.matrix(newest)[..., first:, :] & kept[:, None, None, :]
    if keys <= newest:
        return rows[..., newest - keys :]
    return torch.cat([rows, torch.zeros(*rows.shape[:-1], keys - newest, dtype=torch.bool)], -1)


@dataclass(frozen=True)
class Look:
    """One site in one traced run, beside what was meant."""

    trial: Trial
    condition: Condition
    site: Site
    batch: Batch

    @cached_property
    def wanted(self) -> Tensor | None:
        """bool `[batch, 1, query, key]`: the keys that are meant to be seen."""
        mask = wanted_mask(self.trial.target, self.trial.intent, self.trial.lengths, self.batch, self.site)
        return self._spread(mask)

    def _spread(self, mask: Tensor | None) -> Tensor | None:
        """One mask per sample; None where the call knows other samples than the batch (one of them alone, windows)."""
        if mask is None or mask.shape[0] not in (1, self.samples):
            return None
        return mask.expand(self.samples, 1, self.site.queries, self.site.keys)

    @property
    def samples(self) -> int:
        return self.site.visible.shape[0] if self.site.visible is not None else self.batch.samples

    @cached_property
    def rows(self) -> Tensor:
        """bool `[batch, 1, query, 1]`: queries at real positions."""
        query, _ = streams_of(self.trial.target, self.trial.lengths, self.site)
        kept = kept_over(self.batch, query, self.site.queries, self.site)
        if kept is None or kept.shape != (self.samples, self.site.queries):
            return torch.ones(self.samples, 1, self.site.queries, 1, dtype=torch.bool)
        return kept[:, None, :, None]

    @cached_property
    def real_keys(self) -> Tensor:
        """bool `[batch, 1, 1, key]`: keys that are no pads."""
        _, key = streams_of(self.trial.target, self.trial.lengths, self.site)
        kept = kept_over(self.batch, key, self.site.keys, self.site)
        if kept is None or kept.shape != (self.samples, self.site.keys):
            return torch.ones(self.samples, 1, 1, self.site.keys, dtype=torch.bool)
        return kept[:, None, None, :]

    @cached_property
    def structure(self) -> Tensor | None:
        """The intended mask with every key taken for real."""
        kept = {k: torch.ones_like(v) for k, v in self.batch.kept.items()}
        whole = Batch(self.batch.arguments, self.batch.lengths, self.batch.samples, kept)
        mask = wanted_mask(self.trial.target, self.trial.intent, self.trial.lengths, whole, self.site)
        return self._spread(mask)

    @property
    def comparable(self) -> bool:
        """Whether the mask found can be held against the one that was meant."""
        seen = self.site.visible
        if self.wanted is None or seen is None or seen.shape[0] != self.batch.samples or not self.site.rows.are_tokens:
            return False
        tensors = self.site.tensors
        if self.site.partial:
            return False
        if tensors is None:
            return True
        operands = [t for t in (tensors.query, tensors.key) if t is not None]
        # NaN from earlier calls, or from a mask that is NaN itself, says nothing of which keys are seen.
        return all(bool(torch.isfinite(t).all()) for t in operands) and not (
            tensors.logits is not None and bool(torch.isnan(tensors.logits).any())
        )

    @cached_property
    def extra(self) -> Tensor:
        """bool `[batch, heads, query, key]`: seen by a real query, and not meant to be."""
        assert self.wanted is not None and self.site.visible is not None
        return self.site.visible & ~self.wanted & self.rows

    @cached_property
    def missing(self) -> Tensor:
        """bool `[batch, heads, query, key]`: meant to be seen by a real query, and hidden."""
        assert self.wanted is not None and self.site.visible is not None
        return self.wanted & ~self.site.visible & self.rows

    @cached_property
    def key_mask_arguments(self) -> frozenset[str]:
        """Arguments that carry the mask of this site's keys."""
        _, key = streams_of(self.trial.target, self.trial.lengths, self.site)
        return frozenset({key.padding.argument}) if key is not None and key.padding is not None else frozenset()

    @property
    def mask_arrives(self) -> bool:
        """Whether the key mask reaches this call's scores or weights."""
        return bool(self.key_mask_arguments & self.site.side)

    def heads_where(self, pairs: Tensor) -> tuple[int, ...] | None:
        """The heads concerned; None for all."""
        concerned = pairs.any(-1).any(-1).any(0)
        if concerned.all():
            return None
        return tuple(int(h) for h in concerned.nonzero().flatten())

    def witness(self, pairs: Tensor, sentence: str) -> Witness:
        """The first row in which a pair stands out, with the weights of that row and its neighbours."""
        sample, head, query, key = (int(i) for i in pairs.nonzero()[0])
        tensors = self.site.tensors
        values: dict[str, float] = {"sample": sample, "head": head, "query": query, "key": key}
        if tensors is None:
            return Witness(sentence.format(**values, weight="?"), None, values)
        weights = torch.nan_to_num(tensors.weights[sample, head].detach().double())
        first = max(0, min(query - 1, weights.shape[0] - 4))
        rows = range(first, min(first + 4, weights.shape[0]))
        columns = _columns(weights.shape[1], [key, query])
        marked = tuple((r, c) for r, i in enumerate(rows) for c, j in enumerate(columns) if pairs[sample, head, i, j])
        table = Table(
            corner=f"sample {sample}, head {head}",
            columns=tuple(f"key {j}" for j in columns),
            rows=tuple((f"query {i}", tuple(round(float(weights[i, j]), 4) for j in columns)) for i in rows),
            marked=marked,
        )
        values["weight"] = round(float(weights[query, key]), 6)
        return Witness(sentence.format(**values), table, values)

    def pads(self) -> str:
        """The pads of sample 0 in words."""
        keys = (~self.real_keys[0, 0, 0]).nonzero().flatten().tolist()
        return f"{keys[0]}–{keys[-1]}" if len(keys) > 1 else str(keys[0]) if keys else "none"


def _columns(count: int, wanted: Sequence[int], most: int = 8) -> list[int]:
    if count <= most:
        return list(range(count))
    around = sorted({j for w in wanted for j in (w - 1, w, w + 1) if 0 <= j < count})
    return around[:most]


@dataclass(frozen=True)
class Examination:
    """Everything known before a fault is named."""

    trial: Trial
    cells: tuple[Cell, ...]

    @cached_property
    def distinct(self) -> tuple[Condition, ...]:
        """Conditions whose outputs no earlier one gives."""
        return tuple(c for c in self.trial.conditions if same_as(self.trial, c) is None)

    def broken(self, promise: str) -> tuple[Condition, ...]:
        """Conditions under which a promise is broken."""
        names = {c.condition for c in self.cells if c.promise == promise and c.verdict == "broken"}
        return tuple(c for c in self.trial.everything if c.name in names)

    def breaks(self, promise: str, condition: Condition) -> bool:
        return any(c.name == condition.name for c in self.broken(promise))

    def unjudged(self, promise: str, condition: Condition) -> bool:
        """Whether a promise could not be tried under a condition."""
        return any(
            c.promise == promise and c.condition == condition.name and c.verdict == "not-tried" for c in self.cells
        )

    def cell(self, promise: str, condition: Condition) -> Cell | None:
        return next((c for c in self.cells if c.promise == promise and c.condition == condition.name), None)

    def gap(self, condition: Condition) -> Witness:
        """How far a switch moves an output."""
        promise = "backends-agree" if condition.switch.backend else "observer-neutral"
        cell = self.cell(promise, condition)
        moved = cell.error if cell is not None and cell.error is not None else 0.0
        return Witness(f"with {condition.switch.name} an output moves by {moved:.3g}", None, {"difference": moved})

    def looks(self, conditions: Iterable[Condition] | None = None) -> Iterator[Look]:
        """Every site under every condition that gives outputs of its own, or under some conditions."""
        for condition in self.distinct if conditions is None else conditions:
            for batch, sites in self.trial.pieces(condition):
                for site in sites:
                    yield Look(self.trial, condition, site, batch)

    def wanted(self, site: Site, batch: Batch) -> Tensor | None:
        """The intended mask of a site for a batch: what a repair puts in place."""
        return wanted_mask(self.trial.target, self.trial.intent, batch.lengths, batch, site)


def triangle_missing(pairs: Tensor) -> bool:
    """Whether hidden pairs have the shape of a triangle: in each row a run of last keys, one shorter per row.

    `pairs` is bool `[query, key]`; the runs may start above or below the diagonal.
    """
    hidden = pairs.sum(-1)
    if not hidden.any():
        return False
    keys = pairs.shape[-1]
    for row, count in zip(pairs, hidden.tolist(), strict=True):
        if count and not bool(row[keys - count :].all()):
            return False
    if pairs.shape[0] == 1:
        return int(hidden[0]) == keys - 1 and keys > 1  # a triangle's first row
    steps = hidden[:-1] - hidden[1:]
    moving = (hidden[:-1] > 0) & (hidden[:-1] < keys)
    return bool((steps[moving] == 1).all()) and bool(moving.any())


def complement(seen: Tensor, hidden: Tensor, allowed: Tensor, forbidden: Tensor) -> bool:
    """Whether a mask is the exact opposite of the one meant: nine in ten allowed pairs hidden, and forbidden ones seen.

    Where nothing is forbidden all that is allowed must be hidden: steep biases and narrow windows hide most of it, too.
    """
    if not allowed.any():
        return False
    share = float((hidden & allowed).sum() / allowed.sum())
    return share >= 0.9 and float((seen & forbidden).sum() / forbidden.sum()) >= 0.9 if forbidden.any() else share == 1
