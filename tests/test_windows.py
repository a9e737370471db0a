"""Windows beyond the zoo: none stated, odd layers, long ones, other mixers beside them, and what is said of each."""

from __future__ import annotations

import pytest
import torch
from tests.zoo.windows import (
    VOCABULARY,
    WINDOW,
    Einsum,
    Everything,
    Fused,
    Layers,
    NoWindowWithoutMask,
    distance,
)
from torch import Tensor, nn

import intently
from intently import Intent, Mask, Report, Target
from intently.check.observe import observed, odd_one_out
from intently.promises.windowed import beyond
from intently.targets.running import Runner

WINDOWED = Intent(Mask.causal() & Mask.window(WINDOW))


def built(*layers: type[nn.Module], model: type[Layers] = Layers, intent: Intent | None = None) -> Target:
    torch.manual_seed(7)
    return Target(model(*layers).eval(), intent, tokens=VOCABULARY)


def checked(target: Target) -> Report:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        return intently.check(target, ignore=["affordable", "responsive"])


def errors(report: Report) -> list[tuple[str, str, str]]:
    return [(f.fault, f.site, f.proof) for f in report.findings if f.severity == "error"]


def looked_at(*layers: type[nn.Module]) -> tuple:
    target = built(*layers).ready()
    lengths = {s.argument: 11 for s in target.streams}
    runner = Runner(target)
    return target, lengths, runner.traced(target.batch(2, lengths, dtype=runner.dtype), keep=False)[1]


def test_what_a_window_hides() -> None:
    far = beyond(Mask.causal() & Mask.window(2), 4)[0, 0]
    assert far.int().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert not beyond(Mask.causal() & Mask.documents(2, 2), 4).any(), "documents are no window"


@pytest.mark.parametrize(
    ("layers", "masks", "odd"),
    [
        ((Fused, Fused, Fused), ["causal & window(4)"] * 3, None),
        ((Fused, Everything, Fused, Everything), ["causal & window(4)", "causal"] * 2, None),
        ((Fused, Fused, Everything), ["causal & window(4)", "causal & window(4)", "causal"], "layers.2"),
        ((Fused, Everything), ["causal & window(4)", "causal"], None),
    ],
    ids=["alike", "taking turns", "an odd one", "two"],
)
def test_what_is_observed(layers, masks, odd) -> None:
    target, lengths, sites = looked_at(*layers)
    intent = observed(target, lengths, sites)
    assert [str(intent.mask_at(s.path)) for s in sites] == masks
    assert intent.origin == "observed"
    found = odd_one_out(target, lengths, sites)
    assert (found and found[0].path) == odd


def test_an_odd_layer_is_told_where_nobody_states_an_intent() -> None:
    report = checked(built(Fused, Fused, Everything))
    assert errors(report) == []
    assert [n for n in report.notes if "layers.2 sees causal, while the 2 other" in n]
    stated = checked(built(Fused, Fused, Everything, intent=WINDOWED))
    assert errors(stated) == [("window-ignored", "layers.2", "proven")]
    assert not [n for n in stated.notes if "differs from its peers" in n]


def test_a_window_that_only_a_mask_brings_is_found_without_an_intent() -> None:
    report = checked(built(Fused, NoWindowWithoutMask))
    assert errors(report) == [("window-ignored", "layers.1", "proven")]


class Recurrent(Layers):
    """A recurrence before the windows: it carries everything on, as it should."""

    def __init__(self, *attentions: type[nn.Module]) -> None:
        super().__init__(*attentions)
        self.mix = nn.GRU(VOCABULARY, VOCABULARY, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.mix(super().forward(input_ids))[0]


def test_what_carries_inputs_past_the_windows_is_not_attention() -> None:
    report = checked(built(Fused, Fused, model=Recurrent, intent=WINDOWED))
    assert report.ok, errors(report)
    told = {c.note for c in report.grid if c.promise == "windowed" and c.verdict == "kept"}
    assert any("something besides attention" in note for note in told)


class Wide(Einsum):
    width = 20

    def band(self, length: int) -> Tensor:
        return (distance(length) >= 0) & (distance(length) < self.width)


class Wider(Wide):
    width = 21


def test_a_window_longer_than_the_first_sequences_is_judged_on_longer_ones() -> None:
    intent = Intent(Mask.causal() & Mask.window(20))
    report = checked(built(Wide, Wider, intent=intent))
    assert errors(report) == [("window-off-by-one", "layers.1", "proven")]
    assert report.findings[0].condition.startswith("long")
    assert errors(checked(built(Wide, Wide, intent=intent))) == []


def test_a_window_that_nothing_tried_exceeds_is_told() -> None:
    report = checked(built(Everything, intent=Intent(Mask.causal() & Mask.window(1000))))
    assert report.ok
    assert [n for n in report.notes if "was not judged; --length N tries longer sequences" in n]


def test_a_window_where_none_is_meant_is_called_one() -> None:
    found = [f for f in checked(built(Fused, Fused, intent=Intent(Mask.causal()))).findings if f.severity == "error"]
    assert {(f.fault, f.proof) for f in found} == {("causal-extra", "proven")}
    assert all(f.message.startswith("a window hides") and f"window({WINDOW})" in f.message for f in found)
