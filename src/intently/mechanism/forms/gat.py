"""GAT and GATv2: attention along the edges of a graph, whose scores are learned sums and no dot products."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from intently._typing import Float, Int
from intently.mechanism.attention import Stages
from intently.mechanism.door import own_precision, show
from intently.mechanism.forms.graph import carry, edge_softmax, ends, raised


def gat_attention(
    source: Float[Tensor, "*batch heads source width"],
    target: Float[Tensor, "*batch heads target width"],
    edge_index: Int[Tensor, "2 edge"],
    source_weight: Float[Tensor, "heads width"],
    target_weight: Float[Tensor, "heads width"],
    *,
    edge: Float[Tensor, "heads edge"] | None = None,
    slope: float = 0.2,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch heads target width"]:
    """GAT: the logit of an edge is one number from its source plus one from its target, bent by a LeakyReLU.

        logit_{j → i} = LeakyReLU( a_s · x_j + a_t · x_i + e_{j → i} )
        output_i      = Σ_{j → i} softmax_{j → i}( logit ) x_j

    Within one node i the target's number is the same for all edges, so every node ranks its sources alike; GATv2 bends
    before it weighs and does not share this.

    Args:
        source: `[*batch, heads, source, width]`, projected nodes that are read; they are the values too.
        target: `[*batch, heads, target, width]`, projected nodes that receive; the same tensor within one graph.
        edge_index: int64 `[2, edge]`, row 0 the sources, row 1 the targets; doubled edges count twice.
        source_weight, target_weight: `[heads, width]`.
        edge: `[heads, edge]`, a number per edge.
        slope: of the LeakyReLU below 0.
        dropout: probability of dropping a weight; pass 0 in evaluation.

    Returns:
        `[*batch, heads, target, width]`; a node without an edge receives 0. Time and memory grow with the edges.

    Raises:
        TypeError, ValueError: an edge index of another form, or an edge to a node that is not there.

    Symbols: `source` Wh_j, `target` Wh_i, `[target_weight | source_weight]` a, `weights` α_ij.

    Equals / differs:
        torch `scaled_dot_product_attention`, ONNX `Attention`: no dot product, so these scores can only enter as a bias
            of target x source, with q = 0.
        `nn.MultiheadAttention`: cannot.
        FlexAttention: a `score_mod` can add and bend the two numbers; still over pairs of nodes.
        PyG `GATConv`: equal after `with_self_loops`, which that layer does itself; there `[nodes, heads, width]`.

    Source: Veličković et al. 2018, *Graph Attention Networks*, arXiv 1710.10903, equations 1 to 4.

    Four nodes, edges 0→2 and 1→2; source 1 has a logit of ln 3, so it counts thrice:

    >>> import torch
    >>> states = torch.tensor([[[0.0, 1.0], [1.0, 10.0], [0.0, 0.0], [0.0, 0.0]]])
    >>> edges, weight = torch.tensor([[0, 1], [2, 2]]), torch.tensor([[3.0, 1.0]]).log()
    >>> gat_attention(states, states, edges, weight, torch.zeros(1, 2))[0, :, 1]     # (1 + 3 · 10) / 4
    tensor([0.0000, 0.0000, 7.7500, 0.0000])
    """
    return gat_stages(
        source, target, edge_index, source_weight, target_weight, edge=edge, slope=slope, dropout=dropout
    ).output


def gat_stages(
    source: Float[Tensor, "*batch heads source width"],
    target: Float[Tensor, "*batch heads target width"],
    edge_index: Int[Tensor, "2 edge"],
    source_weight: Float[Tensor, "heads width"],
    target_weight: Float[Tensor, "heads width"],
    *,
    edge: Float[Tensor, "heads edge"] | None = None,
    slope: float = 0.2,
    dropout: float = 0.0,
) -> Stages:
    """The stages of `gat_attention`; scores are the sums before the LeakyReLU, and all but the output `[..., edge]`."""
    _check_nodes("gat_attention", source, target, source_weight)
    ours, theirs = ends(edge_index, source.shape[-2], target.shape[-2])
    with own_precision(source):
        values = raised(source)
        from_source = (values * raised(source_weight)[:, None]).sum(dim=-1)
        from_target = (raised(target) * raised(target_weight)[:, None]).sum(dim=-1)
        scores = from_source.index_select(-1, ours) + from_target.index_select(-1, theirs)
        if edge is not None:
            scores = scores + edge
        logits = F.leaky_relu(scores, slope)
        weights = edge_softmax(logits, theirs, target.shape[-2])
        output = carry(weights, values, ours, theirs, target.shape[-2], dropout)
    return Stages(scores, logits, weights, output.to(source.dtype))


def gatv2_attention(
    source: Float[Tensor, "*batch heads source width"],
    target: Float[Tensor, "*batch heads target width"],
    edge_index: Int[Tensor, "2 edge"],
    weight: Float[Tensor, "heads width"],
    *,
    edge: Float[Tensor, "heads edge width"] | None = None,
    slope: float = 0.2,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch heads target width"]:
    """GATv2: source and target are added, bent by a LeakyReLU, and then weighed, so that nodes can rank differently.

        logit_{j → i} = a · LeakyReLU( x_j + y_i + e_{j → i} )
        output_i      = Σ_{j → i} softmax_{j → i}( logit ) x_j

    Args:
        source: x, `[*batch, heads, source, width]`, nodes that are read under one projection; they are the values too.
        target: y, `[*batch, heads, target, width]`, nodes that receive, under the same projection or another.
        edge_index: int64 `[2, edge]`, row 0 the sources, row 1 the targets; doubled edges count twice.
        weight: `[heads, width]`.
        edge: `[heads, edge, width]`, projected features of the edges.
        slope: of the LeakyReLU below 0.
        dropout: probability of dropping a weight; pass 0 in evaluation.

    Returns:
        `[*batch, heads, target, width]`; a node without an edge receives 0. Time and memory grow with the edges.

    Raises:
        TypeError, ValueError: an edge index of another form, or an edge to a node that is not there.

    Symbols: `source` W_r h_j, `target` W_l h_i where the paper has W = [W_l | W_r]; `weight` a, `weights` α_ij.

    Equals / differs:
        torch `scaled_dot_product_attention`, ONNX `Attention`: no dot product, so these scores can only enter as a bias
            of target x source, with q = 0.
        `nn.MultiheadAttention`: cannot.
        FlexAttention: cannot; a `score_mod` sees the finished dot product, not the two vectors.
        PyG `GATv2Conv`: equal after `with_self_loops`, which that layer does itself; its `lin_l` makes the source, its
            `lin_r` the target. Additive attention (Bahdanau) is this with tanh for the LeakyReLU.

    Source: Brody et al. 2022, *How Attentive are Graph Attention Networks?*, arXiv 2105.14491, equation 7.

    Four nodes, edges 0→2 and 1→2; source 1 has a logit of ln 3, so it counts thrice:

    >>> import torch
    >>> states = torch.tensor([[[0.0, 1.0], [1.0, 10.0], [0.0, 0.0], [0.0, 0.0]]])
    >>> edges, weight = torch.tensor([[0, 1], [2, 2]]), torch.tensor([[3.0, 1.0]]).log()
    >>> gatv2_attention(states, torch.zeros(1, 4, 2), edges, weight)[0, :, 1]        # (1 + 3 · 10) / 4
    tensor([0.0000, 0.0000, 7.7500, 0.0000])
    """
    return gatv2_stages(source, target, edge_index, weight, edge=edge, slope=slope, dropout=dropout).output


def gatv2_stages(
    source: Float[Tensor, "*batch heads source width"],
    target: Float[Tensor, "*batch heads target width"],
    edge_index: Int[Tensor, "2 edge"],
    weight: Float[Tensor, "heads width"],
    *,
    edge: Float[Tensor, "heads edge width"] | None = None,
    slope: float = 0.2,
    dropout: float = 0.0,
) -> Stages:
    """The stages of `gatv2_attention`; scores equal logits here, and all but the output are `[..., edge]`."""
    _check_nodes("gatv2_attention", source, target, weight)
    ours, theirs = ends(edge_index, source.shape[-2], target.shape[-2])
    with own_precision(source):
        values = raised(source)
        pairs = values.index_select(-2, ours) + raised(target).index_select(-2, theirs)
        if edge is not None:
            pairs = pairs + edge
        logits = (F.leaky_relu(pairs, slope) * raised(weight)[:, None]).sum(dim=-1)
        weights = edge_softmax(logits, theirs, target.shape[-2])
        output = carry(weights, values, ours, theirs, target.shape[-2], dropout)
    return Stages(logits, logits, weights, output.to(source.dtype))


def _check_nodes(form: str, source: Tensor, target: Tensor, weight: Tensor) -> None:
    fits = source.dim() >= 3 and source.dim() == target.dim() and source.shape[:-2] == target.shape[:-2]
    if not fits or source.shape[-1] != target.shape[-1] or weight.shape != (source.shape[-3], source.shape[-1]):
        raise ValueError(
            f"{form}: source {show(source)}, target {show(target)}, weight {show(weight)}; "
            "[*batch, heads, nodes, width] twice and [heads, width] are needed. Heads not yet split?"
        )
