"""How queries and keys are turned by tables on the way to their product (rotary positions): `after = map(position) · before`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from intently.sites.ops import CONVOLUTIONS, COPIES, FRESH, PER_POSITION, is_in_place
from intently.sites.provenance import Node

MOST_ENTRIES = 1 << 21  # of all maps of one call; larger calls are not measured
_EXACT = 1e-4  # tables are often made in float32
_FARTHEST = 300  # nodes between a product and the projections


@dataclass(frozen=True)
class Rotation:
    """The linear map of every row of queries (or keys): `maps[batch, heads, position, after, before]`.

    A map holds whatever is done to a row on its way: turned pairs, features left alone, a factor.
    """

    maps: Tensor

    @cached_property
    def shapes(self) -> Tensor:
        """The maps without the factor of their row, which may go by position (a temperature)."""
        return self.maps / self.maps.flatten(-2).norm(dim=-1)[..., None, None].clamp_min(1e-300)

    def varies(self, axis: int) -> bool:
        """Whether rows are turned differently along an axis: 0 batch, 1 heads, 2 positions."""
        first = self.shapes.narrow(axis, 0, 1)
        return bool(((self.shapes - first).abs() > _EXACT).any())

    @property
    def turns(self) -> bool:
        """Whether any two features are mixed."""
        mixed = self.shapes - torch.diag_embed(self.shapes.diagonal(dim1=-2, dim2=-1))
        return bool((mixed.abs() > _EXACT).any())

    def step(self, axis: int) -> Tensor | None:
        """`[width, width]`: what turns a row into its next along an axis, where that is the same all along; None elsewhere."""
        along = self.maps.movedim(axis, 0)[:, 0, 0] if axis != 2 else self.maps[0, 0]
        along = torch.stack([m for i, m in enumerate(along) if i == 0 or not torch.equal(m, along[i - 1])])
        if len(along) < 2:
            return None
        turns = along[1:] @ torch.linalg.inv(along[:-1])
        return turns[0] if bool(((turns - turns[0]).abs() < 10 * _EXACT).all()) else None

    @property
    def keeps_norm(self) -> bool:
        """Whether every row keeps the norm of each of its pairs, up to a factor that is the same at every position."""
        return spread(self.shapes.mT @ self.shapes) <= _EXACT


def meeting(query: Rotation, key: Rotation) -> float:
    """How much a query and a key at one position meet differently at other positions: 0 where only distance counts."""
    return spread(query.shapes.mT @ key.shapes)


def spread(maps: Tensor) -> float:
    """The largest difference of maps along the positions, each taken relative to its size."""
    whole = maps / maps.flatten(-2).norm(dim=-1)[..., None, None].clamp_min(1e-300)
    return float((whole - whole[:, :, :1]).abs().amax())


def measured(operand: Node, rows: Callable[[Tensor], Tensor], width: int) -> Callable[[], Rotation | None]:
    """A question that is answered when it is asked: the rotation of an operand, None where no table is met or none can be told.

    `rows` lays something shaped like the operand out as `[batch, heads, position, width]`.
    """

    @cache
    def answer() -> Rotation | None:
        start = _before(operand, width)
        if start is None:
            return None
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                return _measure(operand, start, rows, width)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError):
            return None  # a step that cannot be done again

    return answer


def _measure(operand: Node, start: Node, rows: Callable[[Tensor], Tensor], width: int) -> Rotation | None:
    def after(content: Tensor) -> Tensor:
        return rows(_again(operand, start, content.reshape(start.shape))).double()

    blocks = start.shape.numel() // width
    plain = after(torch.ones(blocks, width, dtype=torch.float64))
    if plain.numel() * width > MOST_ENTRIES:
        return None
    numbered = after(torch.arange(1.0, blocks + 1, dtype=torch.float64)[:, None].expand(blocks, width).contiguous())
    # Every entry of a row that was filled with one number holds a multiple of it: that of the same row filled with 1.
    best = plain.abs().argmax(-1, keepdim=True)
    number = (numbered.gather(-1, best) / plain.gather(-1, best)).squeeze(-1)
    block = number.round()
    if not bool(((number - block).abs() < 0.1).all()):
        return None
    block = block.long() - 1
    maps = torch.empty(*plain.shape, width, dtype=torch.float64)
    for feature in range(width):
        unit = torch.zeros(blocks, width, dtype=torch.float64)
        unit[:, feature] = 1
        maps[..., feature] = after(unit)
    generator = torch.Generator().manual_seed(0)
    content = torch.randn(blocks, width, generator=generator, dtype=torch.float64)
    expected = (maps @ content[block][..., None]).squeeze(-1)
    found = after(content)
    if not bool(((expected - found).abs() <= _EXACT * found.abs().amax()).all()):
        return None  # no linear map of each row alone
    return Rotation(maps)


# -- the way from the projection to the product ---------------------------------------------------------------------


def _before(operand: Node, width: int) -> Node | None:
    """The last node that everything in the operand comes through and that no table has touched yet."""
    depth = _depths(operand)
    found: Node | None = None
    frontier, touched = {operand}, False
    for _ in range(_FARTHEST):
        if len(frontier) == 1 and touched:
            only = next(iter(frontier))
            if only.shape and only.shape[-1] % width == 0:
                found, touched = only, False
        node = max(frontier, key=lambda n: depth.get(n, 0))
        if _is_source(node):
            return found
        touched = touched or _meets_table(node)
        frontier.discard(node)
        frontier |= set(_content(node))
        if not frontier:
            return found
    return found


def _depths(operand: Node) -> dict[Node, int]:
    """The longest way from a source to each node behind an operand."""
    depth: dict[Node, int] = {}
    stack = [operand]
    while stack and len(depth) < _FARTHEST:
        node = stack[-1]
        behind = [] if _is_source(node) else list(_content(node))
        waiting = [n for n in behind if n not in depth]
        if waiting:
            stack.extend(waiting)
            continue
        depth[node] = 1 + max((depth[n] for n in behind), default=0)
        stack.pop()
    return depth


def _content(node: Node) -> Iterator[Node]:
    """The inputs whose entries become this node's; a tensor that only lends its type or shape is none."""
    lends = node.name in COPIES or node.name.endswith("_as")
    for source in node.inputs[:1] if lends else node.inputs:
        if "held" not in source.facts and source.origins and source.name not in FRESH:
            yield source


def _is_source(node: Node) -> bool:
    """Where tables end: a projection, a norm, an argument, or a step that cannot be done again."""
    if node.leaf is not None or node.name in PER_POSITION or node.name in CONVOLUTIONS:
        return True
    if "projection" in node.facts or "product" in node.facts:
        return True
    return node.call is None and node.name not in COPIES and node.name not in FRESH


def _meets_table(node: Node) -> bool:
    return any("held" in n.facts and n.shape.numel() > 1 and not _is_learned(n) for n in node.inputs)


def _is_learned(table: Node) -> bool:
    """Whether a table is a parameter as it is: nothing is meant by its numbers. Learned frequencies are, once waves."""
    stack, seen = [table], set()
    while stack:
        node = stack.pop()
        if node in seen or node.name in ("cos", "sin", "polar", "exp", "sincos"):
            continue
        seen.add(node)
        if node.leaf is not None and node.leaf.startswith("parameter:"):
            return True
        stack.extend(node.inputs)
    return False


def _again(operand: Node, start: Node, content: Tensor) -> Tensor:
    """The steps from `start` to `operand` done again on other content."""
    done: dict[Node, Tensor] = {start: content}

    def value(node: Node) -> Tensor:
        if node not in done:
            done[node] = step(node)
        return done[node]

    def step(node: Node) -> Tensor:
        if "held" in node.facts:
            held: Tensor = node.facts["held"]
            return held.double() if held.is_floating_point() else held
        if node.name in FRESH:
            return torch.zeros(node.shape, dtype=torch.float64)
        if node.name in COPIES:
            return value(node.inputs[0])
        if node.call is None:
            raise ValueError(f"{node.name} cannot be done again")
        changes = is_in_place(node.call.func)
        result = node.call.replay(lambda n: value(n).clone() if changes else value(n))
        if node.index is not None:
            result = result[node.index]
        if result is None:  # an assignment returns nothing
            target = node.call.args[0]
            changed = value(target).clone()
            node.call.func(changed, *[value(a) if isinstance(a, Node) else a for a in node.call.args[1:]])
            result = changed
        return result.reshape(node.shape)

    return value(operand)
