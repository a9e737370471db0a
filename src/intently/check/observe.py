"""Without a stated intent: the mask that most calls of the output's stream are seen to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from intently.intent import Intent
from intently.masks import recognise
from intently.sites import Site
from intently.targets.target import Target


def observed(target: Target, lengths: Mapping[str, int], sites: Sequence[Site]) -> Intent:
    """The stated intent, or the mask that most self-attention calls of the main stream are observed to use."""
    stated = target.intent
    if stated is not None and stated.mask is not None:
        return stated
    base = stated or Intent()
    main = target.main
    length = main.positions(lengths[main.argument])
    alone = len(target.streams) == 1
    own = [s for s in sites if s.role == "self" and (alone or main.argument in s.origins.get("query", frozenset()))]
    # Calls over the stream's own positions; where none runs over just these (a class token stands before them), all.
    own = [s for s in own if s.queries == length] or own
    votes: dict[str, list[Site]] = {}
    for site in own:
        if site.visible is not None and site.rows.are_tokens and not site.partial:
            kind = recognise(site.visible)
            if kind.exact and kind.mask is not None and kind.mask.batch is None and kind.mask.heads is None:
                votes.setdefault(str(kind.mask), []).append(site)
    if not votes:
        return replace(base, origin="observed")
    winners = max(votes.values(), key=len)
    mask = recognise(winners[0].visible).mask if winners[0].visible is not None else None
    if len(votes) > 1 and len(winners) * 2 <= sum(map(len, votes.values())):
        return replace(base, origin="observed")  # no majority: nothing is claimed
    return replace(base, mask=mask, origin="observed")
