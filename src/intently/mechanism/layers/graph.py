"""GAT and GATv2 as layers: the nodes of a graph read from the nodes that point at them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from intently._typing import Float, Int
from intently.mechanism.aggregate import merge_heads
from intently.mechanism.attention import Stages
from intently.mechanism.door import show
from intently.mechanism.forms.gat import gat_stages, gatv2_stages
from intently.mechanism.forms.graph import with_self_loops
from intently.mechanism.project import split_heads

State = dict[str, Tensor]
Merge = Literal["concat", "mean"]


class _OverEdges(nn.Module, ABC):
    """What both layers do around their scores: self-loops before, merging the heads and adding a bias after."""

    _stages: Callable[..., Stages]  # the form, as a static method

    @abstractmethod
    def _arguments(self, states: Tensor, edge_index: Tensor, edge: Tensor | None) -> dict[str, Any]:
        """What the form takes."""

    def __init__(
        self, width: int, heads: int, merge: Merge, self_loops: bool, bias: bool, slope: float, dropout: float
    ):
        super().__init__()
        if merge not in ("concat", "mean"):
            raise ValueError(f'{type(self).__name__}: merge is {merge!r}; "concat" or "mean" is needed')
        self.heads = heads
        self.merge: Merge = merge
        self.self_loops = self_loops
        self.slope = slope
        self.dropout = dropout
        self.bias = nn.Parameter(torch.zeros(heads * width if merge == "concat" else width)) if bias else None

    def edges(
        self, edge_index: Int[Tensor, "2 edge"], nodes: int, edge: Float[Tensor, "edge features"] | None = None
    ) -> tuple[Int[Tensor, "2 edge"], Float[Tensor, "edge features"] | None]:
        """The edges that the layer reads along, in the order of its weights: with `self_loops` one per node is added."""
        return with_self_loops(edge_index, nodes, edge) if self.self_loops else (edge_index, edge)

    def forward(
        self,
        states: Float[Tensor, "*batch node features"],
        edge_index: Int[Tensor, "2 edge"],
        edge: Float[Tensor, "edge edge_features"] | None = None,
    ) -> Float[Tensor, "*batch node merged"]:
        """Let every node read from the sources of its edges.

        Args:
            states: `[*batch, nodes, features]`.
            edge_index: int64 `[2, edges]`, row 0 the sources, row 1 the targets; one graph for the whole batch.
            edge: `[edges, edge_features]`.

        Raises:
            TypeError, ValueError: widths or edges that do not fit, edge features where there should be none.
        """
        dropout = self.dropout if self.training else 0.0
        output = self._stages(**self._arguments(states, edge_index, edge), dropout=dropout).output
        merged = merge_heads(output) if self.merge == "concat" else output.mean(dim=-3)
        return merged if self.bias is None else merged + self.bias

    def stages(
        self,
        states: Float[Tensor, "*batch node features"],
        edge_index: Int[Tensor, "2 edge"],
        edge: Float[Tensor, "edge edge_features"] | None = None,
    ) -> Stages:
        """The weight of every edge, `[*batch, heads, edge]`, in the order of `edges(...)`; heads not merged yet."""
        return self._stages(**self._arguments(states, edge_index, edge))

    def _check(self, states: Tensor, edge: Tensor | None, project: nn.Linear, edge_project: nn.Linear | None) -> None:
        who = type(self).__name__
        if states.dim() < 2 or states.shape[-1] != project.in_features:
            raise ValueError(f"{who}: states is {show(states)}; [*batch, nodes, {project.in_features}] is needed")
        if (edge is None) != (edge_project is None):
            given = "none were given" if edge is None else f"{show(edge)} was given"
            wants = "none" if edge_project is None else f"[edges, {edge_project.in_features}]"
            raise ValueError(
                f"{who}: {given} as edge features, but the layer was built to read {wants}; see edge_features="
            )

    def extra_repr(self) -> str:
        return f"heads={self.heads}, merge={self.merge!r}, self_loops={self.self_loops}, slope={self.slope}"


class GraphAttention(_OverEdges):
    """GAT: one projection, and per head a number from the source and one from the target of each edge.

    Args:
        features: width of a node's representation.
        width: width of a head.
        heads: number of heads.
        merge: `"concat"` gives `heads * width` features, `"mean"` gives `width` (usual in the last layer).
        edge_features: width of the features of the edges, where there are any.
        self_loops: whether every node also reads from itself; loops that the edges name are replaced by one per node.
        bias: whether a bias is added at the end.
        slope: of the LeakyReLU below 0.
        dropout: probability of dropping a weight, in training mode only.

    Source: Veličković et al. 2018, arXiv 1710.10903, section 2.1.

    >>> import torch
    >>> layer = GraphAttention(5, 4, heads=2)
    >>> layer(torch.randn(3, 5), torch.tensor([[0, 1], [2, 2]])).shape       # edges 0 → 2 and 1 → 2
    torch.Size([3, 8])
    """

    _stages = staticmethod(gat_stages)

    def __init__(
        self,
        features: int,
        width: int,
        heads: int = 1,
        *,
        merge: Merge = "concat",
        edge_features: int | None = None,
        self_loops: bool = True,
        bias: bool = True,
        slope: float = 0.2,
        dropout: float = 0.0,
    ):
        super().__init__(width, heads, merge, self_loops, bias, slope, dropout)
        self.project = nn.Linear(features, heads * width, bias=False)
        self.source_weight = nn.Parameter(torch.empty(heads, width))
        self.target_weight = nn.Parameter(torch.empty(heads, width))
        self.edge_project = None if edge_features is None else nn.Linear(edge_features, heads * width, bias=False)
        self.edge_weight = None if edge_features is None else nn.Parameter(torch.empty(heads, width))
        _spread(self)

    def _arguments(self, states: Tensor, edge_index: Tensor, edge: Tensor | None) -> dict[str, Any]:
        self._check(states, edge, self.project, self.edge_project)
        edge_index, edge = self.edges(edge_index, states.shape[-2], edge)
        projected = split_heads(self.project(states), self.heads)
        score = None
        if edge is not None and self.edge_project is not None and self.edge_weight is not None:
            score = (split_heads(self.edge_project(edge), self.heads) * self.edge_weight[:, None]).sum(dim=-1)
        return {
            "source": projected,
            "target": projected,
            "edge_index": edge_index,
            "source_weight": self.source_weight,
            "target_weight": self.target_weight,
            "edge": score,
            "slope": self.slope,
        }


class GraphAttentionV2(_OverEdges):
    """GATv2: a projection each for source and target, added and bent before they are weighed.

    Args:
        features: width of a node's representation.
        width: width of a head.
        heads: number of heads.
        merge: `"concat"` gives `heads * width` features, `"mean"` gives `width` (usual in the last layer).
        edge_features: width of the features of the edges, where there are any.
        self_loops: whether every node also reads from itself; loops that the edges name are replaced by one per node.
        bias: whether both projections and the end have one.
        slope: of the LeakyReLU below 0.
        dropout: probability of dropping a weight, in training mode only.

    Source: Brody et al. 2022, arXiv 2105.14491, section 3.2.

    >>> import torch
    >>> layer = GraphAttentionV2(5, 4, heads=2, merge="mean")
    >>> layer(torch.randn(3, 5), torch.tensor([[0, 1], [2, 2]])).shape
    torch.Size([3, 4])
    """

    _stages = staticmethod(gatv2_stages)

    def __init__(
        self,
        features: int,
        width: int,
        heads: int = 1,
        *,
        merge: Merge = "concat",
        edge_features: int | None = None,
        self_loops: bool = True,
        bias: bool = True,
        slope: float = 0.2,
        dropout: float = 0.0,
    ):
        super().__init__(width, heads, merge, self_loops, bias, slope, dropout)
        self.source = nn.Linear(features, heads * width, bias=bias)
        self.target = nn.Linear(features, heads * width, bias=bias)
        self.edge_project = None if edge_features is None else nn.Linear(edge_features, heads * width, bias=False)
        self.weight = nn.Parameter(torch.empty(heads, width))
        _spread(self)

    def _arguments(self, states: Tensor, edge_index: Tensor, edge: Tensor | None) -> dict[str, Any]:
        self._check(states, edge, self.source, self.edge_project)
        edge_index, edge = self.edges(edge_index, states.shape[-2], edge)
        projected = None
        if edge is not None and self.edge_project is not None:
            projected = split_heads(self.edge_project(edge), self.heads)
        return {
            "source": split_heads(self.source(states), self.heads),
            "target": split_heads(self.target(states), self.heads),
            "edge_index": edge_index,
            "weight": self.weight,
            "edge": projected,
            "slope": self.slope,
        }


GAT_CONV = {
    "lin.weight": "project.weight",
    "att_src": "source_weight",
    "att_dst": "target_weight",
    "lin_edge.weight": "edge_project.weight",
    "att_edge": "edge_weight",
    "bias": "bias",
}
GATV2_CONV = {
    "lin_l.weight": "source.weight",
    "lin_l.bias": "source.bias",
    "lin_r.weight": "target.weight",
    "lin_r.bias": "target.bias",
    "lin_edge.weight": "edge_project.weight",
    "att": "weight",
    "bias": "bias",
}


def from_gat_conv(state: Mapping[str, Tensor]) -> State:
    """The weights of PyG's `GATConv` (one projection for sources and targets) for a `GraphAttention`.

    Raises:
        ValueError: a weight that has no place here, such as a second projection or a residual.

    >>> import torch
    >>> from_gat_conv({"att_src": torch.zeros(1, 2, 4)})["source_weight"].shape
    torch.Size([2, 4])
    """
    # Releases before 2.5 call the one projection lin_src.
    renamed = {"lin.weight" if name == "lin_src.weight" else name: tensor for name, tensor in state.items()}
    return _from_pyg("from_gat_conv", renamed, GAT_CONV)


def to_gat_conv(state: Mapping[str, Tensor]) -> State:
    """Undo `from_gat_conv`, in the names of PyG 2.5 and later."""
    return _to_pyg(state, GAT_CONV)


def from_gatv2_conv(state: Mapping[str, Tensor]) -> State:
    """The weights of PyG's `GATv2Conv` for a `GraphAttentionV2`; its `lin_l` projects sources, its `lin_r` targets.

    Raises:
        ValueError: a weight that has no place here, such as a residual.
    """
    return _from_pyg("from_gatv2_conv", state, GATV2_CONV)


def to_gatv2_conv(state: Mapping[str, Tensor]) -> State:
    """Undo `from_gatv2_conv`."""
    return _to_pyg(state, GATV2_CONV)


def _from_pyg(who: str, state: Mapping[str, Tensor], names: Mapping[str, str]) -> State:
    strange = {name: show(tensor) for name, tensor in state.items() if name not in names}
    if strange:
        raise ValueError(f"{who}: no place for {strange}; known are {', '.join(names)}")
    return {names[name]: tensor[0] if name.startswith("att") else tensor for name, tensor in state.items()}


def _to_pyg(state: Mapping[str, Tensor], names: Mapping[str, str]) -> State:
    theirs = {ours: theirs for theirs, ours in names.items()}
    return {theirs[name]: tensor[None] if theirs[name].startswith("att") else tensor for name, tensor in state.items()}


def _spread(layer: nn.Module) -> None:
    """Glorot's uniform start for every matrix, as the papers' code has it."""
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
