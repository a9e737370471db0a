"""The calls of a model fed in pieces, each beside the rows of the whole forward: which keys it sees otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from intently.edits import see
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look, wanted_mask
from intently.sites import Site
from intently.targets.stream import Batch


@dataclass(frozen=True)
class Step:
    """A call of one piece; `expected` is what the same queries see in the whole forward, laid over the keys held here."""

    look: Look
    whole: Site
    expected: Tensor  # bool [batch, heads, query, key]
    places: (
        Tensor | None
    )  # [key]: the position of each key held, one past the newest where it is empty; None: the memory

    @cached_property
    def rows(self) -> Tensor:
        """bool `[batch, 1, query, 1]`: queries at real positions."""
        return _real(self.look, self.look.site.queries)[:, None, :, None]

    @cached_property
    def extra(self) -> Tensor:
        assert self.look.site.visible is not None
        return self.look.site.visible & ~self.expected & self.rows

    @cached_property
    def missing(self) -> Tensor:
        assert self.look.site.visible is not None
        return self.expected & ~self.look.site.visible & self.rows

    @cached_property
    def lost(self) -> int:
        """How many of the keys that the whole forward sees are not held at all."""
        if self.places is None or self.whole.visible is None:
            return 0
        first, held = _first(self.look.batch), int(self.places.min())
        rows = self.whole.visible[:, :, first : first + self.look.site.queries, :held] & self.rows
        return int(rows.any(2).any(1).any(0).sum())

    @cached_property
    def later(self) -> Tensor:
        """Pairs seen besides, whose key comes after the query and is held."""
        if self.places is None:
            return torch.zeros_like(self.extra)
        first = _first(self.look.batch)
        queries = torch.arange(first, first + self.look.site.queries)
        newest = first + self.look.site.queries
        return self.extra & (self.places > queries[:, None]) & (self.places < newest)

    @cached_property
    def pads(self) -> Tensor:
        """Pairs seen besides, whose key is a pad."""
        target, batch = self.look.trial.target, self.look.batch
        names = [s.argument for s in target.streams if (s is target.main) == (self.places is not None)]
        for kept in (batch.kept[n] for n in names):
            if self.places is None and kept.shape[1] == self.look.site.keys:
                return self.extra & ~kept[:, None, None, :]
            if self.places is not None:
                real = kept[:, self.places.clamp_max(kept.shape[1] - 1)]
                return self.extra & ~real[:, None, None, :] & (self.places < kept.shape[1])
        return torch.zeros_like(self.extra)

    @property
    def wrong(self) -> Tensor:
        return self.extra | self.missing

    def in_words(self) -> str:
        """What the first wrong query sees, and what it sees in the whole forward."""
        assert self.look.site.visible is not None
        sample, head, query, _ = (int(i) for i in self.wrong.nonzero()[0])
        seen, meant = self.look.site.visible[sample, head, query], self.expected[sample, head, query]
        fed = _first(self.look.batch)
        return (
            f"with {fed} tokens in the cache, query {fed + query} sees keys {self._keys(seen)} (of {self.look.site.keys} held); "
            f"in the whole forward it sees {self._keys(meant)}"
        )

    def _keys(self, seen: Tensor) -> str:
        places = seen.nonzero().flatten() if self.places is None else self.places[seen]
        return spans(places.tolist())

    def meant(self, site: Site, batch: Batch) -> Tensor | None:
        """What a call of any piece is meant to see."""
        trial = self.look.trial
        return wanted_mask(trial.target, trial.intent, batch.lengths, batch, site)

    @cached_property
    def stated(self) -> bool:
        """Whether the whole forward sees what is meant, so that the intent speaks for every piece, however it is fed."""
        meant = self.meant(self.look.site, self.look.batch) if self.places is not None else None
        return meant is not None and not bool(((meant ^ self.expected) & self.rows).any())

    def repair(self, site: Site, batch: Batch) -> Any:
        """Let a call of a piece see what its queries see in the whole forward, which stays as it is."""
        if batch.first is not None and self.stated:
            return see(lambda s: self.meant(s, batch))(site)
        return as_whole(site, batch, self.whole, self.look.trial.target.main.argument)

    def suspicion(self, fault: Fault, pairs: Tensor) -> Suspicion:
        """Named, located, and with its repair."""
        sentence = "query {query} of the piece gives weight {weight} to key {key}"
        return Suspicion(
            fault=fault,
            promise="cache-equal",
            site=self.look.site,
            heads=self.look.heads_where(pairs),
            message=self.in_words(),
            witness=self.look.witness(pairs, sentence),
            repair=self.repair,
            condition=self.look.condition.name,
        )


def steps(seen: Examination) -> Iterator[Step]:
    """Every call of every piece that does not see what it is meant to, under each condition that breaks `cache-equal`."""
    for condition in seen.broken("cache-equal"):
        whole = {s.key_name: s for s in seen.trial.sites(condition.whole)}
        for look in seen.looks([condition]):
            other = whole.get(look.site.key_name)
            laid = _laid(look.site, look.batch, other, seen.trial.target.main.argument) if other is not None else None
            visible = look.site.visible
            if other is None or laid is None or visible is None or look.site.partial or look.batch.first is None:
                continue
            if laid[0].shape != visible.shape or not look.site.rows.are_tokens:
                continue
            step, meant = Step(look, other, *laid), seen.wanted(look.site, look.batch)
            if meant is not None and not bool(((visible != meant) & step.rows).any()):
                continue  # as it is meant: what departs from that is the whole forward
            yield step


def overfull(seen: Examination) -> Iterator[tuple[Look, Site]]:
    """Calls of pieces over a source that read more keys than in the whole forward, each with its call there."""
    for condition in seen.broken("cache-equal"):
        whole = {s.key_name: s for s in seen.trial.sites(condition.whole)}
        for look in seen.looks([condition]):
            other = whole.get(look.site.key_name)
            if (
                look.batch.first is not None
                and other is not None
                and other.role == "cross"
                and look.site.keys > other.keys
            ):
                yield look, other


def _first(batch: Batch) -> int:
    assert batch.first is not None
    return batch.first


def _real(look: Look, queries: int) -> Tensor:
    kept = look.batch.kept[look.trial.target.main.argument]
    return kept[:, -queries:]


def _laid(site: Site, batch: Batch, whole: Site, main: str) -> tuple[Tensor, Tensor | None] | None:
    """The rows of the whole forward over the keys of one piece, and where those keys stand; None where they do not fit."""
    first, rows = batch.first, whole.visible
    if first is None or rows is None or whole.queries < first + site.queries:
        return None
    newest = first + site.queries
    if batch.kept[main].shape[1] != newest:
        return None  # its queries are not the tokens of the piece
    rows = rows[:, :, first:newest]
    if whole.keys != whole.queries:
        return (rows, None) if whole.keys == site.keys else None
    if site.keys >= newest:  # a cache of fixed size, its end still empty
        empty = torch.zeros(*rows.shape[:3], site.keys - newest, dtype=torch.bool)
        places = torch.arange(site.keys).clamp_max(newest)
        return torch.cat([rows[..., :newest], empty], -1), places
    held = torch.arange(newest - site.keys, newest)  # one that keeps the latest
    return rows[..., held], held


def as_whole(site: Site, batch: Batch, whole: Site, main: str) -> Any:
    """A repair: each call of a piece sees what the same queries see in the whole forward; the whole one stays as it is."""
    laid = _laid(site, batch, whole, main)
    if laid is None or site.visible is None or laid[0].shape != site.visible.shape:
        return None
    return see(lambda _: laid[0])(site)


def spans(places: list[int]) -> str:
    """`0–3, 5` for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for place in sorted(places):
        if parts and place == parts[-1][1] + 1:
            parts[-1][1] = place
        else:
            parts.append([place, place])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts) or "none"
