"""Attention over the edges of a graph: each node receives from the sources of its edges, and nothing else is computed."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from intently._typing import Float, Int
from intently.mechanism.attention import Stages
from intently.mechanism.door import admit, own_precision, show


def graph_attention(
    query: Float[Tensor, "*lead target width"],
    key: Float[Tensor, "*kv_lead source width"],
    value: Float[Tensor, "*kv_lead source value_width"],
    edge_index: Int[Tensor, "2 edge"],
    *,
    bias: Float[Tensor, "*heads edge"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "*lead target value_width"]:
    """Dot-product attention along edges: node i mixes the values of the sources j of its edges j → i.

        output_i = Σ_{j → i} softmax_{j → i}( q_i · k_j / √width + bias_{j → i} ) v_j

    Args:
        query: `[*batch, heads, target, width]`, one per node that receives.
        key, value: `[*batch, kv_heads, source, width]`, one per node that is read; grouped heads as in `attention`.
        edge_index: int64 `[2, edge]`, row 0 the sources, row 1 the targets, the same for every sample and head. Edges
            come in any order; one that is listed twice counts twice, which a mask cannot say.
        bias: `[edge]` or `[heads, edge]`, added to the logits; `-inf` takes an edge out.
        scale, dropout: as in `attention`.

    Returns:
        `[*batch, heads, target, value_width]`; a node without an edge receives 0. Time and memory grow with the edges.

    Raises:
        TypeError, ValueError: tensors that do not fit, or an edge to a node that is not there.

    Symbols: `query` W₃x_i, `key` W₄x_j, `value` W₂x_j, `weights` α_{i,j}, sources of i's edges N(i).

    Equals / differs:
        torch `scaled_dot_product_attention`: equal with the adjacency as mask, `mask[target, source] = True`, as long as
            no edge is doubled; it computes all pairs of nodes.
        `nn.MultiheadAttention`: its core with the inverse of that mask (True = hidden there).
        ONNX `Attention`: equal with that mask as `attn_mask`.
        FlexAttention: equal with a `mask_mod` that reads the adjacency; few blocks of an unordered graph are empty.
        PyG `TransformerConv`: equal but for its skip connection; there `[nodes, heads, width]`.

    Source: Shi et al. 2020, *Masked Label Prediction*, arXiv 2009.03509, section 3.1 (the graph transformer's attention).

    Four nodes, edges 0→2, 1→2, 2→3, every score 0: node 2 receives a mean, node 3 a copy, the others nothing.

    >>> import torch
    >>> nothing, value = torch.zeros(4, 1), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> graph_attention(nothing, nothing, value, torch.tensor([[0, 1, 2], [2, 2, 3]])).flatten()
    tensor([  0.0000,   0.0000,   5.5000, 100.0000])
    """
    return graph_stages(query, key, value, edge_index, bias=bias, scale=scale, dropout=dropout).output


def graph_stages(
    query: Float[Tensor, "*lead target width"],
    key: Float[Tensor, "*kv_lead source width"],
    value: Float[Tensor, "*kv_lead source value_width"],
    edge_index: Int[Tensor, "2 edge"],
    *,
    bias: Float[Tensor, "*heads edge"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Stages:
    """The stages of `graph_attention`; all but the output are `[*batch, heads, edge]`."""
    inputs = admit(query, key, value, scale=scale, dropout=dropout)
    source, target = ends(edge_index, inputs.key.shape[-2], inputs.query.shape[-2])
    group = inputs.query.shape[-3] // inputs.key.shape[-3]
    with own_precision(query):
        ours, theirs, values = (raised(each) for each in (inputs.query, inputs.key, inputs.value))
        theirs, values = theirs.repeat_interleave(group, dim=-3), values.repeat_interleave(group, dim=-3)
        scores = (ours.index_select(-2, target) * theirs.index_select(-2, source)).sum(dim=-1)
        logits = scores * inputs.scale
        if bias is not None:
            logits = logits + bias
        weights = edge_softmax(logits, target, inputs.query.shape[-2])
        output = carry(weights, values, source, target, inputs.query.shape[-2], inputs.dropout).to(value.dtype)
    if inputs.headless:
        scores, logits, weights = scores.squeeze(-2), logits.squeeze(-2), weights.squeeze(-2)
    return Stages(scores, logits, weights, inputs.leave(output))


def edge_softmax(
    logits: Float[Tensor, "*lead edge"], target: Int[Tensor, " edge"], nodes: int
) -> Float[Tensor, "*lead edge"]:
    """Softmax over the edges that arrive at the same node; nodes whose edges are all `-inf` weigh them 0.

    >>> import torch
    >>> edge_softmax(torch.tensor([0.0, 0.0, 5.0]), torch.tensor([1, 1, 2]), nodes=3)
    tensor([0.5000, 0.5000, 1.0000])
    """
    # The largest logit only keeps exp within range; its share of the gradient cancels, so none is asked for.
    lowest = torch.full((*logits.shape[:-1], nodes), -math.inf, dtype=logits.dtype, device=logits.device)
    highest = lowest.scatter_reduce(-1, target.expand(logits.shape), logits.detach(), "amax")
    highest = highest.masked_fill(highest == -math.inf, 0.0)
    shares = (logits - highest.index_select(-1, target)).exp()
    totals = torch.zeros_like(highest).index_add(-1, target, shares)
    totals = totals.masked_fill(totals == 0, 1.0)
    return shares / totals.index_select(-1, target)


def with_self_loops(
    edge_index: Int[Tensor, "2 edge"], nodes: int, edge: Float[Tensor, "*edge_features"] | None = None
) -> tuple[Int[Tensor, "2 edge"], Float[Tensor, "*edge_features"] | None]:
    """Exactly one edge from each node to itself: those there are removed, then one per node is appended, in order.

    Features of a new edge are the mean of those of the other edges that arrive at its node, 0 where there are none (PyG's
    default).

    >>> import torch
    >>> edges, features = with_self_loops(torch.tensor([[0, 1], [1, 1]]), 2, torch.tensor([[6.0], [8.0]]))
    >>> edges.tolist(), features.flatten()
    ([[0, 0, 1], [1, 0, 1]], tensor([6., 0., 6.]))
    """
    ends(edge_index, nodes, nodes)
    kept = edge_index[0] != edge_index[1]
    edge_index = edge_index[:, kept]
    loops = torch.arange(nodes, device=edge_index.device).expand(2, -1)
    if edge is not None:
        edge, arriving = edge[kept], edge_index[1]
        count = edge.new_zeros(nodes).index_add(0, arriving, edge.new_ones(len(edge))).clamp(min=1)
        mean = edge.new_zeros(nodes, *edge.shape[1:]).index_add(0, arriving, edge)
        edge = torch.cat([edge, mean / count.view(-1, *[1] * (edge.dim() - 1))])
    return torch.cat([edge_index, loops], dim=1), edge


def carry(
    weights: Tensor, values: Tensor, source: Tensor, target: Tensor, nodes: int, dropout: float
) -> Float[Tensor, "*batch heads target width"]:
    """The values of the sources, weighted and summed at the targets."""
    if dropout:
        weights = F.dropout(weights, dropout)
    carried = values.index_select(-2, source) * weights.unsqueeze(-1)
    nobody = torch.zeros(*carried.shape[:-2], nodes, carried.shape[-1], dtype=carried.dtype, device=carried.device)
    return nobody.index_add(-2, target, carried)


def ends(edge_index: Tensor, sources: int, targets: int) -> tuple[Tensor, Tensor]:
    """Sources and targets of the edges, checked; on a GPU, and while compiling, without a look at the numbers."""
    if edge_index.dtype != torch.int64:
        raise TypeError(
            f"edge_index is {show(edge_index)}; int64 [2, edges] is needed, row 0 the sources, row 1 the targets"
        )
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(
            f"edge_index is {show(edge_index)}; [2, edges] is needed, row 0 the sources, row 1 the targets. "
            "One edge per row? Then .t()"
        )
    source, target = edge_index
    if edge_index.device.type == "cpu" and edge_index.numel() and not torch.compiler.is_compiling():
        for name, ends, nodes in (("source", source, sources), ("target", target, targets)):
            lowest, highest = int(ends.min()), int(ends.max())
            if lowest < 0 or highest >= nodes:
                raise ValueError(
                    f"edge_index names {name} {highest if highest >= nodes else lowest}, but there are {nodes} "
                    f"{name} nodes, 0 to {nodes - 1}. Nodes counted from 1, or the two rows swapped?"
                )
    return source, target


def raised(states: Tensor) -> Tensor:
    """Half precision as float32: sums over many edges would lose their digits in it."""
    return states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
