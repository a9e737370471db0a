"""What the three scale faults share: how a wrong factor is read, and the suspicion it leads to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from intently.edits import rescale
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination
from intently.promises.scaled import intended, off
from intently.report import Severity, Table, Witness
from intently.sites import Site


def reading(site: Site, factor: float, wanted: float) -> tuple[str, str]:
    """The name of the fault that a factor shows, and the factor in words."""
    width, heads = site.head_dim, site.heads
    model = width * heads

    def near(value: float) -> bool:
        return abs(factor - value) <= 2e-2 * abs(value)

    if near(1.0):
        return "scale-missing", "1: no scale at all"
    if near(1 / width) or near(wanted * wanted):
        return "scale-twice", f"1/{width}: the scale 1/√{width} applied twice"
    if near(math.sqrt(width)):
        return "scale-wrong-width", f"√{width}: multiplied where it should be divided"
    if near(1 / math.sqrt(model)):
        return "scale-wrong-width", f"1/√{model}: the width of the model instead of the head's {width}"
    if near(1 / math.sqrt(heads)):
        return "scale-wrong-width", f"1/√{heads}: the number of heads instead of the width {width}"
    if near(width**-0.25):
        return "scale-wrong-width", f"{width}^-¼: put on one of q and k instead of on both"
    meant = 1 / factor**2 if factor else math.inf
    if factor > 0 and abs(meant - round(meant)) < 0.02 * meant and meant >= 1:
        return "scale-wrong-width", f"1/√{round(meant)}: another width than the head's {width}"
    return "scale-wrong-width", f"{factor:.4g}, which fits no width of the model"


def looker(name: str, fault: Callable[[], Fault]) -> Callable[[Examination], Iterator[Suspicion]]:
    """Sites whose factor reads as one of the three faults."""

    def look(seen: Examination) -> Iterator[Suspicion]:
        for each in seen.looks():
            if not seen.breaks("scaled", each.condition):
                continue
            wrong = off(seen.trial, each.site)
            wanted = intended(seen.trial, each.site)
            if not wrong or wanted is None or each.site.scale is None:
                continue
            head, factor = next(iter(wrong.items()))
            kind, words = reading(each.site, factor, wanted)
            if kind != name:
                continue
            folded = kind == "scale-missing" and is_folded(each.site)
            heads = None if len(wrong) == len(each.site.scale.factors) else tuple(wrong)
            yield Suspicion(
                fault=fault(),
                promise="scaled",
                site=each.site,
                heads=heads,
                message=f"logits are q·k × {factor:.4g} where × {wanted:.4g} (1/√{each.site.head_dim}) is meant; measured factor: {words}"
                + (
                    f"; the queries are about √{each.site.head_dim} times smaller than the keys, so the scale may be folded into the weights "
                    "(then state it: Intent(scale=1.0))"
                    if folded
                    else ""
                ),
                witness=_witness(each.site, head, factor, wanted),
                repair=lambda site, batch, w=wanted: rescale(w)(site),
                severity=_severity(seen, each.site, folded),
                condition=each.condition.name,
            )

    return look


def is_folded(site: Site) -> bool:
    """Whether queries are smaller than keys by about the scale that is missing, as where the initial weights carry it."""
    tensors = site.tensors
    if tensors is None or tensors.query is None or tensors.key is None:
        return False
    if site.scale is not None and site.scale.inside != 1:
        return False  # one of the two was multiplied on the way: their sizes are not the weights' doing
    query, key = (float(t.detach().double().pow(2).mean().sqrt()) for t in (tensors.query, tensors.key))
    ratio = min(query, key) / max(query, key, 1e-30) * math.sqrt(site.head_dim)
    return site.head_dim > 3 and 0.67 < ratio < 1.5


def _severity(seen: Examination, site: Site, folded: bool) -> Severity | None:
    """A released architecture is trained with the factor it has, so there it is only told; a doubtful one is a warning."""
    if seen.trial.target.known:
        return "note"
    if folded or (site.scale is not None and not site.scale.exact):
        return "warning"
    return None


def _witness(site: Site, head: int, factor: float, wanted: float) -> Witness:
    tensors = site.tensors
    values = {"head": head, "measured": factor, "intended": wanted}
    sentence = f"head {head}: logit / (q·k) = {factor:.6g}, meant {wanted:.6g}"
    if tensors is None or tensors.scores is None or tensors.logits is None or site.scale is None:
        return Witness(sentence, None, values)
    inside = site.scale.inside or 1.0
    query = tensors.scores.shape[-2] - 1  # the last query sees most
    raw = tensors.scores[0, head, query].detach().double() / inside
    logits = tensors.logits[0, head, query].detach().double()
    keys = [j for j in range(min(5, raw.numel())) if logits[j] > -1e4]
    if not keys:
        return Witness(sentence, None, values)
    table = Table(
        corner=f"sample 0, head {head}, query {query}",
        columns=tuple(f"key {j}" for j in keys),
        rows=(
            ("q·k", tuple(round(float(raw[j]), 4) for j in keys)),
            ("logit", tuple(round(float(logits[j]), 4) for j in keys)),
            ("meant", tuple(round(float(raw[j]) * wanted, 4) for j in keys)),
        ),
        marked=tuple((1, c) for c in range(len(keys))),
    )
    return Witness(sentence, table, values)
