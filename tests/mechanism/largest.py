"""The largest tensor that a call makes, forward and backward: how a form shows that it never holds length x length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Keeps the largest number of elements that any operation hands out."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                # What is stored, not what is seen: an expanded tensor is no larger than what it repeats.
                self.numel = max(self.numel, min(each.numel(), each.untyped_storage().nbytes() // each.element_size()))
        return result


def largest(call: Callable[..., Tensor], **tensors: Tensor) -> int:
    """Elements of the largest tensor made by the call and by its gradients."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    with Largest() as seen:
        torch.autograd.grad(call(**leaves).square().sum(), list(leaves.values()))
    return seen.numel


def growth(call: Callable[..., Tensor], short: dict[str, Tensor], long: dict[str, Tensor]) -> float:
    """By what factor the largest tensor grows from the short call to the long one."""
    return largest(call, **long) / largest(call, **short)
