"""The two layouts of rotary positions, converted into one another: in the weights, once, not in the states, at every call."""

from __future__ import annotations

import torch
from torch import Tensor

from intently._typing import Shaped
from intently.mechanism.door import show


def interleaved_to_half(
    weight: Shaped[Tensor, "*rows"], heads: int, *, width: int | None = None
) -> Shaped[Tensor, "*rows"]:
    """Reorder the rows of a query or key projection made for the interleaved layout to serve the half layout.

    Within each head row 2p goes to p and row 2p + 1 to p + width/2. Queries and keys need it both; values and the output
    projection stay as they are. Scores do not change, for both sides of each dot product are reordered alike.

    Args:
        weight: `[heads * head_width, model]` as in `torch.nn.Linear`, or its bias `[heads * head_width]`.
        heads: number of heads; for keys the number of kv heads.
        width: rotated features of a head, when the rotation is partial; all when left out.

    Raises:
        ValueError: rows that do not split into heads, or a width that is odd or beyond the head's.

    >>> import torch
    >>> interleaved_to_half(torch.arange(4.0), heads=1)
    tensor([0., 2., 1., 3.])
    """
    order = _half_order("interleaved_to_half", weight, heads, width)
    return weight.unflatten(0, (heads, -1))[:, order].flatten(0, 1)


def half_to_interleaved(
    weight: Shaped[Tensor, "*rows"], heads: int, *, width: int | None = None
) -> Shaped[Tensor, "*rows"]:
    """Undo `interleaved_to_half`: row p of each head goes to 2p and row p + width/2 to 2p + 1.

    >>> import torch
    >>> half_to_interleaved(torch.tensor([0.0, 2.0, 1.0, 3.0]), heads=1)
    tensor([0., 1., 2., 3.])
    """
    order = _half_order("half_to_interleaved", weight, heads, width)
    return weight.unflatten(0, (heads, -1))[:, order.argsort()].flatten(0, 1)


def _half_order(where: str, weight: Tensor, heads: int, width: int | None) -> Tensor:
    features = weight.shape[0] if weight.dim() else 0
    if heads < 1 or features % heads or not features:
        raise ValueError(
            f"{where}: {show(weight)} has {features} rows, which do not split into {heads} heads; "
            "rows are the output features of the projection. For keys of grouped heads pass the number of kv heads"
        )
    head_width = features // heads
    width = head_width if width is None else width
    if width % 2 or not 2 <= width <= head_width:
        raise ValueError(f"{where}: width is {width}; an even number from 2 to the head's width {head_width} is needed")
    order = torch.arange(head_width, device=weight.device)
    return torch.cat([order[0:width:2], order[1:width:2], order[width:]])
