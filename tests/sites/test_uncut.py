"""What stood before a call was handed the first keys alone, and what it gives when it sees all of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from intently import Intent, Mask, Target
from intently.edits import see_uncut
from intently.targets.running import Runner

WIDTH = 8


class Cut(torch.nn.Module):
    """Causal over the keys that `keep` leaves of a source."""

    def __init__(self, keep: slice, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.keep, self.heads = keep, heads
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, n * 4) for n in (2, heads, heads))

    def parts(self, x: Tensor, memory: Tensor) -> list[Tensor]:
        made = (self.q(x), self.k(memory), self.v(memory))
        return [t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in made]

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = self.parts(x, memory)
        k, v = k[:, :, self.keep], v[:, :, self.keep]
        grouped = self.heads == 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2).flatten(2)


def traced(model: Cut, edits=None):
    target = Target(model.eval(), Intent(Mask.full()), features=WIDTH).ready()
    runner = Runner(target, torch.float64)
    batch = target.batch(2, {"x": 5, "memory": 9}, dtype=torch.float64)
    output, (site,) = runner.traced(batch, edits=edits)
    return runner.model, batch, output, site


@pytest.mark.parametrize("heads", [2, 1])
def test_seeing_all_gives_what_the_uncut_call_gives(heads: int) -> None:
    edit = see_uncut(lambda site: torch.ones(site.queries, site.keys, dtype=torch.bool))
    _, _, _, site = traced(Cut(slice(0, 5), heads))
    assert site.keys == 5
    assert site.tensors.uncut["key"].shape == (2, 2, 9, 4)
    model, batch, output, _ = traced(Cut(slice(0, 5), heads), {site.key_name: edit})
    with torch.no_grad():
        q, k, v = model.parts(batch.arguments["x"], batch.arguments["memory"])
        wanted = F.scaled_dot_product_attention(q, k, v, enable_gqa=heads == 1).transpose(1, 2).flatten(2)
    torch.testing.assert_close(output, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("keep", [slice(None), slice(2, 9), slice(0, 9, 2)], ids=str)
def test_what_is_no_cut_at_the_end_is_left_as_it_is(keep: slice) -> None:
    _, _, _, site = traced(Cut(keep))
    assert not site.tensors.uncut
    assert see_uncut(lambda s: torch.ones(s.queries, s.keys, dtype=torch.bool))(site) is None
