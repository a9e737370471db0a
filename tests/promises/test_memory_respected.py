"""The promise `memory-respected`: the numbers of functions whose outputs can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from intently import Intent, Target
from intently.faults.wiring import layer as layer_of
from intently.promises import PROMISES, conditions_of
from intently.promises import memory_respected as promise
from intently.promises.trial import Trial
from intently.targets import Padding, Stream
from intently.targets.running import Runner

STREAMS = (
    Stream("memory", "features", width=1, padding=Padding("memory_mask", keep=True)),
    Stream("x", "features", width=1),
)


def mean_of_kept(memory: Tensor, keep: Tensor | None) -> Tensor:
    keep = torch.ones(memory.shape[:2], dtype=torch.long) if keep is None else keep
    return (memory * keep[..., None]).sum(1, keepdim=True) / keep.sum(1)[:, None, None]


def honest(x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
    return x + mean_of_kept(memory, memory_mask)


def masks_nothing(x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
    return x + mean_of_kept(memory, None)


def deaf(x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
    return 2 * x


def first_for_all(x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
    """Every sample is told the first one's number of real positions."""
    keep = None if memory_mask is None else memory_mask[:1].expand_as(memory_mask)
    return x + mean_of_kept(memory, keep)


def ignores_when_all_is_real(x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
    return 2 * x if memory_mask is None else honest(x, memory, memory_mask)


def trial(model: Callable[..., Tensor]) -> Trial:
    target = Target(model, Intent(), streams=STREAMS, output="x")
    lengths = {"memory": 5, "x": 3}
    made = Trial(
        target, Intent(), Runner(target, torch.float64), conditions_of(target, 2), lengths, floor=1e-14
    )  # fmt: skip
    assert made.target.sources == STREAMS[:1]
    return made


def verdicts(model: Callable[..., Tensor]) -> dict[str, str]:
    return {c.condition: c.verdict for c in PROMISES["memory-respected"].try_on(trial(model))}


WITHOUT = {"batch 2", "batch 1"}
PADDED = {"pads right", "pads right, batch 1", "pads left"}


@pytest.mark.parametrize(
    ("model", "broken"),
    [
        (honest, set()),
        (masks_nothing, PADDED),
        (deaf, {*WITHOUT, *PADDED, "mask of ones", "mask of ones, batch 1"}),
        (ignores_when_all_is_real, WITHOUT),
        (first_for_all, PADDED),  # alone it gives what it gives in a batch
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_where_it_is_broken(model, broken):
    assert {name for name, verdict in verdicts(model).items() if verdict == "broken"} == broken
    assert set(verdicts(model).values()) <= {"kept", "broken"}


def test_the_leak_is_the_change_over_the_length():
    """One of five positions moves the mean by a fifth of its change."""
    made = trial(masks_nothing)
    condition = made.named("pads right")
    memory = made.batch(condition.layout).arguments["memory"]
    changes = [STREAMS[0].change(memory, 0, j, made.seed + 1)[0, j] - memory[0, j] for j in (3, 4)]
    assert promise.leaked(made, condition) == pytest.approx(float(torch.stack(changes).abs().amax()) / 5, abs=1e-12)
    assert promise.leaked(trial(honest), condition) == 0


def test_exchanged_sources_exchange_outputs():
    condition = trial(honest).named("pads right")
    assert promise.exchanged(trial(honest), condition) == pytest.approx(0, abs=1e-14)
    gap = promise.exchanged(trial(first_for_all), condition)
    assert gap is not None and gap > 0.01
    assert promise.exchanged(trial(honest), trial(honest).named("pads right, batch 1")) is None


def test_a_model_of_one_stream_has_no_memory():
    target = Target(lambda x: x, Intent(), streams=STREAMS[1:], output="x")
    made = Trial(target, Intent(), Runner(target, torch.float64), conditions_of(target, 2), {"x": 3})
    assert {c.verdict for c in PROMISES["memory-respected"].try_on(made)} == {"not-applicable"}


@pytest.mark.parametrize(
    ("call", "alike", "layer"),
    [
        ("decoder.0.cross#0", "decoder.1.cross#0", "decoder.0"),
        ("block.1.layer.1.attn#0", "block.0.layer.1.attn#0", "block.1"),  # parts of a layer are numbered, too
        ("stages.0.blocks.1.cross#0", "stages.0.blocks.0.cross#0", "stages.0.blocks.1"),
        ("blocks.0.layers.0.attn#0", "blocks.0.layers.1.attn#0", "blocks.0.layers.0"),
    ],
)
def test_a_layer_ends_at_the_number_in_which_its_peers_differ(call: str, alike: str, layer: str) -> None:
    one, other = (SimpleNamespace(key_name=name) for name in (call, alike))
    assert layer_of(one, other) == layer  # type: ignore[arg-type]
