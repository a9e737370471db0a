"""Learned positions: a table with one trained vector per position, added to the representations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intently._typing import Bool, Float, Int
from intently.mechanism.door import show


class LearnedPositions(nn.Module):
    """A table of `length + offset` rows; position m reads row `m + offset`.

    Offsets are history that loaded weights carry along: OPT and BART read row m + 2; RoBERTa keeps row 1 for pads and
    starts at row 2. Forgetting one shifts every position and raises nothing until the last row is passed.

    Args:
        length: number of positions; beyond it there is nothing to read, and no way to extrapolate.
        width: of a representation.
        offset: row of position 0. OPT, BART: 2. RoBERTa: 2 (its padding index + 1). GPT-2, BERT: 0.
        padding: row that pads read, which gets no gradient. RoBERTa: 1. None: pads read the row of their position.

    Symbols: `weight` = the position embeddings p_m of Gehring et al.

    Equals / differs: torch `scaled_dot_product_attention`, `nn.MultiheadAttention`, ONNX `Attention` and FlexAttention
    know nothing of it; it is part of what they are given.

    Source: Gehring et al. 2017, arXiv 1705.03122, section 3.1; Devlin et al. 2018, arXiv 1810.04805.

    Four positions behind an offset of 2: six rows, of which positions 0 to 3 read rows 2 to 5.

    >>> import torch
    >>> positions = LearnedPositions(4, 1, offset=2)
    >>> _ = positions.weight.data.copy_(torch.tensor([[-2.0], [-1.0], [0.0], [1.0], [10.0], [100.0]]))
    >>> positions(torch.arange(4)).flatten().tolist()
    [0.0, 1.0, 10.0, 100.0]
    """

    def __init__(self, length: int, width: int, *, offset: int = 0, padding: int | None = None):
        super().__init__()
        if length < 1 or width < 1 or offset < 0:
            raise ValueError(
                f"LearnedPositions: length {length}, width {width}, offset {offset}; "
                "at least one position of at least one feature is needed, behind an offset of 0 or more"
            )
        if padding is not None and not 0 <= padding < length + offset:
            raise ValueError(f"LearnedPositions: padding row {padding} is not among {length + offset} rows")
        self.length, self.offset, self.padding = length, offset, padding
        self.weight = nn.Parameter(torch.empty(length + offset, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table anew: normal with standard deviation 0.02 (GPT-2, BERT), the row of the pads 0."""
        nn.init.normal_(self.weight, std=0.02)
        if self.padding is not None:
            with torch.no_grad():
                self.weight[self.padding].zero_()

    def forward(
        self, positions: Int[Tensor, "*batch length"], keep: Bool[Tensor, "*batch length"] | None = None
    ) -> Float[Tensor, "*batch length width"]:
        """The vectors of these positions.

        Args:
            positions: `[*batch, length]`, integers; with pads, from `positions_from_padding`.
            keep: True where a token is real; only of use with a row for the pads.

        Raises:
            IndexError: a position beyond the table.
            TypeError, ValueError: positions that are no integers; `keep` without a row for pads.
        """
        if positions.dtype in (torch.bool, torch.uint8) or positions.is_floating_point():
            raise TypeError(f"LearnedPositions: positions are {show(positions)}; int32 or int64 is needed")
        rows = positions + self.offset
        if keep is not None:
            if self.padding is None:
                raise ValueError("LearnedPositions: keep was given, yet there is no row for pads; pass padding=")
            rows = torch.where(keep, rows, self.padding)
        try:
            return F.embedding(rows, self.weight, self.padding)
        except IndexError as error:
            raise IndexError(
                f"LearnedPositions: {show(positions)} reach beyond the positions 0 to {self.length - 1} "
                f"({self.length} rows behind an offset of {self.offset}). A longer text than the model was made for, "
                "or positions that carry the offset already?"
            ) from error

    def extra_repr(self) -> str:
        return f"length={self.length}, width={self.weight.shape[1]}, offset={self.offset}, padding={self.padding}"
