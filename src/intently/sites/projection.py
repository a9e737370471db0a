"""How queries, keys and values of a call were made from hidden states, and what they would be made from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from intently.sites.contraction import Contraction
from intently.sites.origin import projection_of
from intently.sites.provenance import Node

_ALIKE = 1e-9  # relative; in half and single precision columns are told apart by more
_FACT = "made by"


@dataclass(frozen=True)
class Projection:
    """A projection that was seen: the hidden states that it read, and itself, `[batch, position, width]` to `[…, column]`."""

    read: Tensor
    again: Callable[[Tensor], Tensor]

    def hidden(self, samples: int) -> Tensor | None:
        """What was read, `[batch, position, width]`."""
        read = self.read.detach()
        if read.dim() == 2 and read.shape[0] % samples == 0:
            return read.reshape(samples, -1, read.shape[-1])
        if read.dim() != 3 or samples not in read.shape[:2]:
            return None
        return read if read.shape[0] == samples else read.transpose(0, 1)

    def remade(self, operand: Tensor, other: Tensor) -> Tensor | None:
        """`operand` (`[batch, heads, position, width]`) as it would be, had the projection read other hidden states.

        None where it is more than columns of the projection: a norm or a rotation came after it.
        """
        hidden = self.hidden(operand.shape[0])
        if hidden is None or other.shape[-1] != hidden.shape[-1] or hidden.shape[1] != operand.shape[2]:
            return None
        with torch.no_grad():
            made, anew = self.again(hidden), self.again(other.detach().to(hidden.dtype))
        rows = operand.detach().transpose(1, 2).flatten(2).flatten(0, 1)
        columns = torch.cdist(
            rows.T.double(), made.flatten(0, 1).T.double(), compute_mode="donot_use_mm_for_euclid_dist"
        )
        nearest = columns.min(1)
        tolerance = _ALIKE if operand.dtype == torch.float64 else 1e-3
        if float(nearest.values.amax()) > tolerance * float(rows.norm(dim=0).amax().clamp_min(1e-30)):
            return None
        batch, heads, _, width = operand.shape
        return anew[..., nearest.indices].reshape(batch, other.shape[1], heads, width).transpose(1, 2)


def remember(node: Node, name: str, args: Any, kwargs: Any, made: Contraction | None) -> None:
    """Keep at the node of a projection what it read and how to make it again."""
    if name == "linear":
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        read = args[0] if args else kwargs["input"]
        node.facts[_FACT] = Projection(read, lambda x: F.linear(x, weight, bias))
    elif name == "addmm" and len(args) >= 3:
        node.facts[_FACT] = Projection(args[1], lambda x: x @ args[2] + args[0])
    elif made is not None and "projection" in node.facts and len(made.operands) == 2:
        axes, output, columns = node.facts["projection"]
        if len(axes) == 3 and len([a for a in axes if a in output]) == 2:
            node.facts[_FACT] = _contracted(made, axes, output, columns)


def _contracted(made: Contraction, axes: Any, output: Any, columns: Any) -> Projection:
    """A projection by einsum or matmul: the data's own two axes in front, the weight's behind."""
    data = made.labels.index(axes)
    kept = [a for a in axes if a in output]
    width = next(a for a in axes if a not in kept)
    order = [axes.index(a) for a in (*kept, width)]
    behind = [output.index(a) for a in (*kept, *(a for a in output if a in columns and a not in kept))]

    def again(hidden: Tensor) -> Tensor:
        back = [order.index(i) for i in range(3)]
        operands = [hidden.permute(back) if i == data else t for i, t in enumerate(made.operands)]
        return (made.compute(*operands) * made.factor).permute(behind).flatten(2)

    return Projection(made.operands[data].permute(order), again)


def projections_of(nodes: Mapping[str, Node | None]) -> Mapping[str, Projection]:
    """The projections behind some operands, by name."""
    found = {name: projection_of(node) for name, node in nodes.items() if node is not None}
    return {name: node.facts[_FACT] for name, node in found.items() if node is not None and _FACT in node.facts}
