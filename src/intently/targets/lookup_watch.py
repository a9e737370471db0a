"""Sees which tables an argument indexes while a model runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class LookupWatch(TorchFunctionMode):
    """In its context, `rows` collects the numbers of rows of the tables that `ids` index."""

    def __init__(self, ids: Tensor):
        super().__init__()
        self.ids = ids
        self.rows: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        tensors = [a for a in args if isinstance(a, Tensor)]
        if name == "embedding" and len(tensors) >= 2 and self._same(tensors[0]):
            self.rows.append(tensors[1].shape[0])
        elif (
            name == "__getitem__"
            and isinstance(args[1], Tensor)
            and self._same(args[1])
            and args[0].is_floating_point()
        ):
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))

    def _same(self, tensor: Tensor) -> bool:
        return (
            tensor.dtype == self.ids.dtype
            and tensor.numel() == self.ids.numel()
            and tensor.reshape(-1).sort().values.equal(self.ids.sort().values)
        )
