"""Keys and values made anew from other hidden states: equal to the layer's own, whatever spelling made them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from intently import Intent, Mask, Target
from intently.edits import attend_to
from intently.targets.running import Runner

WIDTH, HEADS = 12, 3


class Linears(nn.Module):
    """Queries of `x`, keys and values of `memory`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def made(self, memory: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.kv(memory).chunk(2, -1)]

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 2).softmax(-1) @ v

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k, v = self.made(memory)
        y = self.mix(self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2), k, v)
        return self.o(y.transpose(1, 2).flatten(2))


class FusedCall(Linears):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Einsums(Linears):
    def made(self, memory: Tensor) -> list[Tensor]:
        weights = self.kv.weight.reshape(2, HEADS, -1, WIDTH)
        return [torch.einsum("bmc,hdc->bhmd", memory, w) for w in weights]


class AddMm(Linears):
    def made(self, memory: Tensor) -> list[Tensor]:
        flat = torch.addmm(self.kv.bias, memory.reshape(-1, WIDTH), self.kv.weight.T).view(*memory.shape[:2], -1)
        return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in flat.chunk(2, -1)]


class Matmul(Linears):
    def made(self, memory: Tensor) -> list[Tensor]:
        flat = memory @ self.kv.weight.T
        return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in flat.chunk(2, -1)]


class Shared(Linears):
    """One head of keys and values for all queries."""

    def made(self, memory: Tensor) -> list[Tensor]:
        k, v = (t[..., : WIDTH // HEADS] for t in self.kv(memory).chunk(2, -1))
        return [t[:, None].expand(-1, HEADS, -1, -1) for t in (k, v)]


class NormedKeys(Linears):
    def made(self, memory: Tensor) -> list[Tensor]:
        k, v = super().made(memory)
        return [k / k.norm(dim=-1, keepdim=True), v]


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.inner(x, memory, memory)[0]


def run(model: nn.Module, edits=None):
    target = Target(model.eval(), Intent(Mask.full()), features=WIDTH).ready()
    runner = Runner(target, torch.float64)
    batch = target.batch(2, {"x": 7, "memory": 5}, dtype=torch.float64)
    output, sites = runner.traced(batch, edits=edits)
    return runner.model, batch, output, sites


@pytest.mark.parametrize("kind", [Linears, FusedCall, Einsums, AddMm, Matmul, Shared, Torchs])
def test_fed_other_states_the_call_gives_what_the_model_gives_for_them(kind):
    other = torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    edit = attend_to(lambda site: other, lambda site: None)
    model, batch, _, sites = run(kind())
    _, _, fed, _ = run(kind(), {sites[0].key_name: edit})
    with torch.no_grad():
        wanted = model(batch.arguments["x"], other)
    torch.testing.assert_close(fed, wanted, rtol=1e-9, atol=1e-12)


def test_masked_states_are_as_if_they_were_not_there():
    other = torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    kept = torch.tensor([[True] * 4 + [False] * 2] * 2)
    model, batch, _, sites = run(Linears())
    _, _, fed, _ = run(Linears(), {sites[0].key_name: attend_to(lambda site: other, lambda site: kept)})
    with torch.no_grad():
        wanted = model(batch.arguments["x"], other[:, :4])
    torch.testing.assert_close(fed, wanted, rtol=1e-9, atol=1e-12)


def test_keys_that_are_more_than_a_projection_are_not_made_anew():
    _, batch, _, (site,) = run(NormedKeys())
    tensors = site.tensors
    assert tensors.projections["key"].remade(tensors.key, batch.arguments["memory"]) is None
    assert tensors.projections["value"].remade(tensors.value, batch.arguments["memory"]) is not None
    assert attend_to(lambda s: batch.arguments["memory"], lambda s: None)(site) is None


def test_what_stood_ready_is_told_by_the_arguments_it_holds():
    _, batch, _, (site,) = run(Linears())
    ready = site.ready
    assert set(ready) == {frozenset({"x"}), frozenset({"memory"})}
    assert [t.shape[:2] for t in ready.values()] == [t.shape[:2] for t in map(batch.arguments.get, ("memory", "x"))]
