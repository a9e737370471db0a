"""Which call made each tensor: a graph of nodes, grown while the model runs, that holds shapes and not values."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from intently.sites.ops import COPIES, MOVES, NORMS, PER_POSITION, REDUCTIONS, SCATTERS

# Whether a tensor is seen from inside vmap or another transform of functions.
_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore

_numbers = itertools.count()


class Node:
    """One tensor: the call that made it and the nodes it was made from.

    `origins` are the model's arguments that reach it. `call` replays a move on another tensor. `value` is kept for
    single numbers only, so that scale factors can be read; `leaf` names an argument, a parameter or a constant. What a
    node was made from has a smaller `number`.
    """

    __slots__ = ("call", "facts", "index", "inputs", "leaf", "name", "number", "origins", "shape", "value")

    def __init__(
        self,
        name: str,
        inputs: tuple[Node, ...],
        shape: torch.Size,
        origins: frozenset[str],
        *,
        call: Call | None = None,
        index: int | None = None,
        leaf: str | None = None,
        value: float | None = None,
    ):
        self.name = name
        self.inputs = inputs
        self.shape = shape
        self.origins = origins
        self.call = call
        self.index = index
        self.leaf = leaf
        self.value = value
        self.facts: dict[str, Any] = {}
        self.number = next(_numbers)

    def __repr__(self) -> str:
        return f"<{self.leaf or self.name} {list(self.shape)}>"


class Call:
    """A recorded call; tensors among its arguments are held as nodes, index tensors as themselves."""

    __slots__ = ("args", "func", "kwargs")

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        self.func = func
        self.args = args
        self.kwargs = kwargs

    def replay(self, stand_in: Callable[[Node], Tensor]) -> Any:
        """The call again, each node replaced by `stand_in(node)`."""

        def swap(value: Any) -> Any:
            if isinstance(value, Node):
                return stand_in(value)
            if isinstance(value, (list, tuple)) and any(isinstance(v, (Node, list, tuple)) for v in value):
                return type(value)(swap(v) for v in value)
            return value

        return self.func(*swap(self.args), **{k: swap(v) for k, v in self.kwargs.items()})


class Provenance:
    """Finds the node of a tensor. Holds tensors weakly: tracing keeps nothing alive that the model lets go."""

    def __init__(self) -> None:
        self._nodes: dict[int, tuple[weakref.ref[Tensor], Node]] = {}
        self.unseen: list[torch.Size] = []  # shapes of floating tensors that no seen call made

    def of(self, tensor: Tensor) -> Node:
        """The node of `tensor`; one never seen before is a constant."""
        held = self._nodes.get(id(tensor))
        if held is not None and held[0]() is tensor:
            return held[1]
        base = tensor._base
        if base is not None and (seen := self._nodes.get(id(base))) and seen[0]() is base:
            return self.put(tensor, Node("alias", (seen[1],), tensor.shape, seen[1].origins))
        if tensor.is_floating_point() and tensor.dim() > 1:
            self.unseen.append(tensor.shape)
        return self.put(tensor, Node("constant", (), tensor.shape, frozenset(), leaf="constant", value=_number(tensor)))

    def put(self, tensor: Tensor, node: Node) -> Node:
        """Record that `node` describes `tensor` from now on (a call in place gives its tensor a new node)."""
        key = id(tensor)
        nodes = self._nodes
        nodes[key] = (weakref.ref(tensor, lambda _, k=key: nodes.pop(k, None)), node)
        return node

    def leaf(self, tensor: Tensor, name: str, *, argument: str | None = None) -> Node:
        """Name a tensor that enters from outside: an argument of the model, a parameter or a buffer."""
        origins = frozenset({argument}) if argument else frozenset()
        value = None if argument else _number(tensor)
        return self.put(tensor, Node(name, (), tensor.shape, origins, leaf=name, value=value))


def _number(tensor: Tensor) -> float | None:
    plain = tensor.numel() == 1 and tensor.device.type != "meta" and not tensor.is_complex()
    plain = plain and not _is_wrapped(tensor)  # inside vmap nothing has one value
    return float(tensor.detach()) if plain else None


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Every tensor among (possibly nested) arguments, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(value))
        elif isinstance(value, dict):
            found.extend(tensors_in(value.values()))
    return found


class Follow:
    """Follows index tensors through the graph: seeded at some nodes, it tells what each entry of a later node came from.

    Moves are replayed; elementwise calls and norms keep the index of their first followed input; a projection of one token keeps
    the index only where the whole token shares it. `None` means that the entries have no single origin.
    """

    def __init__(self, seeds: Mapping[Node, Tensor]):
        self._known: dict[Node, Tensor | None] = dict(seeds)
        self._first = min((seed.number for seed in seeds), default=0)

    def to(self, node: Node) -> Tensor | None:
        """Indices shaped like `node`, or None."""
        stack = [node]
        while stack:
            current = stack[-1]
            if current in self._known:
                stack.pop()
                continue
            if current.number < self._first:  # older than every seed, so made from none
                self._known[current] = None
                stack.pop()
                continue
            waiting = [i for i in current.inputs if i not in self._known]
            if waiting:
                stack.extend(waiting)
                continue
            self._known[current] = self._through(current)
            stack.pop()
        return self._known[node]

    def _through(self, node: Node) -> Tensor | None:
        followed = [i for i in node.inputs if self._known[i] is not None]
        if not followed or node.name in SCATTERS:
            return None
        if node.name in MOVES:
            return self._replay(node)
        first = self._known[followed[0]]
        assert first is not None
        if node.name in NORMS and first.shape == node.shape:
            return first  # each entry stays where it is
        if node.name == "view_as_complex":
            return first[..., 0]
        if node.name == "view_as_real":
            return first.unsqueeze(-1).expand(node.shape)
        if node.name in PER_POSITION or node.facts.get("projection"):
            if tuple(first.shape[:-1]) != tuple(node.shape[:-1]) or (first != first[..., :1]).any():
                return None
            return first[..., :1].expand(node.shape)
        if node.name in REDUCTIONS and node.shape != first.shape:
            return None
        return _broadcast(first, node.shape)

    def _replay(self, node: Node) -> Tensor | None:
        if node.call is None or node.name == "as_strided":
            return None  # strides speak of memory, which an index tensor does not share

        def stand_in(n: Node) -> Tensor:
            known = self._known.get(n)
            # `view` wants contiguous memory; what it means is told by the logical order alone.
            return known.contiguous() if known is not None else torch.full(n.shape, -1)

        try:
            result = node.call.replay(stand_in)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        if node.index is not None:
            result = result[node.index]
        return result if isinstance(result, Tensor) and result.shape == node.shape else None


def _broadcast(index: Tensor, shape: torch.Size) -> Tensor | None:
    try:
        return index.expand(shape)
    except RuntimeError:
        return index.reshape(shape) if index.numel() == shape.numel() else None


def is_weight(node: Node) -> bool:
    """True for a parameter, moved or cast at most: the fixed side of a projection.

    A matrix that no argument and no call made counts as one: functions keep their weights in dictionaries and closures.
    """
    while True:
        if node.leaf is not None:
            return node.leaf.startswith(("parameter:", "buffer:")) or (node.leaf == "constant" and len(node.shape) == 2)
        if node.name not in MOVES and node.name not in COPIES and node.name != "alias":
            return False
        if not node.inputs:
            return False
        node = node.inputs[0]
