"""Keys and values of which a call was handed the first ones alone: what stood there before the cut."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from intently.sites.provenance import Node


def uncut(operands: Mapping[str, Tensor], nodes: Mapping[str, Node]) -> dict[str, Tensor]:
    """The keys and values (`[…, position, width]`) before they were cut to their first positions; empty where neither was."""
    found = {n: _before(t, nodes[n]) for n, t in operands.items() if n in nodes}
    whole = {n: t for n, t in found.items() if t is not None}
    return whole if len({t.shape[-2] for t in whole.values()}) == 1 and whole.keys() == operands.keys() else {}


def _before(tensor: Tensor, node: Node) -> Tensor | None:
    """A cut is a view: what it leaves out lies behind it in the same memory."""
    if node.name != "getitem" or node.call is None or len(node.inputs) != 1:
        return None
    index, shape = node.call.args[1], node.inputs[0].shape
    parts = index if isinstance(index, tuple) else (index,)
    whole = [*tensor.shape[:-2], shape[-2], tensor.shape[-1]] if len(shape) == tensor.dim() else []
    from_the_start = all(isinstance(p, slice) and not p.start and p.step is None for p in parts)
    if not from_the_start or list(shape) != whole or tuple(shape) == tuple(tensor.shape):
        return None
    return tensor.as_strided(tuple(shape), tensor.stride(), tensor.storage_offset())
