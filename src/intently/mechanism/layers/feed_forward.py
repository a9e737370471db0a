"""Feed-forward: what each position computes by itself, between two rounds of attention."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from intently._typing import Float

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    """`outer(activation(inner(states)))`, the same at every position.

    Args:
        model: width of a representation.
        hidden: width in between.
        activation: elementwise; `torch.nn.functional.gelu` when left out.
        bias: whether the two linear layers have one.
        dropout: probability of dropping a hidden feature, in training mode only.

    Source: Vaswani et al. 2017, section 3.3 (there with ReLU).

    >>> import torch
    >>> FeedForward(8, 32)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self, model: int, hidden: int, activation: Activation = F.gelu, *, bias: bool = True, dropout: float = 0.0
    ):
        super().__init__()
        self.inner = nn.Linear(model, hidden, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(hidden, model, bias=bias)

    def forward(self, states: Float[Tensor, "*batch length model"]) -> Float[Tensor, "*batch length model"]:
        """Transform every position by itself."""
        return self.outer(self.dropout(self.activation(self.inner(states))))


class GatedFeedForward(nn.Module):
    """`outer(activation(gate(states)) * inner(states))`: SwiGLU with `silu`, GEGLU with `gelu`.

    Args:
        model: width of a representation.
        hidden: width in between; two thirds of a plain layer's cost the same.
        activation: elementwise; `torch.nn.functional.silu` when left out.
        bias: whether the three linear layers have one.
        dropout: probability of dropping a hidden feature, in training mode only.

    Source: Shazeer 2020, arXiv 2002.05202.

    >>> import torch
    >>> GatedFeedForward(8, 24)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self, model: int, hidden: int, activation: Activation = F.silu, *, bias: bool = False, dropout: float = 0.0
    ):
        super().__init__()
        self.gate = nn.Linear(model, hidden, bias=bias)
        self.inner = nn.Linear(model, hidden, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(hidden, model, bias=bias)

    def forward(self, states: Float[Tensor, "*batch length model"]) -> Float[Tensor, "*batch length model"]:
        """Transform every position by itself."""
        return self.outer(self.dropout(self.activation(self.gate(states)) * self.inner(states)))
