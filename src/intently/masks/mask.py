"""`Mask`: which query may see which key, as a value that is built, combined with & | ~, and materialised when asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from intently._typing import Bool, Int
from intently.masks import expression as terms
from intently.masks.expression import Expression, Place, Sizes, Table


@dataclass(frozen=True)
class Mask:
    """Which query may see which key; True means "may see".

    Nothing is materialised until `matrix` is called. Two masks are equal when they say the same in the same words
    (`a & b` and `b & a` are different words for one matrix). `str(mask)` is the phrase, `Mask.parse` reads it back.

    >>> mask = Mask.causal() & Mask.window(2)
    >>> print(mask)
    causal & window(2)
    >>> mask.matrix(3).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    expression: Expression

    # ------------------------------------------------------------------ build

    @staticmethod
    def full() -> Mask:
        """Every query sees every key."""
        return Mask(terms.Full())

    @staticmethod
    def none() -> Mask:
        """No query sees any key."""
        return Mask(terms.Nothing())

    @staticmethod
    def causal(offset: int = 0, *, align: str = "top-left") -> Mask:
        """Key j is seen by query i when j <= i + offset.

        `align="bottom-right"` puts the last query at the last key (offset grows by keys - queries, known at
        materialisation): the alignment of cached decoding. Top-left is the default, as in torch's `is_causal`.

        >>> Mask.causal(align="bottom-right").matrix(2, 3).int().tolist()
        [[1, 1, 0], [1, 1, 1]]
        """
        if align not in ("top-left", "bottom-right"):
            raise ValueError(f"align is 'top-left' or 'bottom-right', not {align!r}")
        mask = Mask(terms.Causal(_integer("offset", offset)))
        return mask.bottom_right() if align == "bottom-right" else mask

    @staticmethod
    def window(left: int, right: int | None = None) -> Mask:
        """A limit on distance.

        `window(w)` limits how far *back* a query sees: j > i - w, the own key is one of the w. It says nothing about
        later keys and is meant for `causal & window(w)` (transformers' `sliding_window`).
        `window(left, right)` is i - left <= j <= i + right (radii, as in ModernBERT or flash-attention's window_size).

        >>> Mask.window(1, 1).matrix(3).int().tolist()
        [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
        """
        if right is None:
            return Mask(terms.Back(_integer("the window's width", left, least=1)))
        return Mask(
            terms.Window(_integer("the left radius", left, least=0), _integer("the right radius", right, least=0))
        )

    @staticmethod
    def chunks(size: int) -> Mask:
        """Positions in runs of `size` that see only their own run (Llama 4's chunked attention, beside `causal`).

        >>> (Mask.causal() & Mask.chunks(2)).matrix(4).int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
        """
        return Mask(terms.Chunks(_integer("the chunk's size", size, least=1)))

    @staticmethod
    def prefix(length: int) -> Mask:
        """Prefix language model: j < length or j <= i (PaliGemma's prompt, GLM, UniLM)."""
        return Mask(terms.Prefix(_integer("the prefix's length", length, least=0)))

    @staticmethod
    def keys(*positions: int | range) -> Mask:
        """Every query sees exactly these keys: integers or ranges of step 1. `~Mask.keys(0)` is all but key 0.

        >>> print(Mask.causal() & (Mask.window(4) | Mask.keys(range(2))))  # window with two sink keys
        causal & (window(4) | keys(0-1))
        """
        chosen: set[int] = set()
        for position in positions:
            chosen.update(position if isinstance(position, range) else [_integer("a key position", position, least=0)])
        if not chosen or min(chosen) < 0:
            raise ValueError(f"keys() takes positions >= 0, at least one; got {positions}")
        return Mask(terms.Keys(terms.runs_of([number in chosen for number in range(max(chosen) + 1)])))

    @staticmethod
    def documents(*lengths: int, ids: Int[Tensor, "*batch position"] | Sequence[int] | None = None) -> Mask:
        """Packed documents see only themselves: lengths in order, or a document id per position.

        `ids` is [position], or [batch, position] where samples are packed differently. Ids are names: only which
        positions share one matters.

        >>> Mask.documents(1, 2).matrix(3).int().tolist()
        [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
        """
        if bool(lengths) == (ids is not None):
            raise ValueError("documents() takes either lengths in order, documents(5, 7), or ids=, and not both")
        if ids is None:
            sizes = [_integer("a document's length", length, least=1) for length in lengths]
            return Mask(terms.Documents(Table(torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)))))
        table = torch.as_tensor(ids)
        if table.dtype.is_floating_point or table.dtype == torch.bool or table.ndim not in (1, 2) or not table.numel():
            raise TypeError(f"ids is int[position] or int[batch, position], not {_named(table)}")
        return Mask(terms.Documents(Table(_by_first_appearance(table))))

    @staticmethod
    def padding(
        lengths: Sequence[int] | Int[Tensor, " batch"] | None = None,
        *,
        keep: Bool[Tensor, "batch key"] | None = None,
        side: str = "right",
    ) -> Mask:
        """Per sample, which keys are real tokens.

        `lengths` counts the kept tokens of each sample; `side` is where the pads lie. Or `keep`, bool[batch, key],
        True for a kept key.

        >>> Mask.padding([1, 2], side="left").matrix(1, 3).int().flatten(1).tolist()
        [[0, 0, 1], [0, 1, 1]]
        """
        if (lengths is None) == (keep is None):
            raise ValueError("padding() takes either lengths or keep=, and not both")
        if side not in ("right", "left"):
            raise ValueError(f"side is 'right' or 'left' (where the pads lie), not {side!r}")
        if keep is not None:
            if keep.dtype != torch.bool or keep.ndim != 2:
                raise TypeError(f"keep is bool[batch, key], not {_named(keep)}; a 0/1 mask is read by from_hf()")
            return Mask(terms.KeptWhere(Table(keep.detach().clone())))
        listed = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths or ())
        if not listed:
            raise ValueError("padding() needs the length of at least one sample")
        counts = tuple(_integer("a kept length", length, least=0) for length in listed)
        return Mask(terms.Kept(counts, side, Table(torch.tensor(counts))))

    @staticmethod
    def neighborhood(shape: int | Sequence[int], radius: int | Sequence[int]) -> Mask:
        """Positions on a 1-D to 3-D grid, flattened row-major: a query sees keys within radius along every axis.

        Clipped at the border (NATTEN instead shifts the neighbourhood inwards there, so that its size is constant).

        >>> Mask.neighborhood((2, 3), 1).matrix(6)[0].int().tolist()
        [1, 1, 0, 1, 1, 0]
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        radii = (radius,) * len(sizes) if isinstance(radius, int) else tuple(radius)
        if not 1 <= len(sizes) <= 3 or len(radii) != len(sizes):
            raise ValueError(
                f"neighborhood() takes 1 to 3 axes and one radius, or one per axis; got {sizes} and {radii}"
            )
        return Mask(
            terms.Neighborhood(
                tuple(_integer("an axis of the grid", size, least=1) for size in sizes),
                tuple(_integer("a radius", each, least=0) for each in radii),
            )
        )

    @staticmethod
    def explicit(matrix: Bool[Tensor, "*batch_heads query key"]) -> Mask:
        """A matrix given outright: bool [query, key], [batch, query, key] or [batch, heads, query, key]."""
        if matrix.dtype != torch.bool or not 2 <= matrix.ndim <= 4:
            raise TypeError(
                f"explicit() takes bool [query, key], [batch, query, key] or [batch, heads, query, key], True ="
                f" may see; not {_named(matrix)}. The from_* functions read the other conventions"
            )
        return Mask(terms.Explicit(Table(matrix.detach().clone())))

    @staticmethod
    def per_sample(*masks: Mask) -> Mask:
        """One mask per sample of the batch."""
        return Mask._each("sample", masks)

    @staticmethod
    def per_head(*masks: Mask) -> Mask:
        """One mask per head."""
        return Mask._each("head", masks)

    @staticmethod
    def _each(axis: str, masks: Sequence[Mask]) -> Mask:
        if not masks:
            raise ValueError(f"per_{axis}() needs at least one mask")
        return Mask(terms.Each(tuple(mask.expression for mask in masks), axis))

    @staticmethod
    def parse(text: str) -> Mask:
        """Read a phrase such as ``"causal & window(4)"``; MaskSyntaxError says where it fails and what is known.

        >>> Mask.parse("causal & ~documents(2, 3)") == Mask.causal() & ~Mask.documents(2, 3)
        True
        """
        from intently.masks.parse import parse

        return parse(text)

    # ---------------------------------------------------------------- combine

    def __and__(self, other: Mask) -> Mask:
        return self._join(other, terms.And, neutral=terms.Full())

    def __or__(self, other: Mask) -> Mask:
        return self._join(other, terms.Or, neutral=terms.Nothing())

    def _join(self, other: Mask, kind: type[terms.And] | type[terms.Or], neutral: Expression) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        children: list[Expression] = []
        for each in (self.expression, other.expression):
            children.extend(each.children if isinstance(each, kind) else [each])
        kept = [child for child in children if child != neutral]
        return Mask(kind(tuple(kept)) if len(kept) > 1 else (kept or [neutral])[0])

    def __invert__(self) -> Mask:
        inner = self.expression
        if isinstance(inner, terms.Not):
            return Mask(inner.children[0])
        return Mask(terms.Not((inner,)))

    def bottom_right(self) -> Mask:
        """The same mask with the last query placed at the last key (cached decoding), whatever the numbers of both.

        >>> (Mask.causal() & Mask.window(2)).bottom_right().matrix(1, 4).int().tolist()
        [[0, 0, 1, 1]]
        """
        return self if isinstance(self.expression, terms.BottomRight) else Mask(terms.BottomRight((self.expression,)))

    def without_bands(self) -> Mask:
        """The same mask without its limits on distance: windows, chunks and neighborhoods.

        >>> print((Mask.causal() & Mask.window(4)).without_bands())
        causal
        """
        return Mask(terms.without_bands(self.expression))

    def __str__(self) -> str:
        return str(self.expression)

    def __repr__(self) -> str:
        return f"<Mask {self}>"

    # ------------------------------------------------------------ materialise

    @property
    def document_numbers(self) -> tuple[int, ...] | None:
        """The document of each position, where packed documents are kept apart the same way in every sample; else None.

        >>> (Mask.causal() & Mask.documents(1, 2)).document_numbers
        (0, 1, 1)
        """
        inner = self.expression
        for each in inner.children if isinstance(inner, terms.And) else (inner,):
            if isinstance(each, terms.Documents) and each.ids.data.ndim == 1:
                return tuple(each.ids.data.tolist())
        return None

    @property
    def batch(self) -> int | None:
        """How many samples the mask distinguishes; None where it is the same for every sample."""
        return _agreed("samples", self, self.expression.samples)

    @property
    def heads(self) -> int | None:
        """How many heads the mask distinguishes; None where it is the same for every head."""
        return _agreed("heads", self, self.expression.heads)

    def matrix(
        self, queries: int, keys: int | None = None, *, offset: int = 0, device: torch.device | str | None = None
    ) -> Bool[Tensor, "*batch_heads query key"]:
        """The mask as a bool tensor, True = may see.

        Shape [query, key], unless the mask distinguishes samples or heads; then [batch, heads, query, key], with size 1
        for the one it does not distinguish. `keys` defaults to `queries` + `offset`. `offset` is the position of the
        first query among the keys (a cached step: the number of keys already there). Raises ValueError where the mask
        says nothing about a position asked for.

        >>> Mask.causal().matrix(1, 3, offset=2).int().tolist()
        [[1, 1, 1]]
        >>> Mask.padding([1, 2]).matrix(2).shape
        torch.Size([2, 1, 2, 2])
        """
        queries = _integer("queries", queries, least=0)
        offset = _integer("offset", offset)
        keys = queries + offset if keys is None else _integer("keys", keys, least=0)
        self.expression.require(offset, offset + queries, keys)
        rows, columns = range(offset, offset + queries), range(keys)
        return self._ask(rows, columns, queries, keys, offset, device).contiguous()

    def tile(
        self, rows: range, columns: range, queries: int, keys: int, device: torch.device | str | None = None
    ) -> Bool[Tensor, "*batch_heads row column"]:
        """The block `[rows, columns]` of `matrix(queries, keys)`, built without the rest.

        Shape as that of `matrix`, with `len(rows)` and `len(columns)` in place of query and key. `queries` and `keys`
        are the totals, on which a bottom-right mask and left padding depend. Raises ValueError for a range that
        leaves the matrix or skips, and where `matrix` does.

        >>> Mask.causal(align="bottom-right").tile(range(1, 3), range(2, 4), 3, 4).int().tolist()
        [[1, 0], [1, 1]]
        """
        _inside("rows", rows, queries)
        _inside("columns", columns, keys)
        self.expression.require(0, queries, keys)
        return self._ask(rows, columns, queries, keys, 0, device)

    def reach(self, rows: range, queries: int, keys: int) -> range:
        """A run of keys that holds every key the queries in `rows` may see, of `keys` in all; `range(0)` for none.

        A bound, found without building the matrix: as short as can be for causal, window, prefix, padding and packed
        documents, all keys for an explicit matrix and a complement. Raises ValueError where `matrix` does.

        >>> (Mask.causal() & Mask.window(4)).reach(range(8, 10), 16, 16)
        range(5, 10)
        """
        _inside("rows", rows, queries)
        self.expression.require(0, queries, keys)
        return self.expression.reach(rows, Sizes(queries, keys)) if rows else range(0)

    def _ask(
        self, rows: range, columns: range, queries: int, keys: int, offset: int, device: torch.device | str | None
    ) -> Tensor:
        batch, heads = self.batch, self.heads
        query = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(columns.start, columns.stop, device=device)
        if batch is None and heads is None:
            nothing = torch.zeros((), dtype=torch.long, device=device)
            shape, sample, head = (len(rows), len(columns)), nothing, nothing
        else:
            shape = (batch or 1, heads or 1, len(rows), len(columns))
            sample = torch.arange(shape[0], device=device)[:, None, None, None]
            head = torch.arange(shape[1], device=device)[:, None, None]
        return self.expression.at(Place(sample, head, query, key, queries, keys, offset)).expand(shape)

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tables on `device`; needed only for a `mask_mod` run there."""
        return Mask(self.expression.to(device))


def _integer(name: str, value: object, least: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, not {value!r} ({type(value).__name__})")
    if least is not None and value < least:
        raise ValueError(f"{name} is at least {least}, not {value}")
    return value


def _inside(name: str, run: range, size: int) -> None:
    if run.step != 1 or (run and not 0 <= run.start < run.stop <= size):
        raise ValueError(f"{name} is {run}; a range of step 1 inside range({size}) is needed")


def _agreed(what: str, mask: Mask, sizes: tuple[int, ...]) -> int | None:
    distinct = sorted(set(sizes) - {1})
    if len(distinct) > 1:
        raise ValueError(f"the parts of {mask} disagree about the number of {what}: {', '.join(map(str, distinct))}")
    return distinct[0] if distinct else (1 if sizes else None)


def _by_first_appearance(ids: Tensor) -> Tensor:
    """Rename ids 0, 1, 2, … per row in order of appearance, so that equal groupings are equal values."""
    rows = []
    for row in ids.reshape(prod(ids.shape[:-1]), ids.shape[-1]).tolist():
        names: dict[int, int] = {}
        rows.append([names.setdefault(name, len(names)) for name in row])
    return torch.tensor(rows, device=ids.device).reshape(ids.shape)


def _named(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
