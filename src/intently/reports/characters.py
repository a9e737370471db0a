"""Printing to terminals that cannot show every character: a plain stand-in where a symbol has no encoding."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments

# One character for one where possible, so that columns stay aligned.
_PLAIN = str.maketrans(
    {
        "✓": "+",
        "✗": "X",
        "–": "-",
        "—": "-",
        "·": ".",
        "×": "x",
        "−": "-",
        "…": "~",
        "→": ">",
        "≤": "<=",
        "≥": ">=",
        "≠": "!=",
        "√": "sqrt ",
        "⌊": "floor(",
        "⌋": ")",
        "’": "'",
        "“": '"',
        "”": '"',
        "─": "-",
        "│": "|",
    }
)


def can_show(console: Console, characters: str = "✓✗–·×…") -> bool:
    """Whether the console's encoding has these characters.

    >>> import io
    >>> can_show(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="cp1252")))
    False
    """
    try:
        characters.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def show(renderable: RenderableType, console: Console) -> None:
    """Print, replacing what the console's encoding lacks; nothing a message holds can make printing fail."""
    if can_show(console) and console.encoding.startswith("utf"):
        console.print(renderable)
        return
    segments = [
        Segment(_encodable(segment.text, console.encoding), segment.style, segment.control)
        for segment in console.render(renderable)
    ]
    console.print(Segments(segments), end="", soft_wrap=True)


def _encodable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        return text.translate(_PLAIN).encode("ascii", "backslashreplace").decode("ascii")
    return text
