"""What the queries of a piece are meant to see, by hand: six tokens so far, the last two of them new, a window of three."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from intently import Mask
from intently.faults.evidence import _in_piece

KEPT = torch.tensor([[False, False, False, True, True, True], [True] * 6])  # sample 0 has three pads


def meant(keys: int, first: int = 4) -> Tensor | None:
    site: Any = SimpleNamespace(queries=2, keys=keys)
    return _in_piece(Mask.causal() & Mask.window(3), KEPT, first, site)


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        (6, (("000110", "000111"), ("001110", "000111"))),  # all are held
        (4, (("0110", "0111"), ("1110", "0111"))),  # the latest four
        (8, (("00011000", "00011100"), ("00111000", "00011100"))),  # with room for two more
    ],
)
def test_rows_lie_over_the_keys_that_are_held(keys: int, rows: tuple[tuple[str, ...], ...]) -> None:
    expected = torch.tensor([[[[c == "1" for c in row] for row in sample]] for sample in rows])
    found = meant(keys)
    assert found is not None
    assert torch.equal(found, expected)


def test_queries_that_are_not_the_tokens_of_the_piece() -> None:
    assert meant(6, first=3) is None
