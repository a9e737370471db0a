"""The mask language: which query may see which key. Inside, True always means "may see"."""

from __future__ import annotations

from intently.masks.convert import (
    from_additive,
    from_hf,
    from_key_padding,
    from_mask_mod,
    from_mha,
    from_onnx,
    from_sdpa,
    lowest_score,
    to_additive,
    to_hf,
    to_key_padding,
    to_mask_mod,
    to_mha,
    to_onnx,
    to_sdpa,
)
from intently.masks.mask import Mask
from intently.masks.parse import MaskSyntaxError
from intently.masks.recognise import Cell, Recognised, recognise

__all__ = [
    "Cell",
    "Mask",
    "MaskSyntaxError",
    "Recognised",
    "from_additive",
    "from_hf",
    "from_key_padding",
    "from_mask_mod",
    "from_mha",
    "from_onnx",
    "from_sdpa",
    "lowest_score",
    "recognise",
    "to_additive",
    "to_hf",
    "to_key_padding",
    "to_mask_mod",
    "to_mha",
    "to_onnx",
    "to_sdpa",
]
