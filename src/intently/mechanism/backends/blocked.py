"""The backend for long sequences: queries a block at a time, each block against only the keys its mask lets it reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from intently.masks import Mask
from intently.mechanism.backends.fused import by_fused, fused_obstacle
from intently.mechanism.backends.stages import by_stages
from intently.mechanism.door import Inputs, cut, transformed

BLOCK = 128
"""Queries in a block: few enough that a window of some hundred keys is not drowned in its own corners."""

BUDGET = 2**25
"""Bytes that the plane of one block may take; a block has fewer queries where `BLOCK` of them would need more."""


def by_blocks(inputs: Inputs) -> Tensor:
    """Attention block by block; memory grows with the length, in the backward pass too, for it redoes each block."""
    plan = blocks(inputs)
    if not plan:  # no queries, so nothing to cut
        return by_stages(inputs)
    # torch.func allows no hooks on what is saved; there a block keeps its plane for the backward pass.
    if not inputs.differentiable() or transformed(inputs.query, inputs.key, inputs.value):
        return torch.cat([_attend(inputs.block(rows, columns)) for rows, columns in plan], dim=-2)
    return torch.cat(_redone_in_backward(inputs, plan), dim=-2)


def blocks(inputs: Inputs) -> list[tuple[range, range]]:
    """Which queries make a block, and the keys that block may reach."""
    size = BLOCK
    while True:
        plan = []
        for start in range(0, inputs.queries, size):
            rows = range(start, min(start + size, inputs.queries))
            plan.append((rows, reach(inputs, rows)))
        largest = max([0, *(len(rows) * len(columns) for rows, columns in plan)])
        if size == 1 or largest * bytes_of_a_pair(inputs) <= BUDGET:
            return plan
        size //= 2


def reach(inputs: Inputs, rows: range) -> range:
    """The keys those queries may see at most: a mask given as a tensor is not searched."""
    if isinstance(inputs.mask, Mask):
        return inputs.mask.reach(rows, inputs.queries, inputs.keys)
    return range(inputs.keys)


def bytes_of_a_pair(inputs: Inputs) -> int:
    """Bytes that one query and one key need in the planes of all samples and heads together."""
    bias = inputs.sample_of_bias()
    streamed = fused_obstacle(inputs) is None and not inputs.dropout and not (bias is not None and bias.requires_grad)
    item = max(inputs.query.element_size(), 4)
    if not streamed:
        return item * prod(inputs.query.shape[:-2])
    mask = inputs.mask
    samples = (mask.batch or 1) * (mask.heads or 1) if isinstance(mask, Mask) else _planes(mask)
    return item * max(samples, _planes(bias))


def _planes(plane: Tensor | None) -> int:
    return 1 if plane is None else prod(plane.shape[:-2])


def _attend(block: Inputs) -> Tensor:
    return by_fused(block) if fused_obstacle(block) is None else by_stages(block)


def _redone_in_backward(inputs: Inputs, plan: list[tuple[range, range]]) -> list[Tensor]:
    # Keys are cut once, wherever a block begins or ends, and glued per block: the gradient of a plain slice is as long
    # as the sequence, and one of those for every block would make the backward pass quadratic.
    cuts = sorted({0, inputs.keys}.union(*((columns.start, columns.stop) for _, columns in plan)))
    sizes = [stop - start for start, stop in pairwise(cuts)]
    keys, values = inputs.key.split(sizes, dim=-2), inputs.value.split(sizes, dim=-2)
    lengths = [len(rows) for rows, _ in plan]
    queries = inputs.query.split(lengths, dim=-2)
    bias = inputs.bias
    if isinstance(bias, Tensor) and bias.dim() >= 2 and bias.shape[-2] > 1:
        biases = bias.split(lengths, dim=-2)
    else:
        biases = [bias] * len(plan)

    place = {at: number for number, at in enumerate(cuts)}
    outputs = []
    for (rows, columns), query, bias in zip(plan, queries, biases, strict=True):
        pieces = slice(place[columns.start], place[columns.stop])
        parts = inputs, rows, columns, query, bias, keys[pieces], values[pieces]
        outputs.append(checkpoint(_cut_and_attend, *parts, use_reentrant=False, preserve_rng_state=inputs.dropout > 0))
    return outputs


def _cut_and_attend(
    inputs: Inputs,
    rows: range,
    columns: range,
    query: Tensor,
    bias: Tensor | Callable[[range, range], Tensor] | None,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> Tensor:
    # Mask, bias by rule and glued keys are made in here, so that the backward pass makes them anew and none is kept.
    block = replace(
        inputs,
        query=query,
        key=_glue(keys, inputs.key),
        value=_glue(values, inputs.value),
        mask=inputs.seen(rows, columns),
        causal=False,
        bias=cut(bias, range(len(rows)), columns) if isinstance(bias, Tensor) else inputs.added(rows, columns),
    )
    return _attend(block)


def _glue(pieces: Sequence[Tensor], whole: Tensor) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(tuple(pieces), dim=-2) if pieces else whole[..., :0, :]
