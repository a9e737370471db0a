"""Exported programs as targets: sites at the modules' paths and lines, faults proven, fixed sizes kept, bad files one sentence."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram

import intently
from intently import Intent, Mask, Target
from intently.errors import CannotCheck
from intently.report import Report
from intently.sites import find
from intently.sites.graph import GraphReplay
from intently.targets import load


class Written(nn.Module):
    """Attention in plain operations."""

    def __init__(self, causal: bool = True, scaled: bool = True):
        super().__init__()
        self.causal, self.scaled = causal, scaled
        self.packed, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, 3, -1).transpose(1, 2) for t in self.packed(x).chunk(3, -1))
        logits = torch.einsum("bhqd,bhkd->bhqk", q, k)
        logits = logits / math.sqrt(8) if self.scaled else logits
        if self.causal:
            logits = logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1))


class Fused(Written):
    """The same by the fused kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, 3, -1).transpose(1, 2) for t in self.packed(x).chunk(3, -1))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=None if self.scaled else 1.0)
        return self.out(made.transpose(1, 2).reshape(b, n, -1))


class Decoder(nn.Module):
    def __init__(self, kind: type[Written], **second: bool):
        super().__init__()
        self.embed, self.head = nn.Embedding(29, 24), nn.Linear(24, 29)
        self.layers = nn.ModuleList([kind(), kind(**second)])

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return {"logits": self.head(x)}


def exported(model: nn.Module, *, free: bool = True, by_name: bool = False) -> ExportedProgram:
    ids = torch.randint(29, (2 if free else 1, 9))
    shapes: Any = {"ids": {0: Dim("batch"), 1: Dim("length")}} if free else None
    args, kwargs = ((), {"ids": ids}) if by_name else ((ids,), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model.eval(), args, kwargs, dynamic_shapes=shapes)


def checked(program: ExportedProgram, folder: Path) -> Report:
    path = folder / "model.pt2"
    torch.export.save(program, path)
    return intently.check(load(str(path), intent="causal"))


def told(report: Report) -> list[tuple[str, str, str]]:
    return [(f.fault, f.site, f.proof) for f in report.findings]


@pytest.mark.parametrize("kind", [Written, Fused])
@pytest.mark.parametrize(
    "second, wanted", [({}, None), ({"causal": False}, "causal-leak"), ({"scaled": False}, "scale-missing")]
)
def test_faults_are_named_at_their_module(
    kind: type[Written], second: dict[str, bool], wanted: str | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    report = checked(exported(Decoder(kind, **second)), tmp_path)
    assert told(report) == ([] if wanted is None else [(wanted, "layers.1", "proven")])
    assert [s.path for s in report.sites] == ["layers.0", "layers.1"]
    assert all(s.source is not None and s.source.file == __file__ for s in report.sites)


def test_a_decomposed_graph_is_followed_as_well(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exported(Decoder(Written, causal=False)).run_decompositions()
    assert told(checked(program, tmp_path)) == [("causal-leak", "layers.1", "proven")]


@pytest.mark.parametrize("by_name", [False, True])
def test_the_replay_is_the_program(by_name: bool) -> None:
    program = exported(Decoder(Written), by_name=by_name)
    ids = torch.randint(29, (3, 5))
    theirs = program.module()(**({"ids": ids} if by_name else {})) if by_name else program.module()(ids)
    assert torch.equal(GraphReplay(program)(ids=ids)["logits"], theirs["logits"])
    assert [s.mask for s in find(GraphReplay(program), ids=ids)] == ["causal", "causal"]


def test_fixed_sizes_stay_fixed() -> None:
    report = intently.check(Target(exported(Decoder(Written), free=False), Intent(Mask.causal())))
    assert report.ok
    assert any("1 sample at a time" in n for n in report.notes)
    assert any("9 positions of ids and no other number" in n for n in report.notes)


@pytest.mark.parametrize("content, said", [(b"no archive", "no program that torch.export saved"), (None, "no file")])
def test_bad_files_are_one_sentence(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.pt2"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CannotCheck, match=said):
        load(str(path))
