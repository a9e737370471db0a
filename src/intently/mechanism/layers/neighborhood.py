"""Neighborhood attention as a layer: every position of a grid reads from the positions around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from intently._typing import Float
from intently.mechanism.aggregate import merge_heads
from intently.mechanism.attention import Stages
from intently.mechanism.door import show
from intently.mechanism.forms.neighborhood import Border, neighborhood_attention, neighborhood_stages
from intently.mechanism.options import Backend
from intently.mechanism.project import split_heads

State = dict[str, Tensor]
ROLES = ("query", "key", "value")


class NeighborhoodAttention(nn.Module):
    """Projections, attention in neighbourhoods with a learned bias per offset, output projection.

    Args:
        model: width of the representations.
        heads: number of heads; `model` is a multiple.
        size: keys per axis that each position sees; as many entries as the grid has axes, 1 to 3.
        dilation, causal: one for all axes, or one per axis.
        border: `"inward"` keeps the size at the border, `"clip"` cuts off.
        relative: whether a bias per head and offset is learned.
        bias: whether the four linear layers have one.
        dropout: probability of dropping a weight, in training mode only.
        backend: as in `attention`.

    Source: Hassani et al. 2022, arXiv 2204.07143, section 3; Hassani and Shi 2022, arXiv 2209.15001.

    >>> import torch
    >>> layer = NeighborhoodAttention(16, heads=4, size=(3, 3), dilation=2)
    >>> layer(torch.randn(2, 6, 7, 16)).shape
    torch.Size([2, 6, 7, 16])
    """

    def __init__(
        self,
        model: int,
        heads: int,
        *,
        size: Sequence[int],
        dilation: int | Sequence[int] = 1,
        causal: bool | Sequence[bool] = False,
        border: Border = "inward",
        relative: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ):
        super().__init__()
        if heads < 1 or model % heads:
            raise ValueError(f"NeighborhoodAttention: model {model} does not split into {heads} heads of equal width")
        self.heads = heads
        self.size = tuple(size)
        self.dilation = dilation
        self.causal = causal
        self.border: Border = border
        self.dropout = dropout
        self.backend: Backend = backend
        self.query = nn.Linear(model, model, bias=bias)
        self.key = nn.Linear(model, model, bias=bias)
        self.value = nn.Linear(model, model, bias=bias)
        self.output = nn.Linear(model, model, bias=bias)
        offsets = [2 * each - 1 for each in self.size]
        self.relative = nn.Parameter(torch.zeros(heads, *offsets)) if relative else None
        if self.relative is not None:
            nn.init.trunc_normal_(self.relative, std=0.02)

    def forward(self, states: Float[Tensor, "*batch_grid model"]) -> Float[Tensor, "*batch_grid model"]:
        """Let every position read from those around it.

        Args:
            states: `[*batch, *grid, model]`, as many grid axes as `size` has entries.

        Raises:
            ValueError: too few axes, another width, or a grid smaller than the neighbourhoods.
        """
        tensors, options = self._arguments(states)
        dropout = self.dropout if self.training else 0.0
        output = neighborhood_attention(*tensors, **options, dropout=dropout, backend=self.backend)
        return self.output(merge_heads(output).unflatten(-2, options["grid"]))

    def stages(self, states: Float[Tensor, "*batch_grid model"]) -> Stages:
        """What each position draws from each neighbour, `[*batch, heads, query, neighbor]`, dropout left out.

        Positions are counted row-major; `intently.mechanism.forms.neighbors(grid, size, ...)` says which key each column
        of a row is. The output is that of the heads, before they are merged.
        """
        tensors, options = self._arguments(states)
        return neighborhood_stages(*tensors, **options)

    def _arguments(self, states: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        axes, model = len(self.size), self.query.in_features
        if states.dim() < axes + 2 or states.shape[-1] != model:
            raise ValueError(
                f"NeighborhoodAttention: states is {show(states)}; [*batch, {axes} axes of the grid, {model}] is needed, "
                "with at least one batch axis. Channels first? Then .movedim(1, -1)"
            )
        grid = tuple(states.shape[-1 - axes : -1])
        line = states.flatten(-1 - axes, -2)
        query, key, value = (split_heads(each(line), self.heads) for each in (self.query, self.key, self.value))
        options = {"grid": grid, "size": self.size, "dilation": self.dilation, "causal": self.causal}
        return (query, key, value), {**options, "border": self.border, "relative": self.relative}

    def extra_repr(self) -> str:
        said = {"heads": self.heads, "size": self.size, "dilation": self.dilation, "causal": self.causal}
        return ", ".join(f"{name}={what}" for name, what in said.items()) + f", border={self.border!r}"


def from_natten(state: Mapping[str, Tensor]) -> State:
    """The weights of NATTEN's `NeighborhoodAttention1D`, `2D` or `3D` for a `NeighborhoodAttention`.

    Args:
        state: its `state_dict()`, with `qkv`, `proj` and, where that version learns one, `rpb`.

    >>> import torch
    >>> sorted(from_natten({"qkv.weight": torch.zeros(12, 4), "proj.weight": torch.zeros(4, 4)}))
    ['key.weight', 'output.weight', 'query.weight', 'value.weight']
    """
    ours = {}
    for kind in ("weight", "bias"):
        if f"qkv.{kind}" in state:
            parts = state[f"qkv.{kind}"].chunk(3)
            ours |= {f"{role}.{kind}": part for role, part in zip(ROLES, parts, strict=True)}
        if f"proj.{kind}" in state:
            ours[f"output.{kind}"] = state[f"proj.{kind}"]
    return ours | ({"relative": state["rpb"]} if "rpb" in state else {})


def to_natten(state: Mapping[str, Tensor]) -> State:
    """Undo `from_natten`."""
    theirs = {}
    for kind in ("weight", "bias"):
        if f"query.{kind}" in state:
            theirs[f"qkv.{kind}"] = torch.cat([state[f"{role}.{kind}"] for role in ROLES])
        if f"output.{kind}" in state:
            theirs[f"proj.{kind}"] = state[f"output.{kind}"]
    return theirs | ({"rpb": state["relative"]} if "relative" in state else {})


DINAT = {"relative": "self.rpb", **{role: f"self.{role}" for role in ROLES}, "output": "output.dense"}


def from_dinat(state: Mapping[str, Tensor]) -> State:
    """The weights of the attention module of transformers' Dinat (`….attention.`) for a `NeighborhoodAttention`."""
    return _renamed(state, {theirs: ours for ours, theirs in DINAT.items()})


def to_dinat(state: Mapping[str, Tensor]) -> State:
    """Undo `from_dinat`."""
    return _renamed(state, DINAT)


def _renamed(state: Mapping[str, Tensor], names: Mapping[str, str]) -> State:
    renamed = {}
    for name, tensor in state.items():
        place, dot, kind = (name, "", "") if name in names else name.rpartition(".")
        renamed[names[place] + dot + kind] = tensor
    return renamed
