"""Promise `cache-equal`: a model fed in pieces through its cache gives what one whole forward gives."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from intently.promises import cells
from intently.promises.base import Promise
from intently.promises.causal import leaks
from intently.promises.trial import Condition, Trial, difference
from intently.report import Cell, CellVerdict
from intently.targets.running import PLAIN

_ROUNDINGS = 100  # other numbers of keys mean other roundings
_SINGLE = 2e-6
_CARRIED = 5  # a state that is carried on in float32 is rounded with every piece


def gaps(trial: Trial, condition: Condition, fed: Tensor | None = None) -> Tensor:
    """[batch, position]: how far the outputs of the pieces are from those of the whole forward; 0 at pads."""
    whole = trial.whole(condition)
    gap = difference(whole, trial.output(condition) if fed is None else fed)
    return torch.where(trial.real_rows(condition, gap.shape[1]), gap, torch.zeros_like(gap))


def noise(trial: Trial, condition: Condition) -> float:
    """The largest difference that counts as rounding."""
    whole = trial.whole(condition)
    single = _CARRIED * cells.single_steps(trial, whole)
    if condition.feed is not None and condition.feed.new:
        single = max(
            single, _SINGLE * float(whole.nan_to_num().abs().amax())
        )  # generate hands its logits out in float32
    return max(_ROUNDINGS * trial.threshold(whole), single)


def try_on(trial: Trial) -> Iterable[Cell]:
    if trial.edits:
        return [_tried(trial, condition) for condition in trial.fed]
    if not trial.fed:
        why = "the model has no cache, or the way to use it was not found"
        return [Cell("cache-equal", "cached", "not-applicable", note=why)]
    causal = trial.intent.is_causal
    if causal is False:
        return _all(trial, "not-applicable", f"the intent ({trial.intent}) lets every output depend on later inputs")
    return [_tried(trial, c) if (why := _unfit(trial, c)) is None else why for c in trial.fed]


def _all(trial: Trial, verdict: CellVerdict, why: str) -> list[Cell]:
    return [Cell("cache-equal", c.name, verdict, note=why) for c in trial.fed]


def _unfit(trial: Trial, condition: Condition) -> Cell | None:
    """Why a condition says nothing of the cache: then no pieces can give what the whole gives."""
    plain = Condition(PLAIN, condition.layout)  # what another backend gives is another promise
    if cells.ill(trial, plain):
        return cells.untried("cache-equal", condition, "real outputs are not finite")
    influence = trial.influence(plain)
    length = trial.target.main.positions(trial.lengths[trial.target.main.argument])
    if influence.base.shape[1] != length:
        return cells.untried("cache-equal", condition, "the output has no position axis")
    if _sees_later(trial, plain) > trial.threshold(influence.base):
        return cells.untried("cache-equal", condition, "the whole forward lets later inputs move earlier outputs")
    bound = max(_ROUNDINGS * trial.threshold(influence.base), cells.single_steps(trial, influence.base))
    if float(difference(trial.output(plain), trial.output(plain, seed=1)).amax()) > bound:
        return cells.untried("cache-equal", condition, "two calls on the same input differ")
    return None


def _sees_later(trial: Trial, condition: Condition) -> float:
    """How far an output of the whole forward moves for a later input."""
    if trial.intent.mask is not None:
        return float(leaks(trial, condition).amax())
    main, influence = trial.target.main.argument, trial.influence(condition)
    moved, positions = influence.moved[main][:, 0], influence.positions[main]
    earlier = torch.arange(moved.shape[1]) < positions[:, None]
    return float(torch.where(earlier, moved, torch.zeros_like(moved)).amax())


def _tried(trial: Trial, condition: Condition) -> Cell:
    new = condition.feed is not None and condition.feed.new > 0
    if new and trial.edits:
        return cells.untried("cache-equal", condition, "no call is repaired inside generate")
    try:
        gap = gaps(trial, condition)
    except Exception as error:
        said = str(error).splitlines()[0][:120] if str(error) else ""
        return cells.untried("cache-equal", condition, f"{type(error).__name__}: {said}".rstrip(": "))
    bound = noise(trial, condition)
    worst = float(gap.amax())
    note = ""
    if worst > bound:
        sample, position = (int(i) for i in (gap > bound).nonzero()[0])
        note = f"first at {'new token' if new else 'position'} {position} of sample {sample}, by {float(gap[sample, position]):.3g}"
    return cells.cell("cache-equal", condition, worst, bound, broken=worst > bound, note=note)


PROMISE = Promise(
    name="cache-equal",
    statement="A full forward equals prefill and steps, chunks, and one token at a time through the cache.",
    applies_to="decoders with a cache",
    how="The same tokens are fed whole and in pieces: a prefill and steps of one token, chunks of several, one by one; with "
    "pads on the left, with positions given, with a cache of fixed size; and what `generate` of transformers gives at each new "
    "token is held against one forward over the same tokens. Outputs at real positions must stay within "
    "rounding. How the model takes its cache is found by trying.",
    sources=("Shazeer 2019, incremental inference: arXiv:1911.02150", "huggingface/transformers#25420"),
    try_on=try_on,
)
