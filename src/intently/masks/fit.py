"""Candidate structures for a [query, key] pattern: what a person would call it, from counts of seen and hidden pairs.

Every pair carries two counts: in how many samples it is seen and in how many hidden (where both are zero, nobody
asked, and a structure may say what it likes). A candidate's errors are the counts it contradicts; zero means exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from intently.masks import expression as terms
from intently.masks.expression import Expression
from intently.masks.mask import Mask


@dataclass(frozen=True)
class Counts:
    """Per pair, int [query, key]: in how many samples it is seen, in how many hidden; and where the queries stand."""

    seen: Tensor
    hidden: Tensor
    offset: int

    @property
    def queries(self) -> int:
        return self.seen.shape[0]

    @property
    def keys(self) -> int:
        return self.seen.shape[1]

    def within(self, region: Tensor) -> Counts:
        return Counts(self.seen * region, self.hidden * region, self.offset)

    def matrix(self, mask: Mask) -> Tensor:
        return mask.matrix(self.queries, self.keys, offset=self.offset, device=self.seen.device)

    def errors(self, matrix: Tensor) -> int:
        return int(torch.where(matrix, self.hidden, self.seen).sum())


def cost(mask: Mask) -> float:
    """How long the description is: a word costs one, and so does a number; the plainest words cost less."""
    return _cost(mask.expression)


def _cost(term: Expression) -> float:
    match term:
        case terms.Full() | terms.Nothing():
            return 0.0
        case terms.Causal(offset=offset):
            return 2.0 if offset else 1.0
        case terms.Window(left=left, right=right):
            return 1.0 if left == right == 0 else 2.0 if left == right else 3.0
        case terms.Documents():
            lengths = term.lengths
            return 1.0 + (len(lengths) if lengths else term.ids.data.numel())
        case terms.Back():
            return 1.4  # with the position told, "window(3)" says more than the list of its keys
        case terms.Keys(runs=runs) | terms.Not(children=(terms.Keys(runs=runs),)):
            return 0.5 + len(runs)
        case terms.Kept(lengths=lengths):
            return 1.0 + len(lengths)
        case terms.KeptWhere(keep=keep):
            flips = (keep.data[:, 1:] != keep.data[:, :-1]).sum()
            return 2.0 + 2 * keep.data.shape[0] + float(flips)
        case terms.Neighborhood(shape=shape, radius=radius):
            return 1.0 + len(shape) + len(set(radius))
        case terms.Explicit(table=table):
            return 1.0 + table.data.numel()
        case terms.Not(children=(inner,)) | terms.BottomRight(children=(inner,)):
            return 0.5 + _cost(inner)
        case _:
            return sum(map(_cost, term.parts)) if term.parts else 2.0


def candidates(counts: Counts) -> Iterator[Mask]:
    """Structures worth trying, each fitted to the counts."""
    yield Mask.full()
    yield Mask.none()
    if counts.queries == 1:  # one query shows which keys are seen; a structure only if its position was told
        if counts.offset > 0:
            yield Mask.causal()
            band = _band(counts)
            if not any(isinstance(part, terms.Causal) and part.offset for part in _flat(band)):
                yield band
        return
    yield from _aligned(counts)
    if counts.offset == 0 and counts.keys != counts.queries:
        shifted = Counts(counts.seen, counts.hidden, counts.keys - counts.queries)
        for mask in _aligned(shifted):
            yield mask.bottom_right()
    yield from _neighborhoods(counts)


def _flat(mask: Mask) -> tuple[Expression, ...]:
    return mask.expression.parts or (mask.expression,)


def _aligned(counts: Counts) -> Iterator[Mask]:
    yield Mask.causal()
    yield _band(counts)
    yield from _prefixes(counts)
    yield from _sinks(counts)
    if counts.offset >= 0:
        for documents in _documents(counts):
            band = _band(counts.within(counts.matrix(documents)))
            yield documents
            yield band & documents
            yield Mask.causal() & documents


def _band(counts: Counts) -> Mask:
    """The best run of diagonals, key - query position between two numbers (largest sum of seen minus hidden)."""
    seen, hidden = _by_diagonal(counts.seen), _by_diagonal(counts.hidden)
    first = -(counts.queries - 1) - counts.offset
    low, high = _heaviest_run([yes - no for yes, no in zip(seen, hidden, strict=True)])
    if low > high:
        return Mask.none()
    silent = [yes == no == 0 for yes, no in zip(seen, hidden, strict=True)]
    while silent[low]:
        low += 1
    while silent[high]:
        high -= 1
    lowest, highest = low, high
    while lowest > 0 and silent[lowest - 1]:
        lowest -= 1
    while highest + 1 < len(silent) and silent[highest + 1]:
        highest += 1
    return _name_band(
        lows=(lowest + first, low + first),
        highs=(high + first, highest + first),
        open_left=lowest == 0,
        open_right=highest == len(silent) - 1,
    )


def _name_band(lows: tuple[int, int], highs: tuple[int, int], open_left: bool, open_right: bool) -> Mask:
    """The plainest words for low <= key - query <= high, where each end may lie anywhere in a range."""
    if open_left and open_right:
        return Mask.full()
    high = _nearest_zero(*highs)
    if open_left:
        return Mask.causal(high)
    if open_right:
        if lows[0] <= 1 <= lows[1]:
            return ~Mask.causal()
        low = _nearest_zero(*lows)
        return Mask.window(1 - low) if low <= 0 else ~Mask.causal(low - 1)
    low = _nearest_zero(*lows)
    if low == high == 0:
        return Mask.window(0, 0)
    if high <= 0:
        return Mask.causal(high) & Mask.window(1 - low)
    if low > 0:
        return Mask.causal(high) & ~Mask.causal(low - 1)
    if highs[0] <= -low <= highs[1]:
        high = -low
    return Mask.window(-low, high)


def _nearest_zero(least: int, most: int) -> int:
    return min(max(0, least), most)


def _by_diagonal(counts: Tensor) -> list[int]:
    """Sums along the diagonals, from the bottom-left corner to the top-right one."""
    queries, keys = counts.shape
    width = queries + keys - 1
    # Rows padded by one diagonal more than needed and read at the narrower width slide one step right per row.
    slid = torch.nn.functional.pad(counts.flip(0), (0, queries)).flatten()[: queries * width]
    return slid.view(queries, width).sum(0).tolist()


def _heaviest_run(weights: list[int]) -> tuple[int, int]:
    """Inclusive ends of the run with the largest sum; an empty run (0, -1) when nothing is above zero."""
    best, ends, total, start = 0, (0, -1), 0, 0
    for index, weight in enumerate(weights):
        if total <= 0:
            total, start = 0, index
        total += weight
        if total > best:
            best, ends = total, (start, index)
    return ends


def _leading_run(mostly_seen: list[bool], mostly_hidden: list[bool]) -> int:
    """How many leading columns are seen, columns nobody asked about counting only when a seen one follows."""
    length = 0
    for column, (yes, no) in enumerate(zip(mostly_seen, mostly_hidden, strict=True)):
        if no:
            break
        if yes:
            length = column + 1
    return length


def _columns(counts: Counts, region: Tensor) -> tuple[list[bool], list[bool]]:
    seen, hidden = (counts.seen * region).sum(0), (counts.hidden * region).sum(0)
    return (seen > hidden).tolist(), ((hidden >= seen) & (hidden > 0)).tolist()


def _prefixes(counts: Counts) -> Iterator[Mask]:
    later = ~counts.matrix(Mask.causal())
    length = _leading_run(*_columns(counts, later))
    if length:
        yield Mask.prefix(length)


def _sinks(counts: Counts) -> Iterator[Mask]:
    """A causal window whose first keys stay visible throughout (attention sinks)."""
    earlier = counts.matrix(Mask.causal())
    length = _leading_run(*_columns(counts, earlier))
    if not 0 < length < counts.keys:
        return
    rest = earlier.clone()
    rest[:, :length] = False
    band = _band(counts.within(rest))
    for part in _flat(band):
        if isinstance(part, terms.Back):
            yield Mask.causal() & (Mask(part) | Mask.keys(range(length)))


def _documents(counts: Counts) -> Iterator[Mask]:
    """Documents cut where a query does not see the key before it; or, on squares, grouped by the first key seen."""
    size = max(counts.queries + counts.offset, counts.keys)
    seen, hidden = counts.seen, counts.hidden
    position = torch.arange(1, size, device=seen.device)
    cut = torch.zeros(size, dtype=torch.bool, device=seen.device)
    told = torch.zeros(size, dtype=torch.bool, device=seen.device)
    # The pair (later query, earlier key) speaks for causal documents too, so it is heard first.
    for query, key in ((position, position - 1), (position - 1, position)):
        row = query - counts.offset
        inside = (row >= 0) & (row < counts.queries) & (key < counts.keys)
        here, row, key = position[inside], row[inside], key[inside]
        yes, no = seen[row, key], hidden[row, key]
        fresh = ~told[here] & (yes + no > 0)
        cut[here] |= fresh & (no > yes)
        told[here] |= fresh
    ids = cut.long().cumsum(0)
    contiguous = ids.tolist()
    count = contiguous[-1] + 1 if contiguous else 0
    if 1 < count < size:
        yield Mask.documents(ids=contiguous)
    if counts.queries == counts.keys and counts.offset == 0:
        first = (seen > hidden).int().argmax(1)
        if 1 < first.unique().numel() < size and first.tolist() != sorted(first.tolist()):
            yield Mask.documents(ids=first)


def _neighborhoods(counts: Counts) -> Iterator[Mask]:
    """2-D and 3-D grids whose corner, the first query, sees just a box of keys."""
    size = counts.keys
    if counts.queries != size or counts.offset or size < 4:
        return
    row = (counts.seen[0] > counts.hidden[0]).nonzero().flatten()
    if not row.numel():
        return
    last, many = int(row[-1]), row.numel()
    for shape in _grids(size):
        strides = [int(torch.tensor(shape[axis + 1 :]).prod()) for axis in range(len(shape))]
        radius = tuple(last // stride % extent for stride, extent in zip(strides, shape, strict=True))
        box = 1
        for each in radius:
            box *= each + 1
        if box == many:
            yield Mask.neighborhood(shape, radius)


def _grids(size: int) -> Iterator[tuple[int, ...]]:
    divisors = [number for number in range(2, size // 2 + 1) if size % number == 0]
    pairs = [(first, size // first) for first in divisors]
    yield from sorted(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    for first, rest in pairs:
        yield from ((first, second, rest // second) for second in divisors if rest % second == 0 and second < rest)
