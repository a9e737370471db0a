"""Outputs of several streams in a row: the main stream's are found on either side, and nowhere where nothing tells."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intently
from intently import Intent, Target
from intently.targets.running import Runner
from intently.targets.signature import lengths_for
from intently.targets.stream import Padding, Stream

WIDTH, HEADS = 20, 2


class Joined(nn.Module):
    """Tokens and the states of a source in one row; `pad` hides states, `order` says what stands first."""

    def __init__(self, order: str, *, leaks: bool = False) -> None:
        super().__init__()
        self.order, self.leaks = order, leaks
        self.embed, self.qkv, self.out = nn.Embedding(23, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, context: Tensor, input_ids: Tensor, pad: Tensor | None = None) -> Tensor:
        x, shown = self.embed(input_ids), torch.ones_like(input_ids, dtype=torch.bool)
        kept = torch.ones(context.shape[:2], dtype=torch.bool) if pad is None or self.leaks else pad.bool()
        pairs = [(context, kept), (x, shown)] if self.order == "source first" else [(x, shown), (context, kept)]
        row, keep = torch.cat([p[0] for p in pairs], 1), torch.cat([p[1] for p in pairs], 1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(row).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, keep[:, None, None]).transpose(1, 2).flatten(2)
        given = row + self.out(mixed)
        return given[:, torch.arange(row.shape[1]).view(2, -1).T.reshape(-1)] if self.order == "mixed" else given


def joined(order: str, *, leaks: bool = False) -> Target:
    torch.manual_seed(0)
    streams = (
        Stream("context", "features", width=WIDTH, padding=Padding("pad", keep=True)),
        Stream("input_ids", "tokens", vocab=23),
    )
    return Target(Joined(order, leaks=leaks).eval(), Intent(), streams=streams, output="input_ids")


@pytest.mark.parametrize(("order", "side"), [("source first", slice(9, None)), ("tokens first", slice(0, 7))])
def test_the_tokens_are_read_off_the_row(order: str, side: slice) -> None:
    target = joined(order)
    lengths = lengths_for(target.streams)
    assert lengths == {"context": 9, "input_ids": 7}
    runner = Runner(target)
    batch = target.batch(2, lengths, dtype=torch.float32)
    with torch.no_grad():
        expected = target.model(batch.arguments["context"], batch.arguments["input_ids"])[:, side]
    assert torch.equal(runner.output(batch), expected.double())
    assert runner.follows_sources is (order == "source first")


def test_a_row_that_nothing_tells_apart_is_read_whole() -> None:
    target = joined("mixed")
    batch = target.batch(2, lengths_for(target.streams), dtype=torch.float32)
    assert Runner(target).output(batch).shape == (2, 1, 16 * WIDTH)


@pytest.mark.parametrize("leaks", [False, True])
def test_outputs_at_pads_of_the_source_are_no_outputs(leaks: bool) -> None:
    torch.set_num_threads(1)
    report = intently.check(joined("source first", leaks=leaks))
    broken = {c.promise for c in report.grid if c.verdict == "broken"}
    assert ("padding-inert" in broken) is leaks, report.findings
