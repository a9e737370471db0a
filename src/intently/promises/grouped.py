"""Promise `grouped`: heads that share keys and values share them in groups of neighbours."""

from __future__ import annotations

from collections.abc import Iterable

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Trial
from intently.report import Cell
from intently.sites import Site


def misread(trial: Trial, site: Site) -> dict[str, tuple[int, ...]]:
    """Heads of a site whose keys, or values, are those of another group; empty where each reads its own.

    A released architecture was trained with the order it has: there, only keys and values that disagree are wrong.
    """
    reads = site.reads
    if reads is None or not reads.grouped or not site.rows.are_tokens:
        return {}
    own = {"keys": reads.keys, "values": reads.values}
    shared = {n: o for n, o in own.items() if o and 1 < len(set(o)) < len(reads.queries)}
    if trial.target.known:
        together = len(shared) == 2 and len(set(reads.keys)) == len(set(reads.values))
        differing = tuple(i for i, (k, v) in enumerate(zip(reads.keys, reads.values, strict=False)) if k != v)
        return {"values": differing} if together and differing else {}
    return {
        n: wrong
        for n, o in shared.items()
        if (wrong := tuple(i for i, (a, b) in enumerate(zip(o, reads.meant(o), strict=True)) if a != b))
    }


def try_on(trial: Trial) -> Iterable[Cell]:
    found = []
    for condition in trial.conditions:
        if cells.narrow(trial, condition) or condition.layout.padded or cells.same_as(trial, condition):
            continue
        if cells.ill(trial, condition):
            found.append(cells.untried("grouped", condition, "real outputs are not finite"))
            continue
        judged = [s for s in trial.sites(condition) if s.reads is not None and s.rows.are_tokens]
        if not judged:
            found.append(Cell("grouped", condition.name, "not-applicable", note="no heads share keys and values"))
            continue
        wrong = {s.key_name: _share(trial, s) for s in judged}
        bad = [share for share in wrong.values() if share]
        note = f"{len(bad)} of {len(judged)} sites" if bad else ""
        found.append(cells.cell("grouped", condition, max(bad, default=0.0), 0.0, broken=bool(bad), note=note))
    return found


def _share(trial: Trial, site: Site) -> float:
    """The share of a site's heads that read what they are not meant to."""
    assert site.reads is not None
    if site.reads.summed > 1:
        return 1.0
    heads = {h for wrong in misread(trial, site).values() for h in wrong}
    return len(heads) / max(site.heads, 1)


PROMISE = Promise(
    name="grouped",
    statement="Query head h reads the key and value head ⌊h / group⌋, and each query head is a head of its own.",
    applies_to="sites where heads share keys and values (grouped-query and multi-query attention)",
    how="At each site of a traced run the entries of queries, keys and values are followed back to their projections, "
    "which tells the head that each head reads. `error` is the share of heads that read another one.",
    sources=("Ainslie et al. 2023, GQA, section 2.2: arXiv:2305.13245",),
    try_on=try_on,
    error_means="reading another head, a share of",
    per_site=True,
)
