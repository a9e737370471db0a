"""Which head of the keys and values each query head reads: read off the entries that they were in their projections."""

from __future__ import annotations

import torch
from torch import Tensor

from intently.sites.site import Reads


def reads_of(query: Tensor | None, key: Tensor | None, value: Tensor | None, summed: int) -> Reads | None:
    """From entry numbers `[batch, heads, position, width]`; None where heads share nothing or the order cannot be told.

    `summed` is how many heads were added up in each head of the call.
    """
    own = [_numbered(t) for t in (query, key, value)]
    queries, keys, values = (t or () for t in own)
    if len(queries) < 2 or len(set(queries)) < len(queries) or not keys:
        queries = keys = values = ()
    found = Reads(queries, keys, values if queries else (), summed)
    return found if summed > 1 or found.grouped else None


def _numbered(entries: Tensor | None) -> tuple[int, ...] | None:
    """The own head that each head reads, numbered in the order in which the projection holds them.

    None unless every sample, at its first and last positions, says the same.
    """
    if entries is None or not entries.numel():
        return None
    said = {tuple(_ranks(entries[sample, :, place])) for sample in (0, -1) for place in (0, -1)}
    return said.pop() if len(said) == 1 and bool((entries[0, :, 0] >= 0).any(-1).all()) else None


def _ranks(rows: Tensor) -> list[int]:
    return torch.unique(rows, dim=0, return_inverse=True)[1].tolist()
