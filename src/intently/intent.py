"""What attention is meant to do: a mask for each role, a scale, and the promises it does not make."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Literal

from intently.masks import Mask
from intently.masks.expression import runs_of, spell_run

Origin = Literal["stated", "read from the configuration", "observed"]

_NUMBER = re.compile(r"(?:^|[.#])(\d+)(?=[.#]|$)")
_COMPARED = 64  # positions at which masks of several layers are held against each other


@dataclass(frozen=True)
class Intent:
    """The meaning of a model's attention.

    `mask` is for self-attention (of the decoder, where there are two streams); None when nothing is stated. `encoder`
    is for self-attention over the source of an encoder-decoder; `memory` for cross-attention. Where layers differ,
    `layers` holds the mask of each in order, and `mask` is what any of them sees. Key padding comes with the inputs and
    is not part of an intent. `scale` is the factor between q·k and the logits: None for 1/√width of the head, or a
    number; `scales` says it for single calls, by their path; `scale_is_free` when the author makes no statement about
    it. `waived` maps a promise to the reason why it is not made.

    >>> from intently import Intent, Mask
    >>> print(Intent(Mask.causal()))
    causal
    >>> print(Intent.parse("encoder-decoder"))
    encoder-decoder: causal decoder, full encoder, full memory
    >>> print(Intent(layers=(Mask.causal() & Mask.window(4), Mask.causal())))
    causal & window(4) in layer 0, causal in layer 1
    """

    mask: Mask | None = None
    encoder: Mask | None = None
    memory: Mask = field(default_factory=Mask.full)
    scale: float | None = None
    scales: Mapping[str, float] = field(default_factory=dict)
    scale_is_free: bool = False
    waived: Mapping[str, str] = field(default_factory=dict)
    origin: Origin = "stated"
    layers: tuple[Mask, ...] = ()

    def __post_init__(self) -> None:
        if self.layers:
            object.__setattr__(self, "mask", _any_of(self.layers))

    @staticmethod
    def parse(text: str) -> Intent:
        """An intent in words: a mask phrase (`causal & window(4)`, `bidirectional`) or `encoder-decoder`.

        Raises `intently.masks.MaskSyntaxError`, which names the position and the known words.
        """
        if text.strip().lower().replace("_", "-") in ("encoder-decoder", "seq2seq", "encoder decoder"):
            return Intent.encoder_decoder()
        return Intent(Mask.parse(text))

    @staticmethod
    def encoder_decoder() -> Intent:
        """A causal decoder that reads the whole memory of an encoder that sees both ways."""
        return Intent(Mask.causal(), encoder=Mask.full())

    @property
    def is_causal(self) -> bool | None:
        """Whether no query may see a later key; None when no mask is stated."""
        if self.mask is None:
            return None
        seen = self.mask.matrix(len(self.mask.document_numbers or ()) or 12)
        return not bool(seen.triu(1).any())

    def mask_at(self, path: str) -> Mask | None:
        """The mask of the self-attention call at a site's path; None when it is not stated.

        The layer of a call is the first number in its path (`layer_of`).
        """
        if not self.layers:
            return self.mask
        layer = 0 if len(self.layers) == 1 else layer_of(path)
        return self.layers[layer] if layer is not None and layer < len(self.layers) else None

    @property
    def is_windowed(self) -> bool:
        """Whether some layer is meant to see only what is near: a window, a chunk, a neighborhood."""
        masks = self.layers or ((self.mask,) if self.mask is not None else ())
        return any(m.without_bands() != m for m in masks)

    def _self_attention(self) -> str:
        by_mask: dict[str, list[int]] = {}
        for number, mask in enumerate(self.layers):
            by_mask.setdefault(str(mask), []).append(number)
        if len(by_mask) < 2:
            return str(self.layers[0] if self.layers else self.mask)
        return ", ".join(f"{mask} in {_numbered(numbers)}" for mask, numbers in by_mask.items())

    def __str__(self) -> str:
        if self.mask is None:
            return "not stated"
        if self.encoder is not None:
            return f"encoder-decoder: {self._self_attention()} decoder, {self.encoder} encoder, {self.memory} memory"
        return self._self_attention()


def layer_of(path: str) -> int | None:
    """The layer of a call, the first number in a site's path; None where there is none.

    >>> layer_of("model.layers.1.attn"), layer_of("(root)#2"), layer_of("conv1d.attn")
    (1, 2, None)
    """
    number = _NUMBER.search(path)
    return int(number[1]) if number else None


def _any_of(masks: tuple[Mask, ...]) -> Mask:
    """What any of several masks sees: the widest of them, or all joined where none is."""
    different = list(dict.fromkeys(masks))
    if len(different) == 1:
        return different[0]
    joined = reduce(or_, different)
    try:
        seen = joined.matrix(_COMPARED)
        return next((m for m in different if bool((m.matrix(_COMPARED) == seen).all())), joined)
    except ValueError:  # a table of its own size
        return joined


def _numbered(layers: list[int]) -> str:
    spelled = ", ".join(spell_run(run) for run in runs_of([n in layers for n in range(max(layers) + 1)]))
    return f"layer{'s' if len(layers) > 1 else ''} {spelled}"
