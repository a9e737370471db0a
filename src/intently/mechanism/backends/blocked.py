"""The backend for long sequences: queries a block at a time, each block against only the keys its mask lets it reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from intently.masks import Mask
from intently.mechanism.backends.fused import by_fused, fused_obstacle
from intently.mechanism.backends.stages import by_stages
from intently.mechanism.door import Inputs, cut, own_precision, transformed

BLOCK = 128
"""Queries in a block: few enough that a window of some hundred keys is not drowned in its own corners."""

BUDGET = 2**25
"""Bytes that the plane of one block may take; a block has fewer queries where `BLOCK` of them would need more."""


def by_blocks(inputs: Inputs) -> Tensor:
    """Attention block by block; memory grows with the length, in the backward pass too, for it redoes each block."""
    plan = blocks(inputs)
    if not plan:  # no queries, so nothing to cut
        return by_stages(inputs)
    given = inputs.query, inputs.key, inputs.value, inputs.mask, inputs.sample_of_bias(), inputs.sink
    if torch.compiler.is_compiling() or transformed(*(each for each in given if isinstance(each, Tensor))):
        # Graphs and torch.func know no loop that writes in place; there a block keeps its plane for the backward pass.
        return torch.cat([_attend(inputs.block(rows, columns)) for rows, columns in plan], dim=-2)
    if _learned(inputs):
        pieces = [checkpoint(_block_by_block, inputs, [part], use_reentrant=False) for part in plan]
        return torch.cat(pieces, dim=-2)
    tensors = (
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.bias if isinstance(inputs.bias, Tensor) else None,
        inputs.sink,
    )
    return _RedoneInBackward.apply(*tensors, inputs, plan) if inputs.differentiable() else _block_by_block(inputs, plan)


def _learned(inputs: Inputs) -> bool:
    """Whether the bias is a rule that learns: only autograd knows what parameters it asks."""
    bias = inputs.sample_of_bias() if callable(inputs.bias) else None
    return bias is not None and bias.requires_grad and torch.is_grad_enabled()


def _block_by_block(inputs: Inputs, plan: list[tuple[range, range]]) -> Tensor:
    """The outputs of consecutive blocks in one tensor, made beforehand.

    Small results kept between large temporaries would leave the heap with holes that no later temporary fits.
    """
    first = plan[0][0].start
    if len(plan) == 1:
        return _attend(inputs.block(*plan[0]))
    room = inputs.value.new_empty(*inputs.query.shape[:-2], plan[-1][0].stop - first, inputs.value.shape[-1])
    for rows, columns in reversed(plan):  # the largest first, in a triangle: what it leaves behind fits the others
        room[..., rows.start - first : rows.stop - first, :] = _attend(inputs.block(rows, columns))
    return room


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


class _RedoneInBackward(torch.autograd.Function):
    """Blocks whose planes are forgotten and made again for the backward pass, where gradients are summed in place."""

    @staticmethod
    def forward(ctx, query, key, value, bias, sink, inputs, plan):
        ctx.save_for_backward(query, key, value, bias, sink)
        ctx.inputs, ctx.plan = inputs, plan
        ctx.random = (torch.get_rng_state(), get_device_states(query)) if inputs.dropout else None
        return _block_by_block(inputs, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = ctx.saved_tensors
        # Many small gradients meet in one place: half precision would lose them.
        sums = [
            torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) if needed else None
            for each, needed in zip(tensors, ctx.needs_input_grad, strict=False)
        ]
        with own_precision(tensors[0]), _as_in_forward(ctx.random):
            for rows, columns in reversed(ctx.plan):  # as in the forward pass, which draws what dropout drops
                _add_gradients(ctx.inputs, tensors, sums, rows, columns, gradient)
        found = [None if total is None else total.to(each.dtype) for each, total in zip(tensors, sums, strict=True)]
        return *found, None, None


def _add_gradients(
    inputs: Inputs,
    tensors: Sequence[Tensor | None],
    sums: Sequence[Tensor | None],
    rows: range,
    columns: range,
    gradient: Tensor,
) -> None:
    leaves = [
        None if piece is None else piece.detach().requires_grad_(total is not None)
        for piece, total in zip(_pieces(tensors, rows, columns), sums, strict=True)
    ]
    query, key, value, bias, sink = leaves
    with torch.enable_grad():
        block = replace(
            inputs,
            query=query,
            key=key,
            value=value,
            mask=inputs.seen(rows, columns),
            causal=False,
            bias=inputs.added(rows, columns) if bias is None else bias,
            sink=sink,
        )
        output = _attend(block)
    if not output.requires_grad:  # nothing is within reach
        return
    wanted = [
        (leaf, total)
        for leaf, total in zip(leaves, _pieces(sums, rows, columns), strict=True)
        if leaf is not None and total is not None
    ]
    found = torch.autograd.grad(
        output, [leaf for leaf, _ in wanted], gradient[..., rows.start : rows.stop, :], allow_unused=True
    )
    for (_, total), part in zip(wanted, found, strict=True):
        if part is not None:
            total.add_(part)


def _pieces(tensors: Sequence[Tensor | None], rows: range, columns: range) -> list[Tensor | None]:
    """What a block reads of query, key, value, bias and sink; views, so that sums can be added to."""
    query, key, value, bias, sink = tensors
    return [
        None if query is None else query[..., rows.start : rows.stop, :],
        None if key is None else key[..., columns.start : columns.stop, :],
        None if value is None else value[..., columns.start : columns.stop, :],
        None if bias is None else cut(bias, rows, columns),
        sink,
    ]


@contextmanager
def _as_in_forward(states: tuple[Tensor, tuple[list[int], list[Tensor]]] | None) -> Iterator[None]:
    """The random numbers of the forward pass once more, so that the same weights are dropped."""
    if states is None:
        yield
        return
    host, (devices, held) = states
    with torch.random.fork_rng(devices):
        torch.set_rng_state(host)
        set_device_states(devices, held)
        yield
