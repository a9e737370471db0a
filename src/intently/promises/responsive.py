"""Promise `responsive`: the softmax is not saturated, so that entropy and gradient are alive on typical input."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.trial import Trial
from intently.report import Cell
from intently.sites import Site

# Of a row's weights w, the sum of w(1 - w): what is left of the softmax's gradient. A row spread over n keys has 1 - 1/n.
DEAD = 1e-2
WIDE = 4.0  # standard deviation of the scaled q·k in a row, in nats: sharp by content, not by a bias
FEWEST = 3  # keys that a row must see to be judged


@dataclass(frozen=True)
class Sharpness:
    """One call's heads, each over its judged rows (medians): `[heads]`."""

    gradient: Tensor  # sum of w(1 - w)
    entropy: Tensor  # in nats
    uniform: Tensor  # the entropy of even weights over the keys seen, in nats
    spread: Tensor  # standard deviation of the scaled q·k over the keys seen
    largest: Tensor  # the largest scaled q·k, in absolute value
    sink: Tensor  # bool: all rows look at one key, where even much weight may be a way to do nothing

    @property
    def saturated(self) -> Tensor:
        """bool [heads]: one-hot by the size of q·k, and at keys that change from row to row."""
        return (self.gradient < DEAD) & (self.spread > WIDE) & ~self.sink


def sharpness(site: Site) -> Sharpness | None:
    """How sharp a call's heads are; None where it shows no logits, or no row sees enough keys."""
    tensors = site.tensors
    if (
        tensors is None
        or tensors.scores is None
        or tensors.logits is None
        or site.visible is None
        or site.scale is None
    ):
        return None
    if site.visible.shape != tensors.scores.shape or site.partial or site.deferred or not site.rows.are_tokens:
        return None
    seen = site.visible
    rows = seen.sum(-1) >= FEWEST
    if not bool(rows.any(-1).any(0).all()):
        return None
    logits = tensors.logits.double().masked_fill(~seen, float("-inf"))
    weights = torch.softmax(logits, -1).masked_fill(~seen, 0.0)
    content = torch.nan_to_num(tensors.fit.slope)[None, :, None, None] * tensors.scores.double()
    count = seen.sum(-1).clamp_min(1)
    centred = (content - (content * seen).sum(-1, keepdim=True) / count[..., None]) * seen
    best = weights.argmax(-1)

    def median(values: Tensor) -> Tensor:
        chosen = torch.where(rows, values, torch.full_like(values, float("nan")))
        return chosen.transpose(0, 1).flatten(1).nanmedian(-1).values

    return Sharpness(
        gradient=median((weights * (1 - weights)).sum(-1)),
        entropy=median(-torch.special.xlogy(weights, weights).sum(-1)),
        uniform=median(count.double().log()),
        spread=median((centred.pow(2).sum(-1) / count).sqrt()),
        largest=(content.abs() * seen).amax((0, 2, 3)),
        sink=_at_one_key(best, rows),
    )


def _at_one_key(best: Tensor, rows: Tensor) -> Tensor:
    """bool [heads]: in each sample all judged rows have their largest weight at the same key."""
    low = torch.where(rows, best, torch.full_like(best, 1 << 30)).amin(-1)
    high = torch.where(rows, best, torch.full_like(best, -1)).amax(-1)
    several = rows.sum(-1) > 1
    return ((low == high) & several).all(0)


def share(site: Site) -> float:
    """The share of a call's heads that are saturated."""
    found = sharpness(site)
    return float(found.saturated.double().mean()) if found is not None else 0.0


def try_on(trial: Trial) -> Iterable[Cell]:
    found = []
    for condition in trial.conditions:
        if cells.narrow(trial, condition) or condition.layout.padded or cells.same_as(trial, condition):
            continue
        if cells.ill(trial, condition):
            found.append(cells.untried("responsive", condition, "real outputs are not finite"))
            continue
        judged = [s for s in trial.sites(condition) if sharpness(s) is not None]
        if not judged:
            found.append(
                Cell("responsive", condition.name, "not-applicable", note="no call shows its logits over enough keys")
            )
            continue
        shares = [share(s) for s in judged]
        count = sum(s > 0.5 for s in shares)
        note = f"{count} of {len(judged)} sites" if count else ""
        found.append(cells.cell("responsive", condition, max(shares), 0.5, broken=count > 0, note=note))
    return found


PROMISE = Promise(
    name="responsive",
    statement="The softmax is not saturated on typical input: its entropy and its gradient are alive.",
    applies_to="each site with queries and keys",
    how="At each site of a traced run, per head: the sum of w(1 - w) over a row's weights, which is what the softmax lets through of a "
    "gradient, and the spread of the scaled q·k. `error` is the largest share of heads of one call in which the first is below 0.01 and "
    "the second above 4, at keys that differ from row to row.",
    sources=(
        "Zhai et al. 2023, attention entropy collapse: arXiv:2303.06296",
        "Dehghani et al. 2023: arXiv:2302.05442",
    ),
    try_on=try_on,
    error_means="share of saturated heads:",
    per_site=True,
)
