"""Without a stated intent: the mask that most calls of the output's stream are seen to use, layer by layer where windows differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from intently.intent import Intent, layer_of
from intently.masks import Mask, recognise
from intently.sites import Site
from intently.targets.target import Target

COMPARED = 8  # positions on which two masks are compared


@dataclass(frozen=True)
class Seen:
    """A self-attention call of the main stream, with the mask that it is seen to use."""

    site: Site
    mask: Mask


def observed(target: Target, lengths: Mapping[str, int], sites: Sequence[Site]) -> Intent:
    """The stated intent, or the mask that most self-attention calls of the main stream are observed to use.

    Which mask the majority has is asked with windows left aside: layers may differ in how far they see, and often do by
    design. Then each layer's own window stands for its intent.
    """
    stated = target.intent
    if stated is not None and stated.mask is not None:
        return stated
    base = replace(stated or Intent(), origin="observed")
    seen = _seen(target, lengths, sites)
    if not seen:
        return base
    whole, votes = Counter(s.mask.without_bands() for s in seen).most_common(1)[0]
    if votes < len(seen) and votes * 2 <= len(seen):
        return base  # no majority: nothing is claimed
    alike = [s for s in seen if s.mask.without_bands() == whole]
    usual, votes = Counter(s.mask for s in alike).most_common(1)[0]
    if votes == len(alike):
        return replace(base, mask=usual)
    numbers = [layer_of(s.site.path) for s in alike]
    if None in numbers or len(set(numbers)) < len(numbers):
        return replace(base, mask=usual) if votes * 2 > len(seen) else base
    own = {number: s.mask for number, s in zip(numbers, alike, strict=True) if number is not None}
    return replace(base, layers=tuple(own.get(n, usual) for n in range(max(own) + 1)))


def narrowest(first: Intent, others: Sequence[Intent], sites: Sequence[Site]) -> Intent:
    """Of intents observed in several runs, the one that hides most: a run in which a mask is lost does not set the measure.

    No run is given anything to hide, so what one of them hides is the model's own rule. Windows are compared last, and
    those count only that see nothing else than the first does.
    """
    if first.mask is None or first.origin != "observed":
        return first
    seen = _without_windows(first.mask)

    def hidden(intent: Intent) -> tuple[int, int]:
        assert intent.mask is not None
        masks = [intent.mask_at(s.path) for s in sites if s.role == "self"]
        windows = sum(m is not None and m.without_bands() != m for m in masks)
        return int((~_without_windows(intent.mask)).sum()), windows

    within = [o for o in others if o.mask is not None and not bool((_without_windows(o.mask) & ~seen).any())]
    return max([first, *within], key=hidden)


def _without_windows(mask: Mask) -> Tensor:
    return mask.without_bands().matrix(COMPARED)


def odd_one_out(target: Target, lengths: Mapping[str, int], sites: Sequence[Site]) -> tuple[Site, str] | None:
    """The one call whose mask differs from that of all others, and the difference in words; None where there is none such.

    Of two calls neither is the odd one, and masks that take turns are a pattern.
    """
    seen = _seen(target, lengths, sites)
    counted = Counter(s.mask for s in seen)
    if len(counted) != 2 or len(seen) < 3 or min(counted.values()) > 1:
        return None
    (usual, others), (odd, _) = counted.most_common()
    site = next(s.site for s in seen if s.mask == odd)
    return site, f"{site.path} sees {odd}, while the {others} other self-attention calls see {usual}"


def _seen(target: Target, lengths: Mapping[str, int], sites: Sequence[Site]) -> list[Seen]:
    """The calls whose mask is read without exception, the same for every sample and head."""
    main = target.main
    length = main.positions(lengths[main.argument])
    alone = len(target.streams) == 1
    own = [s for s in sites if s.role == "self" and (alone or main.argument in s.origins.get("query", frozenset()))]
    # Calls over the stream's own positions; where none runs over just these (a class token stands before them), all.
    own = [s for s in own if s.queries == length] or own
    found = []
    for site in own:
        if site.visible is not None and site.rows.are_tokens and not site.partial:
            kind = recognise(site.visible)
            if kind.exact and kind.mask is not None and kind.mask.batch is None and kind.mask.heads is None:
                found.append(Seen(site, kind.mask))
    return found
