"""What the two faults of a window share: the pairs that depart from it at a call, and whether it is one edge that is off."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from intently.edits import see
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination, Look
from intently.faults.mask_ignored import weakly_masked
from intently.promises.windowed import Strays, strays


def one_off(off: Strays) -> bool:
    """Whether in every row at most one key at either edge is seen too many, or hidden too many."""

    def at_most_one(pairs: Tensor) -> bool:
        # Two keys too many stand side by side at an edge; one at each edge do not.
        return not bool((pairs[..., 1:] & pairs[..., :-1]).any()) and int(pairs.sum(-1).max()) <= 2

    return at_most_one(off.extra) and at_most_one(off.missing)


def looker(fault: Callable[[], Fault], *, one: bool) -> Callable[[Examination], Iterator[Suspicion]]:
    """Calls that are off their window by one, or by more."""

    def look(seen: Examination) -> Iterator[Suspicion]:
        found = []
        for each in seen.looks():
            off = strays(each.trial, each.condition, each.site) if each.comparable else None
            if off is not None and off.pairs.any() and not weakly_masked(each, off.extra):
                found.append((each, off))
        # Few real positions go hardly beyond the window: what is far off under the same switch is not off by one there.
        far = {_call(each) for each, off in found if not one_off(off)}
        for each, off in found:
            if one_off(off) is not one or (one and _call(each) in far):
                continue
            pairs = off.extra if off.extra.any() else off.missing
            yield Suspicion(
                fault=fault(),
                promise="windowed",
                site=each.site,
                heads=each.heads_where(off.pairs),
                message=_message(each, off),
                witness=each.witness(pairs, _sentence(off)),
                repair=lambda site, batch: see(lambda s: seen.wanted(s, batch))(site),
                condition=each.condition.name,
            )

    return look


def _call(each: Look) -> tuple[str, str]:
    """A call under one switch."""
    return each.condition.switch.name, each.site.key_name


def _message(each: Look, off: Strays) -> str:
    counted = [
        f"{int(pairs.sum())} keys {said}"
        for pairs, said in ((off.extra, "beyond the window are seen"), (off.missing, "inside the window are hidden"))
        if pairs.any()
    ]
    meant = each.trial.intent.mask_at(each.site.path)
    return f"{' and '.join(counted)}; meant is {meant}, the mask really used is: {each.site.mask}"


def _sentence(off: Strays) -> str:
    where = "beyond its window" if off.extra.any() else "inside its window"
    return "query {query} gives weight {weight} to key {key}, which is " + where
