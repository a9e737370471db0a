"""How a model's own axes map to `[batch, heads, query, key]`, there and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from intently.sites.contraction import Contraction
from intently.sites.trace_types import Sizes


@dataclass(frozen=True)
class Layout:
    """How the model's axes map to `[batch, heads, query, key]`.

    `order[batch, head]` is the position among the flattened leading axes (everything but query and key).
    """

    order: Tensor
    perm: tuple[int, ...]  # weights' axes: leading ones, query, key
    shape: torch.Size  # of the weights in the model's layout, permuted
    squeezed_query: bool
    output_axes: Callable[[torch.Size], tuple[Tensor | None, Tensor, Tensor] | None]

    def canonical(self, tensor: Tensor) -> Tensor:
        """Weights-shaped tensor to `[batch, heads, query, key]`."""
        moved = tensor.permute(self.perm)
        if self.squeezed_query:
            moved = moved.unsqueeze(-2)
        flat = moved.reshape(-1, *moved.shape[-2:])
        return flat[self.order]

    def native(self, tensor: Tensor) -> Tensor:
        """Back from `[batch, heads, query, key]`."""
        flat = torch.empty(self.order.numel(), *tensor.shape[-2:], dtype=tensor.dtype, device=tensor.device)
        flat[self.order.flatten()] = tensor.reshape(-1, *tensor.shape[-2:])
        shaped = flat.reshape(self.shape)
        inverse = [self.perm.index(i) for i in range(len(self.perm))]
        return shaped.permute(inverse)

    def output_index(self, shape: torch.Size) -> tuple[Tensor | None, Tensor, Tensor] | None:
        """For every entry of the output: its column of the value projection, where known, its query and its sample."""
        return self.output_axes(shape)


def query_axis(free: Sequence[str], made: Contraction, sizes: Sizes, keys: int) -> str | None:
    if not free:
        return None
    for wanted in (lambda a: made.size(a) in sizes.lengths, lambda a: made.size(a) == keys):
        chosen = [a for a in free if wanted(a)]
        if chosen:
            return chosen[-1]
    return free[-1]


def is_folded(queries: int, sizes: Sizes) -> bool:
    """Whether a query axis holds several heads of each position: a multiple of a stream's length that is none itself."""
    return queries not in sizes.lengths and any(n > 1 and queries % n == 0 for n in sizes.lengths)


def order_of(lead: Sequence[int], batch: int | None, batch_of: Tensor | None, head_of: Tensor | None = None) -> Tensor:
    """Positions of the flattened leading axes as `[batch, head]`.

    `batch_of` and `head_of` name the sample and the head of each position where they are known. Leading axes that are
    neither (windows, blocks, a second axis of a grid) count as samples, each with all its heads.
    """
    total = math.prod(lead)
    flat = torch.arange(total)
    if batch_of is not None and batch_of.numel() == total:
        samples, counts = torch.unique(batch_of, return_counts=True)
        if (counts == counts[0]).all() and (samples >= 0).all() and _whole(head_of, batch_of):
            return torch.stack([flat[batch_of == s] for s in samples])
    if head_of is not None and head_of.numel() == total:
        heads, counts = torch.unique(head_of, return_counts=True)
        if (counts == counts[0]).all() and (batch is None or int(counts[0]) % batch == 0):
            return torch.stack([flat[head_of == h] for h in heads], 1)
    if batch is not None and batch in lead:
        axis = list(lead).index(batch)
        return flat.reshape(tuple(lead)).movedim(axis, 0).reshape(batch, -1)
    if batch is not None and total % batch == 0:
        return flat.reshape(batch, -1)
    if len(lead) > 1:
        return flat.reshape(lead[0], -1)
    return flat.reshape(1, -1)


def _whole(head_of: Tensor | None, batch_of: Tensor) -> bool:
    """Whether each sample has each head once, or heads are not known."""
    if head_of is None or head_of.numel() != batch_of.numel():
        return True
    return torch.unique(torch.stack([batch_of, head_of]), dim=1).shape[1] == batch_of.numel()


def output_axes(
    made: Contraction,
    value: int,
    query: str | None,
    lead: Sequence[str],
    order: Tensor | None,
    features: Tensor | None,
    key: str,
) -> Callable[[torch.Size], tuple[Tensor | None, Tensor, Tensor] | None]:
    """For every entry of the output: the column of the value projection that it is, its query and its sample.

    `order` is given where its rows are the samples; `features` are those columns laid out like the values; None where they are not known.
    """

    def positions(shape: torch.Size) -> tuple[Tensor | None, Tensor, Tensor] | None:
        sizes = [made.size(a) for a in made.output]
        if math.prod(sizes) != math.prod(shape):
            return None

        def spread(axes: Sequence[str], values: Tensor) -> Tensor:
            """An index over some axes, laid out over the output's axes."""
            arranged = values.permute([list(axes).index(a) for a in made.output if a in axes])
            held = iter(arranged.shape)
            return arranged.reshape([next(held) if a in axes else 1 for a in made.output]).expand(sizes)

        token = spread([query], torch.arange(made.size(query))) if query else torch.zeros(sizes, dtype=torch.long)
        token = token.reshape(shape).clone()
        sample = torch.zeros(sizes, dtype=torch.long)
        lead_sizes = [made.size(a) for a in lead]
        if order is not None and order.numel() == math.prod(lead_sizes) and all(a in made.output for a in lead):
            sample_at = torch.empty(order.numel(), dtype=torch.long)
            sample_at[order] = torch.arange(order.shape[0])[:, None].expand(order.shape)
            sample = spread(lead, sample_at.reshape(lead_sizes))
        sample = sample.reshape(shape).clone()
        axes = list(made.labels[value])
        if features is None or features.numel() != made.operands[value].numel():
            return None, token, sample
        first = features.reshape(made.operands[value].shape).select(axes.index(key), 0)
        axes.remove(key)
        if any(a not in made.output for a in axes):
            return None, token, sample
        return spread(axes, first).reshape(shape).clone(), token, sample

    return positions


def restorer(
    made: Contraction,
    lead: Sequence[str],
    query: str | None,
    order: Tensor,
    lead_sizes: Sequence[int],
    columns: Sequence[str],
) -> Callable[[Tensor], Tensor] | None:
    """From `[batch, heads, query, value width]` to the model's layout; None where the output has no place for each head."""
    if any(a not in made.output for a in lead):
        return None

    def restore(output: Tensor) -> Tensor:
        flat = torch.empty(order.numel(), *output.shape[-2:], dtype=output.dtype)
        flat[order.flatten()] = output.reshape(-1, *output.shape[-2:])
        named = [*lead, *([query] if query else []), *columns]
        column_sizes = [made.size(a) for a in columns]
        queries = [output.shape[-2]] if query else []
        shaped = flat.reshape(*lead_sizes, *queries, *column_sizes)
        wanted = [a for a in made.output if a in named]
        return shaped.permute([named.index(a) for a in wanted])

    return restore


def value_rows(
    made: Contraction, value: int, key: str, lead: Sequence[str], order: Tensor, columns: Sequence[str]
) -> Tensor | None:
    """The values as `[batch, heads, key, width]`, heads that share them repeated."""
    tensor, axes = made.operands[value], list(made.labels[value])
    if set(axes) - {key, *lead, *columns}:
        return None
    wanted = [a for a in lead if a in axes]
    moved = tensor.permute([axes.index(a) for a in [*wanted, key, *columns]])
    shape = [made.size(a) if a in axes else 1 for a in lead]
    held = [tensor.shape[axes.index(a)] if a in axes else 1 for a in lead]
    moved = moved.reshape(*held, moved.shape[len(wanted)], -1)
    moved = moved.expand(*[made.size(a) for a in lead] if lead else [], *moved.shape[-2:]) if shape else moved
    return moved.reshape(-1, *moved.shape[-2:])[order]
