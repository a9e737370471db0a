"""Compiled models: the compiled callable is what is judged, its sites are the module's, and a compiler that errs is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import intently
from intently import Intent, Mask


class Attention(nn.Module):
    def __init__(self, causal: bool = True):
        super().__init__()
        self.causal, self.packed = causal, nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.packed(x).chunk(3, -1)
        logits = q @ k.transpose(-2, -1) / math.sqrt(16)
        if self.causal:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(future, float("-inf"))
        return logits.softmax(-1) @ v


class Model(nn.Module):
    def __init__(self, causal: bool = True):
        super().__init__()
        self.embed, self.attn = nn.Embedding(19, 16), Attention(causal)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.attn(self.embed(ids))


class Counting:
    """A compiler that changes nothing (or drops the mask) and counts the calls of what it made."""

    def __init__(self, drops: bool = False):
        self.drops, self.calls = drops, 0

    def __deepcopy__(self, memo: Any) -> Counting:
        return self  # a copy of the model counts on

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes if self.drops else ():
            if "masked_fill" in str(node.target):
                node.replace_all_uses_with(node.args[0])
        graph.recompile()

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def checked(model: nn.Module, compiler: Counting) -> intently.Report:
    compiled = torch.compile(model.eval(), backend=compiler)
    return intently.check(compiled, intent=Intent(Mask.causal()), select=["causal", "backends-agree"])


def test_an_honest_model_is_kept_and_stays_compiled() -> None:
    compiler = Counting()
    report = checked(Model(), compiler)
    assert report.ok and not report.findings
    assert [s.path for s in report.sites] == ["attn"]
    assert any("judged as compiled" in n for n in report.notes)
    # Runs that look inside, and those of the switch, are not compiled; every other one is.
    assert compiler.calls > report.forwards / 2


def test_a_fault_of_the_module_is_named_and_proven() -> None:
    report = checked(Model(causal=False), Counting())
    assert [(f.fault, f.site, f.proof) for f in report.findings] == [("causal-leak", "attn", "proven")]


def test_a_compiler_that_drops_the_mask_is_found() -> None:
    report = checked(Model(), Counting(drops=True))
    assert not report.ok
    assert "backend-disagrees" in {f.fault for f in report.findings}
    broken = {(c.promise, c.condition) for c in report.grid if c.verdict == "broken"}
    assert ("causal", "batch 2") in broken and ("causal", "not compiled · batch 2") not in broken
