"""Calls of a model fed in pieces whose queries are turned by the angles of another place than in the whole forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from intently.edits import turn_on
from intently.faults.evidence import Examination
from intently.promises import Condition
from intently.promises.order_aware import NEAR
from intently.sites import Site
from intently.targets.stream import Batch


@dataclass
class Misplaced:
    """A call of one piece; `place` is the position whose angles its first query gets, `meant` the one at which it stands."""

    site: Site
    condition: Condition
    place: int
    meant: int
    right: Tensor  # [batch, heads, position, width, width]: the maps of the whole forward
    _held: Tensor = field(default_factory=lambda: torch.empty(0))  # the maps by which the keys held so far were turned

    def repair(self, site: Site, batch: Batch) -> Any:
        """Queries, and the keys of every piece so far, turned as in the whole forward; pieces come one after the other."""
        now, first = site.rotation("query"), batch.first
        if first is None or now is None:
            return None
        newest = first + site.queries
        self._held = now.maps if first == 0 else torch.cat([self._held, now.maps], 2)
        if self._held.shape[2] != newest or newest > self.right.shape[2]:
            return None
        on = self.right[:, :, :newest] @ torch.linalg.inv(self._held)
        keys = on[:, :, max(newest - site.keys, 0) :]
        empty = torch.eye(on.shape[-1], dtype=on.dtype).expand(*on.shape[:2], site.keys - keys.shape[2], -1, -1)
        return turn_on(on[:, :, first:], torch.cat([keys, empty], 2))(site)


def misplaced(seen: Examination) -> Iterator[Misplaced]:
    """The first such piece of every call, under each condition that breaks `cache-equal`."""
    for condition in seen.broken("cache-equal"):
        whole = {s.key_name: s for s in seen.trial.sites(condition.whole)}
        found: set[str] = set()
        for look in seen.looks([condition]):
            site, other = look.site, whole.get(look.site.key_name)
            if other is None or site.key_name in found or not look.batch.first or other.role != "self":
                continue
            place, right = _place(site, other, look.batch.first)
            if place is not None and right is not None:
                found.add(site.key_name)
                yield Misplaced(site, condition, place, look.batch.first, right)


def _place(site: Site, whole: Site, first: int) -> tuple[int | None, Tensor | None]:
    """The position of the whole forward whose angles the first query has, where that is not its own; and all angles there."""
    now, all_ = site.rotation("query"), whole.rotation("query")
    if now is None or all_ is None or not all_.turns or not all_.varies(2) or site.queries != now.maps.shape[2]:
        return None, None
    right, count = all_.maps, site.queries
    if right.shape[:2] != now.maps.shape[:2] or first + count > right.shape[2]:
        return None, None

    def alike(start: int) -> bool:
        return bool(((right[:, :, start : start + count] - now.maps).abs() < NEAR).all())

    if alike(first):
        return None, None
    # Where samples stand alike, so does any number of them.
    place = next((p for p in range(right.shape[2] - count + 1) if alike(p)), None)
    return place, right if all_.varies(0) else right[:1]
