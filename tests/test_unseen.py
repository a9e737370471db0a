"""A model in which nothing is seen to attend: what it breaks is told, and nothing counts as kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import intently
from intently import CannotCheck, Intent, Mask, Target


class Averaging(nn.Module):
    """Mixes positions without any weights: every output holds the mean over all, pads too unless they are heeded."""

    def __init__(self, heeds: bool) -> None:
        super().__init__()
        self.own, self.heeds = nn.Linear(8, 8), heeds

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        kept = torch.ones_like(x[..., :1]) if attention_mask is None else attention_mask[..., None].to(x.dtype)
        heeded = kept if self.heeds else torch.ones_like(kept)
        return (self.own(x) + (x * heeded).sum(1, keepdim=True) / heeded.sum(1, keepdim=True)) * kept


class Averages(nn.Module):
    def __init__(self, heeds: bool) -> None:
        super().__init__()
        self.mixing, self.end = Averaging(heeds), nn.Linear(8, 8)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.end(self.mixing(x, attention_mask))


def target(heeds: bool) -> Target:
    torch.manual_seed(0)
    return Target(Averages(heeds).eval(), Intent(Mask.full()), features=8)


def test_what_it_breaks_is_told_where_it_stands() -> None:
    report = intently.check(target(heeds=False))
    assert report.verdict == "broken"
    assert {(f.fault, f.site) for f in report.findings if f.severity == "error"} == {("padding-leak", "mixing")}
    assert any("from outside only" in n for n in report.notes)


def test_nothing_counts_as_kept() -> None:
    with pytest.raises(CannotCheck, match="no attention call was seen"):
        intently.check(target(heeds=True))
