"""Behind an operand: the projection it comes from, the hidden states behind that, and what each entry was there."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from intently.sites.ops import COPIES, MOVES
from intently.sites.provenance import Follow, Node


def projection_of(node: Node) -> Node | None:
    """The nearest projection behind an operand."""
    todo, seen = [node], set()
    while todo:
        current = todo.pop(0)
        if current in seen:
            continue
        seen.add(current)
        if current.name in ("linear", "addmm") or "projection" in current.facts:
            return current
        if "product" in current.facts and current is not node:
            continue
        todo.extend(i for i in current.inputs if i.leaf is None)
        if len(seen) > 200:
            return None
    return None


def hidden_of(projection: Node) -> Node | None:
    """The hidden states that a projection reads, with their batch axis apart."""
    data = [i for i in projection.inputs if i.leaf is None or i.leaf.startswith("argument")]
    data = [i for i in data if i.origins] or data
    node = data[0] if data else None
    while node is not None and len(node.shape) < 3 and (node.name in MOVES or node.name in COPIES) and node.inputs:
        node = node.inputs[0]
    return node


def samples_of(node: Node, batch: int | None) -> Tensor | None:
    projection = projection_of(node)
    hidden = hidden_of(projection) if projection is not None else None
    if hidden is None or batch is None or batch not in hidden.shape[:-1]:
        return None
    axis = list(hidden.shape[:-1]).index(batch)
    seed = (
        torch.arange(batch).reshape([batch if i == axis else 1 for i in range(len(hidden.shape))]).expand(hidden.shape)
    )
    return Follow({hidden: seed}).to(node)


def features_of(node: Node) -> Tensor | None:
    """The column of the projection that each entry of an operand is."""
    projection = projection_of(node)
    if projection is None or (projection.name not in ("linear", "addmm") and len(projection.shape) < 2):
        return None
    if "projection" in projection.facts:
        _, output, weight = projection.facts["projection"]
        made_new = [i for i, a in enumerate(output) if a in weight]
        if len(output) != len(projection.shape) or not made_new:
            return None
        sizes = [projection.shape[i] if i in made_new else 1 for i in range(len(output))]
        seed = torch.arange(math.prod(sizes)).reshape(sizes).expand(projection.shape)
    else:
        seed = torch.arange(projection.shape[-1]).expand(projection.shape)
    return Follow({projection: seed}).to(node)


def entries_of(node: Node, shape: torch.Size) -> Tensor | None:
    """Which entry each entry of an operand was in the projection it comes from, or in the argument where there is none."""
    source = projection_of(node) or _argument_of(node)
    if source is None:
        return None
    found = Follow({source: torch.arange(math.prod(source.shape)).reshape(source.shape)}).to(node)
    return found.reshape(shape) if found is not None and found.numel() == math.prod(shape) else None


def _argument_of(node: Node) -> Node | None:
    """The one argument of the model that an operand was moved and scaled from."""
    while node.leaf is None:
        behind = [i for i in node.inputs if i.origins]
        if len(behind) != 1:
            return None
        node = behind[0]
    return node if node.origins else None


def varies(index: Tensor, axis: int) -> bool:
    """Whether an index changes along an axis; entries of unknown origin (-1) say nothing."""
    known = index >= 0
    high = index.amax(axis, keepdim=True)
    low = torch.where(known, index, high).amin(axis, keepdim=True)
    return bool((high > low).any())
