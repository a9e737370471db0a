"""Promise `order-aware`: the order of tokens enters, and where queries and keys are turned, by their distance alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Trial, difference
from intently.report import Cell
from intently.sites import Site
from intently.sites.rotation import Rotation, meeting
from intently.targets.positions import offset_argument, position_argument
from intently.targets.stream import Batch

NEAR = 1e-3  # how far two turned rows may be apart, relatively, and still count as the same
LONGEST = 24  # positions: rotations of longer sequences are not measured
GAP = 3  # positions left out in the middle, or before the first


def rotations(site: Site) -> tuple[Rotation, Rotation] | None:
    """How queries and keys of a call over one sequence are turned; None where tables turn neither, or cannot be told."""
    if site.role != "self" or site.queries != site.keys or not 1 < site.queries <= LONGEST:
        return None
    if not site.rows.are_tokens or site.partial:
        return None
    query, key = site.rotation("query"), site.rotation("key")
    if query is None or key is None or query.maps.shape != key.maps.shape:
        return None
    return (query, key) if query.turns or key.turns else None


def wrong_axis(site: Site) -> int | None:
    """0 or 1 where the angles go by sample or by head, step by step, and not by position."""
    pair = rotations(site)
    if pair is None or any(r.varies(2) for r in pair):
        return None
    return next((axis for axis in (1, 0) if any(r.varies(axis) and r.step(axis) is not None for r in pair)), None)


def wrong_pairs(site: Site) -> float:
    """How differently a query and a key at the same position meet from position to position; 0 where only distance counts."""
    pair = rotations(site)
    apart = meeting(*pair) if pair is not None and any(r.varies(2) for r in pair) else 0.0
    return apart if apart > NEAR else 0.0


def blind(trial: Trial, condition: Condition) -> bool | None:
    """Whether reversing the tokens reverses the outputs and nothing else; None where order is not meant to matter, or may not."""
    mask, main = trial.intent.mask, trial.target.main
    if (
        mask is None
        or mask.document_numbers is not None
        or len(trial.target.streams) != 1
        or main.kind != "tokens"
        or trial.intent.layers
    ):
        return None
    count = main.positions(trial.lengths[main.argument])
    output = trial.output(condition)
    if count < 2 or not bool(mask.matrix(count).all()) or output.shape[1] != count:
        return None
    batch = trial.batch(condition.layout)
    turned = batch.arguments[main.argument].flip(0 if main.sequence_first else 1)
    other = trial.run(
        Batch({**batch.arguments, main.argument: turned}, batch.lengths, batch.samples, batch.kept), condition.switch
    )
    return bool((difference(other.flip(1), output) <= 20 * trial.threshold(output)).all())


def elsewhere(trial: Trial, condition: Condition) -> Iterator[tuple[Batch, str]]:
    """The condition's batch with other positions given: with a gap in the middle, or all of them later."""
    batch, main = trial.batch(condition.layout), trial.target.main
    count = main.positions(trial.lengths[main.argument])
    argument, offset = position_argument(trial.target, main.argument), offset_argument(trial.target)
    if argument is not None:
        positions = torch.arange(count)
        positions = torch.where(positions < count // 2, positions, positions + GAP).expand(batch.samples, -1)
        yield replace(batch, arguments={**batch.arguments, argument: positions}), argument
    elif offset is not None:
        yield replace(batch, arguments={**batch.arguments, offset: GAP}), offset


def stale(trial: Trial, condition: Condition) -> tuple[str, tuple[Site, ...]]:
    """The argument for positions, and the calls that turn by the same angles whatever it says."""
    main, alone = trial.target.main.argument, len(trial.target.streams) == 1
    own = [s for s in trial.sites(condition) if alone or main in s.origins.get("query", frozenset())]
    before = {s.key_name: s for s in own if _goes_by_position(s)}
    if not before:
        return "", ()
    for batch, argument in elsewhere(trial, condition):
        try:
            _, sites = trial.traced(batch, condition.switch)
        except Exception:  # positions beyond a table, or an argument that means something else
            continue
        unmoved = [s for s in sites if s.key_name in before and _alike(s, before[s.key_name])]
        return argument, tuple(unmoved)
    return "", ()


def _goes_by_position(site: Site) -> bool:
    pair = rotations(site)
    return pair is not None and any(r.varies(2) for r in pair)


def _alike(now: Site, before: Site) -> bool:
    mine, theirs = rotations(now), rotations(before)
    return (
        mine is not None
        and theirs is not None
        and all(
            m.maps.shape == t.maps.shape and bool(((m.maps - t.maps).abs() < NEAR).all())
            for m, t in zip(mine, theirs, strict=True)
        )
    )


def judged(trial: Trial) -> list[Condition]:
    """The conditions under which order is judged: several samples, no pads, outputs of their own."""
    return [
        c
        for c in trial.conditions
        if c.feed is None
        and c.layout.samples > 1
        and not c.layout.padded
        and not cells.same_as(trial, c)
        and not cells.ill(trial, c)
    ]


def try_on(trial: Trial) -> Iterable[Cell]:
    main = trial.target.main
    if main.positions(trial.lengths[main.argument]) > LONGEST:
        return [] if trial.edits else cells.inapplicable("order-aware", trial, "judged on shorter sequences")
    found = []
    for condition in judged(trial):
        unordered = blind(trial, condition)
        turned = [s for s in trial.sites(condition) if rotations(s) is not None]
        if unordered is None and not turned:
            said = "positions, if any, enter by no table that turns queries and keys, and the mask gives an order"
            found.append(Cell("order-aware", condition.name, "not-applicable", note=said))
            continue
        _, unmoved = stale(trial, condition)
        worst = max((wrong_pairs(s) for s in turned), default=0.0)
        axes = [s for s in turned if wrong_axis(s) is not None]
        notes = [f"{len(axes)} of {len(turned)} calls turn along another axis"] if axes else []
        notes += ["the same distance gives other scores"] if worst else []
        notes += [f"{len(unmoved)} of {len(turned)} calls turn by the same angles whatever positions are given"] * bool(
            unmoved
        )
        notes += ["reversed tokens give the reversed outputs"] if unordered else []
        error = 1.0 if axes or unmoved or unordered else worst
        found.append(cells.cell("order-aware", condition, error, NEAR, broken=bool(notes), note="; ".join(notes)))
    return found


PROMISE = Promise(
    name="order-aware",
    statement="The order of the tokens enters; where queries and keys are turned, only their distance counts.",
    applies_to="models of tokens that see both ways, and every call whose queries and keys are turned by tables of angles",
    how="Tokens are run in reverse: outputs must not merely be reversed. At each call the maps that tables make of queries and "
    "keys are measured: they must go by position, a query and a key at one position must meet alike everywhere, and other "
    "positions, where the model takes them, must give other angles. `error` is relative.",
    sources=("Su et al. 2021, RoFormer, section 3.2: arXiv:2104.09864",),
    try_on=try_on,
    error_means="turned rows differ, relatively, by",
)
