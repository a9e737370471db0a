"""Recognise: put a bool matrix into the words of the mask language, exactly or with its exceptions listed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from intently._typing import Bool
from intently.masks import expression as terms
from intently.masks.expression import Expression, runs_of, spell_run
from intently.masks.fit import Counts, candidates, cost
from intently.masks.mask import Mask, _named

MOST_LISTED = 1000
"""At most this many exceptions are kept as cells; `Recognised.count` is always the full number."""

_PRICE_OF_AN_EXCEPTION = 2.0
_PRICE_OF_A_ROW = 3.0
_MOST_SAMPLES_APART = 64
_FEW = 3
_MOST_REMEMBERED = 1 << 16  # entries
_A_SLIP = 64  # one pair in so many is told as an exception, without looking for an exact but longer phrase


class Cell(NamedTuple):
    """One pair that differs from the phrase; `seen` is what the matrix says. `head` is the first of its group."""

    sample: int
    head: int
    query: int
    key: int
    seen: bool


@dataclass(frozen=True)
class Recognised:
    """A matrix in words.

    `mask` is the phrase as a Mask (the nearest one if not `exact`; None when nothing fits), `phrase` the words,
    `exceptions` the pairs that differ from `mask` (heads that share a mask are listed once, under the first of
    them; at most `MOST_LISTED`), `count` how many there are.
    """

    mask: Mask | None
    phrase: str
    exceptions: tuple[Cell, ...] = ()
    count: int = 0

    @property
    def exact(self) -> bool:
        """The mask reproduces the matrix wherever rows were described."""
        return self.mask is not None and self.count == 0

    def __str__(self) -> str:
        return self.phrase


def recognise(
    matrix: Bool[Tensor, "*batch_heads query key"],
    *,
    rows: Bool[Tensor, "batch query"] | None = None,
    offset: int = 0,
) -> Recognised:
    """Describe bool [query, key], [batch, query, key] or [batch, heads, query, key], True = may see.

    The simplest phrase that is exact wins; where none is, the nearest one with its exceptions. `rows`, bool[batch,
    query], leaves pad queries out of the description; `offset` is the position of the first query among the keys (a
    cached step). A batch is read as one structure and a key mask per sample where it factorises so. The mask of a
    rank-2 matrix has rank 2; that of a batch may too (it then broadcasts). Raises TypeError for another dtype,
    ValueError for another shape.

    >>> recognise((Mask.causal() & Mask.window(4)).matrix(8)).phrase
    'causal & window(4)'
    >>> odd = Mask.causal().matrix(5)
    >>> odd[1, 3] = True
    >>> recognise(odd).phrase
    'causal except query 1 sees key 3'
    """
    if matrix.dtype != torch.bool:
        raise TypeError(f"recognise() reads bool, True = may see, not {_named(matrix)}; the from_* functions convert")
    if not 2 <= matrix.ndim <= 4:
        raise ValueError(f"recognise() reads 2 to 4 axes, [batch, heads, query, key] at most, not {_named(matrix)}")
    whole = matrix[None, None] if matrix.ndim == 2 else matrix[:, None] if matrix.ndim == 3 else matrix
    if rows is not None and (rows.dtype != torch.bool or rows.shape != (whole.shape[0], whole.shape[2])):
        raise ValueError(f"rows is bool[batch, query] = bool{[whole.shape[0], whole.shape[2]]}, not {_named(rows)}")
    if not whole.numel():
        return Recognised(Mask.full(), "full")
    described = rows if rows is not None else torch.ones(whole.shape[0], whole.shape[2], dtype=torch.bool)
    if whole.numel() <= _MOST_REMEMBERED and whole.device.type == "cpu":
        return _remembered(_Entries(whole), _Entries(described), offset)
    return _described(whole, described.to(whole.device), offset)


def _described(whole: Tensor, rows: Tensor, offset: int) -> Recognised:
    groups = _equal_heads(whole, rows)
    return _together("head", [(group, _describe(whole[:, group[0]], rows, offset, group[0])) for group in groups])


class _Entries:
    """A bool tensor that is equal to another by its entries, and keeps its strides."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.key = (tuple(tensor.shape), tensor.contiguous().numpy().tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Entries) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(maxsize=256)
def _remembered(whole: _Entries, rows: _Entries, offset: int) -> Recognised:
    """One check meets the same few masks in hundreds of runs, and putting one into words is long."""
    return _described(whole.tensor.clone(), rows.tensor.clone(), offset)


def _equal_heads(whole: Tensor, rows: Tensor) -> list[list[int]]:
    """Heads grouped by equal masks, in order of their first member."""
    if whole.stride(1) == 0:
        return [list(range(whole.shape[1]))]
    return _grouped(whole.shape[1], lambda one, two: _same(whole[:, one], whole[:, two], rows))


def _grouped(size: int, same: Callable[[int, int], bool]) -> list[list[int]]:
    groups: list[list[int]] = []
    for index in range(size):
        home = next((group for group in groups if same(group[0], index)), None)
        if home is None:
            groups.append([index])
        else:
            home.append(index)
    return groups


def _same(one: Tensor, two: Tensor, rows: Tensor) -> bool:
    return torch.equal(one, two) or not bool(((one ^ two) & rows[..., None]).any())


def _together(axis: str, fits: Sequence[tuple[list[int], Recognised]]) -> Recognised:
    """One description of several heads (or samples) from a description per group of equal ones."""
    if len(fits) == 1:
        return fits[0][1]
    phrase = "; ".join(f"{_listing(axis, members)}: {fit.phrase}" for members, fit in fits)
    cells = tuple(cell for _, fit in fits for cell in fit.exceptions)[:MOST_LISTED]
    if any(fit.mask is None for _, fit in fits):
        return Recognised(None, phrase, cells, sum(fit.count for _, fit in fits))
    placed = {member: fit.mask for members, fit in fits for member in members if fit.mask is not None}
    build = Mask.per_head if axis == "head" else Mask.per_sample
    mask = build(*(placed[member] for member in range(len(placed))))
    return Recognised(mask, phrase, cells, sum(fit.count for _, fit in fits))


@dataclass(frozen=True)
class _Fit:
    """A structure, the keys each sample keeps (None: all of them), and how many pairs contradict the two."""

    structure: Mask
    keep: Tensor | None
    errors: int

    @property
    def price(self) -> float:
        padding = 0.0 if self.keep is None else cost(_key_mask(self.keep))
        return cost(self.structure) + padding + _PRICE_OF_AN_EXCEPTION * self.errors


def _describe(seen: Tensor, rows: Tensor, offset: int, head: int) -> Recognised:
    """Describe one head, seen [batch, query, key]."""
    joint = _fit(seen, rows, offset)
    if joint.errors <= _FEW and joint.errors * _A_SLIP <= int(rows.sum()) * seen.shape[2]:
        return _worded(joint, seen, rows, offset, head)
    blank = _with_blank_rows(joint, seen, rows, offset, head)
    if blank is not None:
        return blank
    groups = _grouped(
        seen.shape[0],
        lambda one, two: torch.equal(rows[one], rows[two]) and _same(seen[one], seen[two], rows[one]),
    )
    if not 1 < len(groups) <= _MOST_SAMPLES_APART:
        return _worded(joint, seen, rows, offset, head)
    singles = [_fit(seen[g[0] : g[0] + 1], rows[g[0] : g[0] + 1], offset) for g in groups]
    prices = [
        single.price * (len(group) if single.errors else 1) for group, single in zip(groups, singles, strict=True)
    ]
    leaning = -2 if all(single.errors == 0 for single in singles) else 1  # exact words are worth some more words
    if joint.price <= sum(prices) + leaning:
        return _worded(joint, seen, rows, offset, head)
    fits = []
    for group, single in zip(groups, singles, strict=True):
        first = group[0]
        fits.append((group, _worded(single, seen[first : first + 1], rows[first : first + 1], offset, head, group)))
    return _together("sample", fits)


def _with_blank_rows(joint: _Fit, seen: Tensor, rows: Tensor, offset: int, head: int) -> Recognised | None:
    """A pattern that is exact but for whole rows that see every key or none, as pad queries are often written."""
    every, none = seen.all(2), ~seen.any(2)
    mixed = rows & ~every & ~none
    fit = _best(seen, mixed, (seen & mixed[..., None]).any(1), offset)
    if fit.errors or fit.keep is None:
        return None
    # A key that the structure shows to no mixed row: ask the other rows about it.
    structure = fit.structure.matrix(*seen.shape[1:], offset=offset, device=seen.device)
    told = torch.stack([(structure & row[:, None]).any(0) for row in mixed])
    keep = torch.where(told, fit.keep, (seen & rows[..., None]).any(1))
    fit = replace(fit, keep=None if bool(keep.all()) else keep)
    said = _said(fit, seen, offset)
    odd = ((said ^ seen).any(2)) & rows
    if bool((odd == rows).all(1).any()):  # a sample that is odd throughout has another pattern, not blank rows
        return None
    if fit.price + _PRICE_OF_A_ROW * int(odd.sum()) >= joint.price:
        return None
    parts = []
    for sample, at in enumerate(odd.tolist()):
        for kind, told in ((every, "every key"), (none, "no key")):
            runs = runs_of([there and blank for there, blank in zip(at, kind[sample].tolist(), strict=True)])
            where = f"sample {sample} " if len(seen) > 1 else ""
            for run in runs:
                single = run[1] - run[0] == 1
                verb = "query {} sees" if single else "queries {} see"
                parts.append(f"{where}{verb.format(spell_run(run))} {told}")
    mask = _mask_of(fit)
    count = int(((said ^ seen) & rows[..., None]).sum())
    shown = parts[:_FEW] + ([f"{len(parts) - _FEW} more runs of queries"] if len(parts) > _FEW else [])
    return Recognised(mask, f"{words(mask)} except {', '.join(shown)}", _exceptions(said, seen, rows, head, ()), count)


def _said(fit: _Fit, seen: Tensor, offset: int) -> Tensor:
    """What the fit says, [batch, query, key]."""
    structure = fit.structure.matrix(*seen.shape[1:], offset=offset, device=seen.device)
    return structure.expand_as(seen) if fit.keep is None else structure & fit.keep[:, None]


def _mask_of(fit: _Fit) -> Mask:
    return fit.structure if fit.keep is None else fit.structure & _key_mask(fit.keep)


def _fit(seen: Tensor, rows: Tensor, offset: int) -> _Fit:
    """The cheapest structure & key mask: every key kept, the keys somebody sees kept, then a majority vote."""
    best = _best(seen, rows, None, offset)
    used = torch.stack([(sample & row[:, None]).any(0) for sample, row in zip(seen, rows, strict=True)])
    if not bool(used.all()) and cost(best.structure) + _PRICE_OF_AN_EXCEPTION * best.errors > 0:
        best = min(best, _best(seen, rows, used, offset), key=lambda fit: (fit.errors > 0, fit.price))
    if best.errors:
        structure = best.structure.matrix(*seen.shape[1:], offset=offset, device=seen.device)
        voted = _vote(seen, rows, structure)
        if not bool(voted.all()):
            best = min(best, _best(seen, rows, voted, offset), key=lambda fit: fit.price)
    return best


def _vote(seen: Tensor, rows: Tensor, structure: Tensor) -> Tensor:
    """A key is kept where most queries that the structure lets see it do."""
    votes = []
    for sample, row in zip(seen, rows, strict=True):
        allowed = structure & row[:, None]
        votes.append(2 * (sample & allowed).sum(0) >= allowed.sum(0))
    return torch.stack(votes)


def _best(seen: Tensor, rows: Tensor, keep: Tensor | None, offset: int) -> _Fit:
    yes = torch.zeros(seen.shape[1:], dtype=torch.int32, device=seen.device)
    no = torch.zeros_like(yes)
    stray = 0  # pairs seen though the key mask hides them: errors whatever the structure
    for number, sample in enumerate(seen):
        asked = rows[number][:, None].expand_as(sample)
        if keep is not None:
            asked = asked & keep[number]
            stray += int((sample & rows[number][:, None] & ~keep[number]).sum())
        yes += sample & asked
        no += ~sample & asked
    counts = Counts(yes, no, offset)
    tried: set[Mask] = set()
    best: _Fit | None = None
    for mask in sorted(_unique(candidates(counts), tried), key=cost):
        if best is not None and best.errors == stray and cost(best.structure) <= cost(mask):
            break
        fit = _Fit(mask, keep, stray + counts.errors(counts.matrix(mask)))
        if best is None or (fit.errors > stray, fit.price) < (best.errors > stray, best.price):
            best = fit
    assert best is not None  # full is always a candidate
    return best


def _unique(masks: Iterable[Mask], tried: set[Mask]) -> Iterable[Mask]:
    for mask in masks:
        if mask not in tried:
            tried.add(mask)
            yield mask


def _key_mask(keep: Tensor) -> Mask:
    """The plainest mask that keeps these keys, bool [batch, key]."""
    if bool((keep == keep[:1]).all()):
        runs, others = runs_of(keep[0].tolist()), runs_of((~keep[0]).tolist())
        if not runs:
            return Mask.none()
        if not others:
            return Mask.full()
        if (len(others), int((~keep[0]).sum())) <= (len(runs), int(keep[0].sum())):
            return ~Mask(terms.Keys(others))
        return Mask(terms.Keys(runs))
    lengths = keep.sum(1)
    position = torch.arange(keep.shape[1], device=keep.device)
    if torch.equal(keep, position < lengths[:, None]):
        return Mask.padding(lengths)
    if torch.equal(keep, position >= keep.shape[1] - lengths[:, None]):
        return Mask.padding(lengths, side="left")
    return Mask.padding(keep=keep)


def _worded(fit: _Fit, seen: Tensor, rows: Tensor, offset: int, head: int, samples: Sequence[int] = ()) -> Recognised:
    mask = _mask_of(fit)
    if not fit.errors:
        return Recognised(mask, words(mask))
    asked = int(rows.sum()) * seen.shape[2]
    if fit.errors > max(_FEW, asked // 8):
        share = int((seen & rows[..., None]).sum()) / max(asked, 1)
        return Recognised(None, f"no simple pattern ({share:.0%} of pairs seen)")
    cells = _exceptions(_said(fit, seen, offset), seen, rows, head, samples)
    once = [cell for cell in cells if not samples or cell.sample == samples[0]]
    told = [_tell(cell, with_sample=seen.shape[0] > 1) for cell in once[:_FEW]]
    more = fit.errors - len(told)
    phrase = f"{words(mask)} except {', '.join(told)}" + (f" and {more} more" if more else "")
    return Recognised(mask, phrase, cells, fit.errors * max(len(samples), 1))


def _exceptions(said: Tensor, seen: Tensor, rows: Tensor, head: int, samples: Sequence[int]) -> tuple[Cell, ...]:
    cells: list[Cell] = []
    for number, sample in enumerate(seen):
        differ = (sample ^ said[number]) & rows[number][:, None]
        for query, key in differ.nonzero()[: max(MOST_LISTED - len(cells), 0)].tolist():
            for place in samples or (number,):  # equal samples each have the exception
                cells.append(Cell(place, head, query, key, bool(sample[query, key])))
    return tuple(cells[:MOST_LISTED])


def _tell(cell: Cell, with_sample: bool) -> str:
    where = f"sample {cell.sample} query {cell.query}" if with_sample else f"query {cell.query}"
    return f"{where} {'sees' if cell.seen else 'does not see'} key {cell.key}"


def words(mask: Mask) -> str:
    """The mask as a person would say it."""
    return _words(mask.expression)


def _words(term: Expression) -> str:
    match term:
        case terms.Full():
            return "full"
        case terms.Nothing():
            return "none: no query sees any key"
        case terms.Causal(offset=offset) if offset:
            return f"causal, offset {offset}"
        case terms.Not(children=(terms.Causal(offset=0),)):
            return "anti-causal (only later keys)"
        case terms.Window(left=0, right=0):
            return "own key only"
        case terms.Keys(runs=runs):
            return f"only {_some_keys(runs)}"
        case terms.Not(children=(terms.Keys(runs=runs),)):
            return f"all but {_some_keys(runs)}"
        case terms.Documents() if (lengths := term.lengths) is not None:
            return "documents of " + ", ".join(map(str, lengths))
        case terms.Kept(lengths=lengths, side=side):
            return f"padding: keys kept {', '.join(map(str, lengths))} ({side})"
        case terms.KeptWhere(keep=keep):
            return "padding: " + "; ".join(
                f"{_listing('sample', members)} {_kept_words(keep.data[members[:1]])}"
                for members in _grouped(len(keep.data), lambda one, two: torch.equal(keep.data[one], keep.data[two]))
            )
        case terms.And(children=children):
            return " & ".join(
                f"({_words(child)})" if isinstance(child, terms.Or) else _words(child) for child in children
            )
        case terms.Or(children=children):
            return " | ".join(_some_keys(c.runs) if isinstance(c, terms.Keys) else _words(c) for c in children)
        case terms.BottomRight(children=(inner,)):
            return (
                f"bottom-right ({_words(inner)})"
                if isinstance(inner, terms.And | terms.Or)
                else f"bottom-right {inner}"
            )
        case _:
            return str(term)


def _kept_words(keep: Tensor) -> str:
    return "all keys" if bool(keep.all()) else "no key" if not bool(keep.any()) else words(_key_mask(keep))


def _some_keys(runs: Sequence[tuple[int, int]]) -> str:
    plural = len(runs) > 1 or runs[0][1] - runs[0][0] > 1
    return ("keys " if plural else "key ") + ", ".join(spell_run(run) for run in runs)


def _listing(axis: str, members: Sequence[int]) -> str:
    runs = runs_of([number in set(members) for number in range(max(members) + 1)])
    return f"{axis}{'s' if len(members) > 1 else ''} " + ", ".join(spell_run(run) for run in runs)
