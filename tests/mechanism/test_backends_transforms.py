"""Backends under `torch.compile`, `torch.vmap` and `torch.func`: as without them, or refused aloud."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from intently import Mask
from intently.mechanism import attention, reference
from intently.mechanism.backends import blocked

EVERY = pytest.mark.parametrize("backend", ["auto", "stages", "fused", "blocked", "math", "oracle"])
# torch runs its flash kernel sample by sample under vmap, and says so.
VMAP_OF_FLASH = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK", 5)
    torch._dynamo.reset()


def states(*lead: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = (*lead, 4, 11, 6), (*lead, 2, 11, 6), (*lead, 2, 11, 6)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def distance(query_index: torch.Tensor, key_index: torch.Tensor) -> torch.Tensor:
    return -0.5 * (query_index - key_index).abs().double()


BLIND = torch.rand(11, 11, generator=torch.Generator().manual_seed(2)) > 0.5
BLIND[3] = False
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"mask": Mask.causal() & Mask.window(4)},
    "documents": {"mask": Mask.documents(4, 7)},
    "rows that see nothing": {"mask": BLIND},
    "bias by rule": {"bias": distance, "mask": Mask.causal()},
}
EACH_CALL = pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())


def with_gradients(call: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = call(*leaves)
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


@EVERY
@EACH_CALL
def test_compiles_in_one_graph_with_gradients(backend, options):
    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return attention(*tensors, backend=backend, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(with_gradients(compiled, states(2)), with_gradients(call, states(2)))


@VMAP_OF_FLASH
@EVERY
@EACH_CALL
def test_vmap_is_a_loop(backend, options):
    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return attention(*tensors, backend=backend, **options)

    tensors = states(3, 2)
    looped = torch.stack([call(*sample) for sample in zip(*tensors, strict=True)])
    torch.testing.assert_close(torch.vmap(call)(*tensors), looped)


@VMAP_OF_FLASH
@pytest.mark.parametrize("backend", ["stages", "blocked"])
def test_gradient_by_torch_func(backend):
    options = CALLS["rows that see nothing"]

    def loss(query: torch.Tensor, rest: tuple[torch.Tensor, ...], call: Callable[..., torch.Tensor]) -> torch.Tensor:
        return call(query, *rest, **options).square().sum()

    query, *rest = states(2)
    found = torch.func.grad(loss)(query, tuple(rest), lambda *t, **o: attention(*t, **o, backend=backend))
    leaf = query.clone().requires_grad_()
    truth = loss(leaf, tuple(rest), lambda *t, **o: reference(*t, **o).output)
    torch.testing.assert_close(found, torch.autograd.grad(truth, leaf)[0])


@VMAP_OF_FLASH
def test_a_mask_that_is_mapped_over():
    masks = torch.rand(3, 11, 11, generator=torch.Generator().manual_seed(4)) > 0.6
    tensors = states(1)
    for backend in ("stages", "blocked", "fused"):

        def call(mask: torch.Tensor, backend: str = backend) -> torch.Tensor:
            return attention(*tensors, mask=mask, backend=backend)

        torch.testing.assert_close(torch.vmap(call)(masks), torch.stack([call(mask) for mask in masks]))
