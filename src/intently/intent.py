"""What attention is meant to do: a mask for each role, a scale, and the promises it does not make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from intently.masks import Mask

Origin = Literal["stated", "read from the configuration", "observed"]


@dataclass(frozen=True)
class Intent:
    """The meaning of a model's attention.

    `mask` is for self-attention (of the decoder, where there are two streams); None when nothing is stated. `encoder`
    is for self-attention over the source of an encoder-decoder; `memory` for cross-attention. Key padding comes with
    the inputs and is not part of an intent. `scale` is the factor between q·k and the logits: None for 1/√width of
    the head, or a number; `scales` says it for single calls, by their path; `scale_is_free` when the author makes no
    statement about it. `waived` maps a promise to the reason why it is not made.

    >>> from intently import Intent, Mask
    >>> print(Intent(Mask.causal()))
    causal
    >>> print(Intent.parse("encoder-decoder"))
    encoder-decoder: causal decoder, full encoder, full memory
    """

    mask: Mask | None = None
    encoder: Mask | None = None
    memory: Mask = field(default_factory=Mask.full)
    scale: float | None = None
    scales: Mapping[str, float] = field(default_factory=dict)
    scale_is_free: bool = False
    waived: Mapping[str, str] = field(default_factory=dict)
    origin: Origin = "stated"

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
        seen = self.mask.matrix(12)
        return not bool(seen.triu(1).any())

    def __str__(self) -> str:
        if self.mask is None:
            return "not stated"
        if self.encoder is not None:
            return f"encoder-decoder: {self.mask} decoder, {self.encoder} encoder, {self.memory} memory"
        return str(self.mask)
