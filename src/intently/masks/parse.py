"""Read a mask from its phrase: `causal & (window(4) | keys(0))`.

either  =  both { "|" both }
both    =  single { "&" single }
single  =  "~" single | "bottom-right" single | "(" either ")" | term
term    =  word [ "(" arguments ")" ]  |  "causal, offset 2"  |  "documents of 3, 5"  |  "left padding(5, 7)"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

import torch

from intently.masks.mask import Mask


class MaskSyntaxError(ValueError):
    """A phrase that is not a mask: says where, what was read, the known words and the nearest one."""


USES = {
    "causal": "causal, causal(2)",
    "full": "full",
    "bidirectional": "bidirectional",
    "none": "none",
    "window": "window(4), window(2, 2)",
    "chunks": "chunks(4)",
    "prefix": "prefix(3)",
    "keys": "keys(0), keys(0-3, 7)",
    "documents": "documents(5, 7), documents(ids=[0, 1, 0])",
    "padding": "padding(5, 7), left padding(5, 7), padding(keep=[110, 111])",
    "neighborhood": "neighborhood(4x4, 1)",
    "explicit": "explicit([10, 11])",
    "per_sample": "per_sample(causal, full)",
    "per_head": "per_head(causal, full)",
}
MODIFIERS = ("bottom-right", "top-left", "left", "right")
_TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-z_]+(?:-[A-Za-z_]+)*)|(?P<number>-?\d+(?:[x-]\d+)*)|(?P<mark>[&|~(),\[\]=]))"
)


@dataclass(frozen=True)
class _Token:
    kind: str  # word | number | mark | end
    text: str
    at: int


def parse(text: str) -> Mask:
    """Read a phrase; see `Mask.parse`."""
    return _Reader(text).whole()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._split(text))
        self.next = 0

    def _split(self, text: str) -> list[_Token]:
        tokens, position, end = [], 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                start = position + len(text[position:]) - len(text[position:].lstrip())
                self._fail(start, f"{text[start]!r} does not belong to the mask language")
            kind = match.lastgroup or "mark"
            tokens.append(_Token(kind, match[kind], match.start(kind)))
            position = match.end()
        return [*tokens, _Token("end", "the end", end)]

    def _fail(self, position: int, fact: str) -> NoReturn:
        raise MaskSyntaxError(
            f"cannot read the mask {self.text!r}: at position {position}, {fact}."
            f" Known: {'; '.join(USES.values())}; bottom-right causal; joined by & | ~ and parentheses"
        )

    @property
    def here(self) -> _Token:
        return self.tokens[self.next]

    def _ahead(self, *texts: str) -> bool:
        return [token.text.lower() for token in self.tokens[self.next : self.next + len(texts)]] == list(texts)

    def _take(self, text: str | None = None) -> _Token:
        token = self.here
        if text is not None and token.text != text:
            self._fail(token.at, f"expected {text!r} but read {token.text!r}")
        self.next += 1
        return token

    def whole(self) -> Mask:
        mask = self.either()
        if self.here.kind != "end":
            self._fail(self.here.at, f"expected &, | or the end but read {self.here.text!r}")
        return mask

    def either(self) -> Mask:
        mask = self.both()
        while self._ahead("|"):
            self._take()
            mask = mask | self.both()
        return mask

    def both(self) -> Mask:
        mask = self.single()
        while self._ahead("&"):
            self._take()
            mask = mask & self.single()
        return mask

    def single(self) -> Mask:
        if self._ahead("~"):
            self._take()
            return ~self.single()
        if self._ahead("("):
            self._take()
            mask = self.either()
            self._take(")")
            return mask
        if self._ahead("bottom-right"):
            self._take()
            return self.single().bottom_right()
        if self._ahead("top-left"):
            self._take()
            return self.single()
        return self.term()

    def term(self) -> Mask:
        token = self._take()
        side = token.text.lower() if token.text.lower() in ("left", "right") else None
        if side:
            token = self._take()
        word = token.text.lower()
        if token.kind != "word":
            self._fail(token.at, f"expected a word but read {token.text!r}")
        if word not in USES:
            nearest = get_close_matches(word, [*USES, *MODIFIERS], n=1, cutoff=0.5)
            hint = f"; the nearest word is {nearest[0]!r}" if nearest else ""
            self._fail(token.at, f"{token.text!r} is not a word of the mask language{hint}")
        if side and word != "padding":
            self._fail(token.at, f"{side!r} goes with padding, not with {word!r}")
        given, named = self.arguments(word)
        if side:
            named["side"] = side
        try:
            return _BUILD[word](*given, **named)
        except (TypeError, ValueError) as error:
            reason = str(error)
            if "argument" in reason or "unpack" in reason:  # Python's own words about a call, not ours
                reason = f"{word} is written {USES[word]}"
            raise self._bad(token, reason) from None

    def _bad(self, token: _Token, reason: str) -> MaskSyntaxError:
        return MaskSyntaxError(f"cannot read the mask {self.text!r}: at position {token.at}, {reason}")

    def arguments(self, word: str) -> tuple[list[Any], dict[str, Any]]:
        given: list[Any] = []
        named: dict[str, Any] = {}
        if self._ahead(",", "offset") and word == "causal":
            self.next += 2
            return [self.number()], named
        if self._ahead("of"):
            self._take()
            given.append(self.number())
            while self._ahead(",") and self.tokens[self.next + 1].kind == "number":
                self._take()
                given.append(self.number())
            return given, named
        if not self._ahead("("):
            return given, named
        self._take()
        while not self._ahead(")"):
            if self.here.kind == "word" and self.tokens[self.next + 1].text == "=":
                name = self._take().text
                self._take("=")
                named[name] = self.value(word)
            else:
                given.append(self.value(word))
            if not self._ahead(")"):
                self._take(",")
        self._take(")")
        return given, named

    def number(self) -> int:
        token = self._take()
        if not re.fullmatch(r"-?\d+", token.text):
            self._fail(token.at, f"expected a number but read {token.text!r}")
        return int(token.text)

    def value(self, word: str) -> Any:
        """A mask, a nested list, or the text of a number, which each word reads its own way: `4`, `4x4`, `0-3`, `1`."""
        if word in ("per_sample", "per_head"):
            return self.either()
        if self._ahead("["):
            self._take()
            entries = []
            while not self._ahead("]"):
                entries.append(self.value(word))
                if not self._ahead("]"):
                    self._take(",")
            self._take("]")
            return entries
        token = self._take()
        if token.kind == "word" and token.text in ("bool", "int"):
            self._fail(token.at, "a table named by its shape alone cannot be read back; build it from its tensor")
        if token.kind not in ("number", "word"):
            self._fail(token.at, f"expected a value but read {token.text!r}")
        return token.text


def _whole(text: Any) -> int:
    if isinstance(text, int):
        return text
    if not isinstance(text, str) or not re.fullmatch(r"-?\d+", text):
        raise ValueError(f"expected a whole number but read {text!r}")
    return int(text)


def _grid(text: Any) -> list[int]:
    return [_whole(part) for part in str(text).split("x")]


def _range(text: Any) -> range:
    first, _, last = str(text).partition("-")
    return range(_whole(first), _whole(last or first) + 1)


def _bits(nested: Any) -> Any:
    if isinstance(nested, list):
        return [_bits(entry) for entry in nested]
    if not isinstance(nested, str) or set(nested) - {"0", "1"}:
        raise ValueError(f"expected rows of 0 and 1 but read {nested!r}")
    return [bit == "1" for bit in nested]


def _table(nested: Any) -> torch.Tensor:
    rows = _bits(nested)
    try:
        return torch.tensor(rows, dtype=torch.bool)
    except (TypeError, ValueError):
        raise ValueError("the rows of a table have different lengths") from None


def _ids(nested: Any) -> torch.Tensor:
    def read(entry: Any) -> Any:
        return [read(each) for each in entry] if isinstance(entry, list) else _whole(entry)

    try:
        return torch.tensor(read(nested))
    except TypeError:
        raise ValueError("the rows of ids have different lengths") from None


def _causal(offset: Any = 0) -> Mask:
    return Mask.causal(_whole(offset))


def _documents(*lengths: Any, ids: Any = None) -> Mask:
    return Mask.documents(*map(_whole, lengths), ids=None if ids is None else _ids(ids))


def _padding(*lengths: Any, keep: Any = None, side: str = "right") -> Mask:
    if keep is not None:
        return Mask.padding(keep=_table(keep))
    return Mask.padding([_whole(length) for length in lengths], side=side)


_BUILD: dict[str, Callable[..., Mask]] = {
    "causal": _causal,
    "full": lambda: Mask.full(),
    "bidirectional": lambda: Mask.full(),
    "none": lambda: Mask.none(),
    "window": lambda left, right=None: Mask.window(_whole(left), None if right is None else _whole(right)),
    "chunks": lambda size: Mask.chunks(_whole(size)),
    "prefix": lambda length: Mask.prefix(_whole(length)),
    "keys": lambda *positions: Mask.keys(*map(_range, positions)),
    "documents": _documents,
    "padding": _padding,
    "neighborhood": lambda shape, radius: Mask.neighborhood(
        _grid(shape), radii if len(radii := _grid(radius)) > 1 else radii[0]
    ),
    "explicit": lambda table: Mask.explicit(_table(table)),
    "per_sample": lambda *masks: Mask.per_sample(*masks),
    "per_head": lambda *masks: Mask.per_head(*masks),
}
