"""Promise `windowed`: each call sees its window, no key more and none less, and nothing from farther away moves an output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from intently.masks import Mask
from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Condition, Trial
from intently.report import Cell
from intently.sites import Site


@dataclass(frozen=True)
class Strays:
    """Where a call does not keep to its window, each bool `[batch, heads, query, key]` over real queries and keys.

    `extra`: seen beyond the window. `missing`: hidden at the window's edge and inwards from it.
    """

    extra: Tensor
    missing: Tensor

    @property
    def pairs(self) -> Tensor:
        return self.extra | self.missing


def beyond(mask: Mask, positions: int) -> Tensor:
    """bool `[1 or batch, 1 or heads, query, key]`: what a mask hides for its distance alone."""
    hidden = mask.without_bands().matrix(positions) & ~mask.matrix(positions)
    return hidden if hidden.dim() == 4 else hidden[None, None]


def _tells(far: Tensor) -> bool:
    """Whether some query has two keys beyond its window: with one, a window that is off by one and no window look alike."""
    return int(far.sum(-1).max()) > 1


def telling_length(trial: Trial, most: int) -> int | None:
    """How long a sequence must be for one window to hide something, or all layers' together where half of `most` is enough for that.

    None where `most` is not enough.
    """
    masks = trial.passes or trial.intent.layers or ((trial.intent.mask,) if trial.intent.mask is not None else ())
    try:
        together = [_out_of_reach(masks, most // 2)] if trial.passes else []
        for far in (*together, *(beyond(m, most).flatten(0, -3).any(0) for m in masks)):
            rows = (far.tril().sum(-1) > 1).nonzero()
            if len(rows):
                return int(rows[0]) + 1
    except ValueError:  # a mask that speaks of fewer positions
        pass
    return None


def strays(trial: Trial, condition: Condition, site: Site) -> Strays | None:
    """How a call departs from its window; None where it has none that hides anything, or its mask cannot be read."""
    mask = trial.intent.mask_at(site.path)
    if mask is None or not trial.in_main_stream(site) or not _readable(trial, condition, site):
        return None
    far = beyond(mask, site.queries)
    if not _tells(far):
        return None
    assert site.visible is not None
    seen = site.visible
    kept = trial.kept(condition.layout).get(trial.target.main.argument)
    if kept is not None:
        if _shifts(mask) and not bool(kept[:, 0].all()):
            return None  # chunks may be counted from the first real position, or from the first of all
        far = far & kept[:, None, :, None] & kept[:, None, None, :]
    allowed = mask.matrix(site.queries)
    hidden = ~seen & (allowed if allowed.dim() == 4 else allowed[None, None])
    if kept is not None:
        hidden = hidden & kept[:, None, :, None] & kept[:, None, None, :]
    return Strays(seen & far, _inwards(hidden, far) | _inwards(hidden.flip(-1), far.flip(-1)).flip(-1))


def _readable(trial: Trial, condition: Condition, site: Site) -> bool:
    main = trial.target.main
    positions = main.positions(trial.lengths[main.argument])
    seen = site.visible
    return (
        seen is not None
        and seen.shape[0] == condition.layout.samples
        and seen.shape[-2:] == (positions, positions)
        and site.rows.are_tokens
        and not site.partial
    )


def _shifts(mask: Mask) -> bool:
    return "chunks" in str(mask)


def _inwards(hidden: Tensor, far: Tensor) -> Tensor:
    """Runs of hidden keys that begin right of a key beyond the window."""
    run = torch.zeros(torch.broadcast_shapes(hidden.shape, far.shape), dtype=torch.bool)
    hidden, far = hidden.expand(run.shape), far.expand(run.shape)
    for key in range(1, run.shape[-1]):
        run[..., key] = hidden[..., key] & (far[..., key - 1] | run[..., key - 1])
    return run


def out_of_reach(trial: Trial) -> Tensor | None:
    """bool [output, input]: kept apart by windows alone, through all layers; None where the layers cannot be counted."""
    main = trial.target.main
    positions = main.positions(trial.lengths[main.argument])
    if trial.passes is None:
        return None
    return _out_of_reach(trial.passes, positions)


def _out_of_reach(masks: Sequence[Mask], positions: int) -> Tensor:
    without = cells.reach_through([m.without_bands() for m in masks], positions)
    return without & ~cells.reach_through(masks, positions)


def far_effects(trial: Trial, condition: Condition) -> Tensor | None:
    """bool [output, tested position]: outputs of sample 0 that move for an input that no window lets through."""
    influence = trial.influence(condition)
    never = out_of_reach(trial)
    if never is None or not never.any() or not cells.has_positions(trial, influence):
        return None
    moving = torch.zeros(never.shape[0], 0, dtype=torch.bool)
    for stream in trial.target.seen_through_mask:
        positions = influence.positions[stream.argument]
        moved = trial.threshold(influence.base) < influence.moved[stream.argument][:, 0].T
        moved = moved & never[:, positions] & cells.real_positions(trial, condition, stream.argument, positions)
        moving = torch.cat([moving, moved & trial.real_rows(condition, never.shape[0])[0][:, None]], 1)
    return moving


def bites(trial: Trial) -> bool:
    """Whether a window of the intent is shorter than the sequences tried."""
    main = trial.target.main
    positions = main.positions(trial.lengths[main.argument])
    masks = trial.intent.layers or ((trial.intent.mask,) if trial.intent.mask is not None else ())
    return any(_tells(beyond(m, positions)) for m in masks)


def try_on(trial: Trial) -> Iterable[Cell]:
    if not trial.intent.is_windowed:
        why = "no intent is stated" if trial.intent.mask is None else "the intent has no window"
        return cells.inapplicable("windowed", trial, why)
    if not bites(trial):
        return cells.inapplicable("windowed", trial, "the window is longer than the sequences tried")
    found = []
    for condition in trial.conditions:
        if cells.ill(trial, condition):
            found.append(cells.untried("windowed", condition, "real outputs are not finite"))
        elif same := cells.same_as(trial, condition):
            found.append(cells.inherited("windowed", condition, same, found))
        else:
            found.append(_tried(trial, condition))
    return found


def _tried(trial: Trial, condition: Condition) -> Cell:
    noise = trial.threshold(trial.output(condition))
    own = [s for s in trial.sites(condition) if trial.in_main_stream(s)]
    read = [s for s in own if _readable(trial, condition, s)]
    off = sum(int(s.pairs.sum()) for site in read if (s := strays(trial, condition, site)) is not None)
    if off:
        return cells.cell("windowed", condition, float(off), noise, broken=True, note=f"{off} pairs at the sites")
    far = far_effects(trial, condition)
    if far is None and len(read) < len(own):
        return cells.untried("windowed", condition, "the mask of some calls cannot be read")
    count = int(far.sum()) if far is not None else 0
    if count and len(read) == len(own):
        note = "every call keeps to its window; something besides attention carries inputs farther"
        return cells.cell("windowed", condition, 0.0, noise, broken=False, note=note)
    return cells.cell("windowed", condition, float(count), noise, broken=count > 0)


PROMISE = Promise(
    name="windowed",
    statement="A call sees exactly the keys of its window, and inputs beyond the reach of all layers' windows move no output.",
    applies_to="intents with a window, chunks or a neighborhood, in all layers or in some",
    how="Each position of one sample is overwritten in turn, on sequences longer than the windows of all layers reach together "
    "where the model takes them; and the keys that each call of a traced run sees are counted. Where every call keeps to its "
    "window, what is carried farther (by a convolution or a state-space layer) does not count. `error` counts pairs.",
    sources=("Beltagy et al. 2020, section 3.1: arXiv:2004.05150", "huggingface/transformers#33586"),
    try_on=try_on,
    error_means="pairs of query and key against the window:",
)
