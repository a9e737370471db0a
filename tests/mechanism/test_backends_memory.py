"""Blocks keep their promise: no tensor grows with length × length, and the work of a window grows with the length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from intently import Mask
from intently.mechanism import attention

LENGTH, HEADS, WIDTH = 1024, 2, 4


class Largest(TorchDispatchMode):
    """Remembers the most elements that any operation returned, in the backward pass as well."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def distance(query_index: torch.Tensor, key_index: torch.Tensor) -> torch.Tensor:
    return -torch.tensor([0.5, 0.25])[:, None, None] * (query_index - key_index).abs()


def run(backend: str, length: int = LENGTH, **options: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = 1, HEADS, length, WIDTH
    query, key, value = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    attention(query, key, value, backend=backend, **options).square().sum().backward()
    assert query.grad is not None and query.grad.isfinite().all()


def largest(backend: str, **options: Any) -> int:
    with Largest() as recorder:
        run(backend, **options)
    return recorder.elements


WINDOW = Mask.causal() & Mask.window(64)
CALLS = {
    "window": {"mask": WINDOW},
    "causal, softcap": {"mask": Mask.causal(), "softcap": 2.0},
    "nothing hidden, softcap, sink": {"softcap": 2.0, "sink": 0.0},
    "documents": {"mask": Mask.documents(*[LENGTH // 8] * 8)},
    "padding": {"mask": Mask.causal() & Mask.padding([LENGTH - 3], side="left")},
    "bias by rule": {"bias": distance},
    "bias by rule, window": {"bias": distance, "mask": WINDOW, "sink": 0.0},
    "dropout": {"dropout": 0.1, "mask": WINDOW},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_no_tensor_is_as_large_as_length_times_length(options):
    # A block's plane has 128 rows, all heads, and a column for the sink; all else grows with the length alone.
    assert largest("blocked", **options) <= 128 * (LENGTH + 1) * HEADS < LENGTH * LENGTH
    if options.get("mask") in (WINDOW, CALLS["documents"]["mask"]):
        assert largest("blocked", **options) <= 128 * (128 + 128) * HEADS


@pytest.mark.parametrize("backend", ["stages", "fused"])
def test_negative_control_the_others_do_make_one(backend):
    assert largest(backend, mask=WINDOW) >= LENGTH * LENGTH


def work(backend: str, length: int) -> int:
    # The cap makes every block go through the stages, whose products the counter knows.
    with FlopCounterMode(display=False) as counter:
        run(backend, length, mask=WINDOW, softcap=2.0)
    return counter.get_total_flops()


def test_the_work_of_a_window_grows_with_the_length():
    assert work("blocked", 2 * LENGTH) / work("blocked", LENGTH) == pytest.approx(2, rel=0.1)
    assert work("stages", 2 * LENGTH) / work("stages", LENGTH) == pytest.approx(4, rel=0.1)  # negative control
    assert work("blocked", LENGTH) < work("stages", LENGTH) / 3
