"""Where the keys and the values of calls come from, among a target's streams; and which layer a call stands in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from intently.edits import silence
from intently.promises import Condition, Trial, difference
from intently.promises.trial import BatchEdit
from intently.sites import Site
from intently.targets.stream import Batch


@dataclass(frozen=True)
class Wiring:
    """Where the keys and the values of a call come from, among a target's streams."""

    site: Site
    key: str  # source | own | neither
    value: str

    @property
    def reads_source(self) -> bool:
        return self.key == self.value == "source"

    @property
    def is_own(self) -> bool:
        return self.key == self.value == "own"

    @property
    def is_mixed(self) -> bool:
        return {self.key, self.value} == {"source", "own"}


def wirings(trial: Trial, sites: Sequence[Site]) -> list[Wiring]:
    """The calls whose queries belong to the main stream, and where the rest of each comes from."""
    main = trial.target.main.argument
    sources = {s.argument for s in trial.target.sources}

    def of(origins: frozenset[str]) -> str:
        return "own" if main in origins else "source" if origins & sources else "neither"

    return [
        Wiring(s, of(s.origins.get("key", frozenset())), of(s.origins.get("value", frozenset())))
        for s in sites
        if main in s.origins.get("query", frozenset())
    ]


def place(site: Site) -> str:
    """A call's place in its layer: its path without the layer's number, and which of the module's calls it is."""
    return re.sub(r"(?<![^.])\d+(?=[.#])", "*", site.key_name)


def block(site: Site) -> str:
    """The path of the layer that holds a call: up to the last number in it; all of it where there is none."""
    found = re.match(r"(.*(?:^|\.)\d+)(?=[.#])", site.key_name)
    return found.group(1) if found else ""


def layer(site: Site, alike: Site) -> str:
    """The path of the layer that holds a call: up to the last number in which a call at the same place differs from it."""
    mine, theirs = (s.key_name.split("#")[0].split(".") for s in (site, alike))
    last = max((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), default=0)
    return ".".join(mine[: last + 1])


def beside(w: Wiring, alike: Wiring, everyone: Sequence[Wiring], kind: Callable[[Wiring], bool]) -> bool:
    """Whether the layer of a call holds another one of some kind; where it ends is told by a call at its place in a peer."""
    whole = layer(w.site, alike.site)
    others = (o.site.key_name.split("#")[0] for o in everyone if kind(o) and o is not w)
    return any(f"{path}.".startswith(f"{whole}.") for path in others)


_SPEAKS_OF_SOURCE = re.compile(
    r"cross|memory|context|enc(oder)?_?dec|(encoder|enc|src|source)_?att|multihead_attn|inter_?att", re.I
)


def speaks_of_source(w: Wiring) -> bool:
    """Whether the name of a call says that it is meant for the source."""
    return _SPEAKS_OF_SOURCE.search(w.site.key_name) is not None


def in_pairs(calls: Sequence[Wiring]) -> list[tuple[Wiring, Wiring]]:
    """The calls of each layer that holds two of them."""
    blocks: dict[str, list[Wiring]] = {}
    for w in calls:
        blocks.setdefault(block(w.site), []).append(w)
    return [(b[0], b[1]) for b in blocks.values() if len(b) == 2]


def replaced(site: Site) -> bool:
    """Whether an edit has put another output in the call's place, whatever it read."""
    return site.repaired and site.tensors is not None and site.tensors.logits is None


def read_by(site: Site, name: str, batch: Batch) -> Tensor | None:
    """The hidden states behind an operand, `[batch, position, width]`."""
    projection = site.tensors.projections.get(name) if site.tensors is not None else None
    return projection.hidden(batch.samples) if projection is not None else None


def decides_alone(
    trial: Trial,
    condition: Condition,
    repairs: Mapping[str, BatchEdit],
    others: Sequence[Site],
    changed: Batch,
    rows: Callable[[Tensor], Tensor],
) -> float | None:
    """How far the chosen `rows` move for changed content where, with the `others` silenced, a repair alone makes them move.

    None where they move without it, or do not with it.
    """
    silenced: dict[str, BatchEdit] = {s.key_name: (lambda site, _: silence()(site)) for s in others}
    batch = trial.batch(condition.layout)

    def moved(edits: Mapping[str, BatchEdit]) -> float:
        repaired = trial.repaired(edits, [condition])
        return float(rows(difference(*(repaired.run(b, condition.switch) for b in (batch, changed)))).amax())

    noise = trial.threshold(trial.output(condition))
    without, fed = moved(silenced), moved({**silenced, **repairs})
    return None if without > noise or fed <= noise else fed


def feedable(site: Site, hidden: Tensor) -> bool:
    """Whether keys and values can be made of other hidden states by the call's own projections."""
    assert site.tensors is not None
    pairs = [
        (site.tensors.projections.get(n), t) for n, t in (("key", site.tensors.key), ("value", site.tensors.value))
    ]
    return all(p is not None and t is not None and p.remade(t, hidden) is not None for p, t in pairs)
