"""Numbers on the way: factors put on queries and keys before their product, norms, learned factors, softcaps after it."""

from __future__ import annotations

import math

from intently.sites.ops import CONVOLUTIONS, NORMS, PER_POSITION
from intently.sites.provenance import Node


def path_factor(node: Node) -> tuple[float, bool, bool]:
    """Numbers multiplied in on the way from the projection to an operand; whether it is normed; whether a parameter scales it."""
    factor, normed, learned = 1.0, False, False
    seen: set[Node] = set()
    while node is not None and node not in seen and node.leaf is None:
        seen.add(node)
        if node.name in NORMS:
            normed = True
        if (
            node.name in PER_POSITION
            or node.name in CONVOLUTIONS
            or "projection" in node.facts
            or "product" in node.facts
        ):
            break
        if node.name in ("mul", "div") and node.call is not None:
            number, parameter = _number_in(node)
            if number is not None:
                factor *= number if node.name == "mul" else (1 / number if number else math.inf)
                learned = learned or parameter
            else:
                others = [i for i in node.inputs[1:] if i.leaf is None]
                normed = normed or any(_is_norm(i) for i in others)
                learned = learned or any(i.leaf is not None and i.leaf.startswith("parameter") for i in node.inputs[1:])
        node = next((i for i in node.inputs if i.leaf is None and i.origins), node.inputs[0] if node.inputs else None)  # type: ignore[assignment]
    return factor, normed, learned


def _number_in(node: Node) -> tuple[float | None, bool]:
    assert node.call is not None
    for value in node.call.args:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value), False
        if isinstance(value, Node) and value.value is not None and value.shape.numel() == 1:
            return value.value, bool(value.leaf and value.leaf.startswith("parameter"))
    return None, False


def _is_norm(node: Node, depth: int = 6) -> bool:
    if node.name in ("rsqrt", "sqrt", "norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "std"):
        return True
    return depth > 0 and any(_is_norm(i, depth - 1) for i in node.inputs if i.leaf is None)


def softcap_after(node: Node, stop: Node) -> tuple[float | None, bool]:
    """A softcap (`c · tanh(x / c)`) and learned factors between the product and the softmax."""
    cap, learned, outer = None, False, 1.0
    seen: set[Node] = set()
    while node is not stop and node not in seen:
        seen.add(node)
        if node.name == "tanh":
            cap = outer
        if node.name == "mul" and node.call is not None:
            number, parameter = _number_in(node)
            if number is not None and cap is None:
                outer = number
            learned = (
                learned or parameter or any(i.leaf is not None and i.leaf.startswith("parameter") for i in node.inputs)
            )
        chain = [i for i in node.inputs if "score" in i.facts or i is stop]
        if not chain:
            break
        node = chain[0]
    return cap, learned
