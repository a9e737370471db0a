"""Promises about positions on small models: what is told, how severely, and what stays silent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intently
from intently import Intent, Mask, Report, Target
from intently.targets.positions import Counting, counted, offset_argument, position_argument

SELECT = ["position-shift", "order-aware"]


class Model(nn.Module):
    """Tokens with learned positions, counted from the first."""

    def __init__(self, *, causal: bool, placed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal, self.placed = causal, placed
        self.embed, self.table, self.qkv = nn.Embedding(19, 12), nn.Embedding(40, 12), nn.Linear(12, 36)

    def run(self, ids: Tensor, keep: Tensor | None, positions: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.table(positions) if self.placed else x
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
        seen = seen.tril() if self.causal else seen
        seen = seen if keep is None else seen & keep[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)[:, 0]

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.run(ids, attention_mask, torch.arange(ids.shape[1]))


class Told(Model):
    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        return self.run(ids, attention_mask, torch.arange(ids.shape[1]) if position_ids is None else position_ids)


class FromMask(Model):
    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.run(
            ids, attention_mask, counted(torch.ones_like(ids) if attention_mask is None else attention_mask)
        )


def report(model: nn.Module, mask: Mask, **more) -> Report:
    return intently.check(Target(model.eval(), Intent(mask, **more), tokens=19), select=SELECT)


def told(found: Report) -> list[tuple[str, str, str]]:
    return [(f.fault, f.severity, f.proof) for f in found.findings]


SHIFTED = "position-shifted-by-padding"


@pytest.mark.parametrize(
    ("model", "mask", "severity"),
    [
        (Model(causal=True), Mask.causal(), "error"),
        (Told(causal=True), Mask.causal(), "warning"),
        (Model(causal=False), Mask.full(), "warning"),
    ],
)
def test_positions_from_the_first_pad_are_told_by_who_can_help_it(model: Model, mask: Mask, severity: str) -> None:
    assert told(report(model, mask)) == [(SHIFTED, severity, "proven")]


@pytest.mark.parametrize(
    ("model", "mask"),
    [
        (FromMask(causal=True), Mask.causal()),
        (FromMask(causal=False), Mask.full()),
        (Model(causal=True, placed=False), Mask.causal()),  # the triangle alone gives an order
    ],
)
def test_positions_from_the_mask_and_none_in_a_decoder_are_silent(model: Model, mask: Mask) -> None:
    found = report(model, mask)
    assert told(found) == []
    assert [c for c in found.grid if c.promise == "position-shift" and c.verdict == "kept"]


def test_a_bag_of_words_is_told_and_can_be_waived() -> None:
    model = Model(causal=False, placed=False)
    assert told(report(model, Mask.full())) == [("order-blind", "warning", "suspected")]
    assert told(report(model, Mask.full(), waived={"order-aware": "a set of words"})) == []


def test_moved_outputs_are_those_of_a_run_by_hand() -> None:
    """The number told is the largest difference between tokens behind three pads and the same tokens in front of them."""
    model = Model(causal=True).double()
    found = report(model, Mask.causal())
    cell = next(c for c in found.grid if c.promise == "position-shift" and c.condition == "pads left")
    target = found and Target(model, Intent(Mask.causal()), tokens=19).ready()
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[0, :3] = False
    batch = target.batch(2, {"ids": 7}, kept={"ids": keep})
    ids = batch.arguments["ids"]
    moved = []
    for before in (0, 1):
        turned = ids.clone()
        turned[0] = ids[0].roll(before - 3)
        kept = keep.clone()
        kept[0] = keep[0].roll(before - 3)
        with torch.no_grad():
            moved.append((model(turned, kept)[0][kept[0]] - model(ids, keep)[0][keep[0]]).abs().max())
    assert cell.error == pytest.approx(float(max(moved)), rel=1e-9)


def test_arguments_that_take_positions_are_found_by_name() -> None:
    assert position_argument(Target(Told(causal=True), tokens=19).ready()) == "position_ids"
    assert position_argument(Target(Model(causal=True), tokens=19).ready()) is None
    assert offset_argument(Target(Model(causal=True), tokens=19).ready()) is None


def test_a_table_is_read_at_counted_positions() -> None:
    keep = torch.tensor([[False, True, True], [True, True, True]])
    content, table = torch.randn(2, 3, 4), torch.arange(3.0)[:, None].expand(3, 4)
    with Counting(None, keep) as mode:
        found = content + table
    assert torch.equal(
        found - content > 0.5, torch.tensor([[0, 0, 1], [0, 1, 1]], dtype=torch.bool)[..., None].expand(2, 3, 4)
    )
    assert list(mode.places) == ["(root)"]
    with Counting(None, keep):
        assert torch.equal(content + content, 2 * content)
