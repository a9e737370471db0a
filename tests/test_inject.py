"""What is planted is what its name says, on four tokens by hand; a change of nothing changes nothing; scores count right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks import workers
from benchmarks.inject import changes
from benchmarks.inject.__main__ import places, score, someone_elses
from benchmarks.inject.changes import CHANGES, Change
from benchmarks.inject.planted import plant
from torch import Tensor, nn

from intently.report import SiteRecord
from intently.targets.huggingface import tiny

TRIANGLE = torch.ones(4, 4, dtype=torch.bool).tril()


def site(path: str = "", **said: Any) -> SiteRecord:
    given: dict[str, Any] = {
        "role": "self", "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 8, "queries": 4, "keys": 4, "scale": 8**-0.5,
        "mask": "causal", "kernel": "", "dtype": "float32", "dropout": 0.0, "bias": "none", "source": None,
    }  # fmt: skip
    return SiteRecord(path, **{**given, **said})


def named(name: str) -> Change:
    return next(c for c in CHANGES if c.name == name)


def rows(text: str) -> Tensor:
    """A mask as one string of 0 and 1 a row."""
    return torch.tensor([[c == "1" for c in row] for row in text.split()])


@pytest.mark.parametrize(
    ("name", "seen", "expected"),
    [
        ("triangle dropped", "1000 1100 1110 1110", "1110 1110 1110 1110"),
        ("triangle shifted by one", "1000 1100 1110 1111", "1100 1110 1111 1111"),
        ("triangle added", "1111 1111 1111 1111", "1000 1100 1110 1111"),
        ("key mask dropped", "1000 1100 1100 1100", "1000 1100 1110 1111"),
        ("key mask dropped", "0100 0110", "1100 1110"),  # two queries after a pad and one key; room for one more behind
        ("mask inverted", "1000 1100 1110 1111", "0111 0011 0001 0000"),
        ("window dropped", "1000 1100 0110 0011", "1000 1100 1110 1111"),
        ("window widened", "1000 1100 0110 0011", "1000 1100 1110 0111"),
        ("cache offset", "1110 1111", "1000 1100"),
    ],
)
def test_masks_by_hand(name: str, seen: str, expected: str) -> None:
    sees = named(name).sees
    assert sees is not None
    assert torch.equal(sees(rows(seen)), rows(expected))


@pytest.mark.parametrize(
    ("name", "factor"), [("scale removed", 1.0), ("scale doubled", 1 / 8), ("scale of another width", 32**-0.5)]
)
def test_factors_by_hand(name: str, factor: float) -> None:
    ratio = named(name).ratio
    assert ratio is not None
    assert ratio(site()) * 8**-0.5 == pytest.approx(factor)


class Attention(nn.Module):
    """Causal attention on `[batch, heads, position, width]`, fused or by hand, with shared keys and values repeated."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        return torch.matmul((torch.matmul(q, k.mT) / 8**0.5).masked_fill(hidden, -torch.inf).softmax(-1), v)


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, factor: float = 8**-0.5, axis: int = -1, tiled: bool = False
) -> Tensor:
    k, v = (t.repeat(1, 2, 1, 1) if tiled else t.repeat_interleave(2, 1) for t in (k, v))
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) * factor
    weights = torch.where(seen, logits, torch.tensor(-1e30, dtype=q.dtype)).softmax(axis)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("triangle dropped", {"seen": torch.ones(4, 4, dtype=torch.bool)}),
        ("triangle shifted by one", {"seen": torch.ones(4, 4, dtype=torch.bool).tril(1)}),
        ("scale removed", {"seen": TRIANGLE, "factor": 1.0}),
        ("scale of another width", {"seen": TRIANGLE, "factor": 32**-0.5}),
        ("heads tiled", {"seen": TRIANGLE, "tiled": True}),
        ("softmax over queries", {"seen": TRIANGLE, "axis": -2}),
    ],
)
def test_a_planted_call_computes_what_its_name_says(fused: bool, name: str, what: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 4, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    module = Attention(fused)
    plant(module, named(name), site())
    assert torch.allclose(module(q, k, v), by_hand(q, k, v, **what), atol=1e-12)
    assert not torch.allclose(module(q, k, v), Attention(fused)(q, k, v), atol=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_dropout_is_random(fused: bool) -> None:
    module = Attention(fused)
    plant(module, named("dropout"), site())
    q, k = torch.ones(1, 4, 4, 8), torch.ones(1, 2, 4, 8)
    assert not torch.equal(module(q, k, k), module(q, k, k))


def test_a_change_of_nothing_changes_nothing() -> None:
    built = tiny("llama")
    nothing = Change("nothing", frozenset(), lambda s: True)
    mine = someone_elses(copy.deepcopy(built.model))
    for found in built.sites():
        plant(mine.get_submodule(found.path), nothing, found)
    ids = torch.arange(20, 34).reshape(2, 7)
    with torch.no_grad():
        assert torch.equal(mine(ids).logits, built.model(ids).logits)


def test_a_change_goes_to_one_call_or_to_all_that_it_fits() -> None:
    sites = [site("a"), site("b", mask="full"), site("c"), site("d#0"), site("d#1"), site("(root)")]
    assert [s.path for s in places(sites, named("triangle dropped"), True)] == ["a", "c"]
    assert len(places(sites, named("triangle dropped"), False)) == 1
    assert places(sites, named("memory swapped"), True) == []


def test_scores() -> None:
    row = {
        "change": "scale removed",
        "sites": ["a"],
        "verdict": "broken",
        "errors": [["scale-missing", "a", "proven", ""]],
    }
    assert set(score(row).values()) == {True}
    assert score({**row, "sites": ["a", "b"]})["placed"] is False
    assert score({**row, "errors": [["scale-twice", "a", "proven", ""]]}) == dict.fromkeys(
        ("found", "named", "placed", "proven", "alone"), False
    ) | {"found": True}
    assert score({**row, "errors": [["scale-missing", "a", "suspected", ""]]})["proven"] is False
    assert score({**row, "verdict": "kept", "errors": []})["found"] is False


def test_every_right_name_is_a_fault() -> None:
    from intently.faults import FAULTS

    assert len(CHANGES) >= 14
    assert {n for c in CHANGES for n in c.names} <= FAULTS.keys()
    assert changes.HIDDEN < -1000


def test_outcomes_are_kept_and_not_made_twice(tmp_path: Any) -> None:
    made: list[str] = []

    def run(name: str) -> dict[str, Any]:
        made.append(name)
        return {"name": name, "value": len(name)}

    path = tmp_path / "state.jsonl"
    assert dict(workers.each(["a", "bb"], run, workers.State(path), 1))["bb"]["value"] == 2
    assert dict(workers.each(["a", "bb", "ccc"], run, workers.State(path), 1))["a"]["value"] == 1
    assert made == ["a", "bb", "ccc"]


def test_a_process_that_fails_says_why() -> None:
    assert "nowhere" in workers.outcome("benchmarks.nowhere", "x", limit=60)["why"]
