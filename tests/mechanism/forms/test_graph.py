"""Attention over edges against loops over the nodes, in the words of PyG's documentation, and against a dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.mechanism.every_form import Draw, Form, Options, Sizes, Tensors, every_check
from tests.mechanism.largest import largest

from intently.mechanism import attention
from intently.mechanism.forms.gat import gat_attention, gat_stages, gatv2_attention, gatv2_stages
from intently.mechanism.forms.graph import edge_softmax, graph_attention, graph_stages, with_self_loops


def softmax(logits):
    shares = np.exp(logits - np.max(logits))
    return shares / shares.sum()


def leaky_relu(x):
    return np.where(x > 0, x, 0.2 * x)


def at_each_node(values, edge_index, targets, logit):
    """The sum over N(i) of softmax(logit(batch, head, j, i, edge)) times the value of j, node by node."""
    output = np.zeros((*values.shape[:2], targets, values.shape[-1]))
    for batch, head, i in np.ndindex(*values.shape[:2], targets):
        arriving = [(int(j), number) for number, (j, target) in enumerate(edge_index.T) if target == i]
        if arriving:
            weights = softmax(np.array([logit(batch, head, j, i, number) for j, number in arriving]))
            output[batch, head, i] = sum(
                w * values[batch, head, j] for w, (j, _) in zip(weights, arriving, strict=True)
            )
    return output


def edges(draw: Draw, sizes: Sizes) -> torch.Tensor:
    """About half of all pairs, in no order; nobody sends to the last node unless it is the only one."""
    mask = draw.seen(sizes.queries, sizes.keys)
    mask[0, 0] = True
    if sizes.queries > 1:
        mask[-1] = False
    target, source = mask.nonzero(as_tuple=True)
    order = torch.randperm(len(target), generator=draw.generator)
    return torch.stack([source[order], target[order]])


# ------------------------------------------------------------------------------------------------- dot product


def dot_tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "query": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width),
        "key": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.width),
        "value": draw.normal(sizes.batch, sizes.kv_heads, sizes.keys, sizes.value_width),
    }


def dot_options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    index = edges(draw, sizes)
    return {
        "plain": {"edge_index": index},
        "bias": {"edge_index": index, "bias": draw.normal(sizes.heads, index.shape[1])},
        "scale": {"edge_index": index, "scale": 0.3},
        "an edge twice": {"edge_index": torch.cat([index, index[:, :1]], dim=1)},
        "no edge": {"edge_index": index[:, :0]},
    }


def dot_in_loops(query, key, value, edge_index, bias=None, scale=None):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat(group, axis=1), value.repeat(group, axis=1)
    scale = 1 / np.sqrt(query.shape[-1]) if scale is None else scale

    def logit(batch, head, j, i, number):
        added = 0 if bias is None else bias[head, number]
        return scale * query[batch, head, i] @ key[batch, head, j] + added

    return at_each_node(value, edge_index, query.shape[2], logit)


def by_mask(query, key, value, edge_index, bias=None, scale=None):
    """An edge that is listed n times has n shares, which a dense bias says as ln n."""
    count = torch.zeros(query.shape[-2], key.shape[-2], dtype=query.dtype)
    count.index_put_(
        (edge_index[1], edge_index[0]), torch.ones(edge_index.shape[1], dtype=query.dtype), accumulate=True
    )
    dense = count.log().expand(query.shape[-3], -1, -1).clone()
    if bias is not None:
        dense[:, edge_index[1], edge_index[0]] += bias
    return attention(query, key, value, mask=count > 0, bias=dense, scale=scale, backend="stages")


# --------------------------------------------------------------------------------------------------------- GAT


def gat_tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "source": draw.normal(sizes.batch, sizes.heads, sizes.keys, sizes.width),
        "target": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width),
        "source_weight": draw.normal(sizes.heads, sizes.width),
        "target_weight": draw.normal(sizes.heads, sizes.width),
    }


def gat_options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    index = edges(draw, sizes)
    return {
        "plain": {"edge_index": index},
        "edge scores": {"edge_index": index, "edge": draw.normal(sizes.heads, index.shape[1])},
    }


def gat_in_loops(source, target, source_weight, target_weight, edge_index, edge=None):
    def logit(batch, head, j, i, number):
        joined = np.concatenate([target[batch, head, i], source[batch, head, j]])  # [Wh_i ‖ Wh_j]
        weight = np.concatenate([target_weight[head], source_weight[head]])
        return leaky_relu(weight @ joined + (0 if edge is None else edge[head, number]))

    return at_each_node(source, edge_index, target.shape[2], logit)


# ------------------------------------------------------------------------------------------------------- GATv2


def gatv2_tensors(draw: Draw, sizes: Sizes) -> Tensors:
    return {
        "source": draw.normal(sizes.batch, sizes.heads, sizes.keys, sizes.width),
        "target": draw.normal(sizes.batch, sizes.heads, sizes.queries, sizes.width),
        "weight": draw.normal(sizes.heads, sizes.width),
    }


def gatv2_options(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    index = edges(draw, sizes)
    return {
        "plain": {"edge_index": index},
        "edge features": {"edge_index": index, "edge": draw.normal(sizes.heads, index.shape[1], sizes.width)},
    }


def gatv2_in_loops(source, target, weight, edge_index, edge=None):
    def logit(batch, head, j, i, number):
        bent = leaky_relu(target[batch, head, i] + source[batch, head, j] + (0 if edge is None else edge[head, number]))
        return weight[head] @ bent

    return at_each_node(source, edge_index, target.shape[2], logit)


def reversed_edges(form, square):
    """Row 0 taken for the targets: caught where the sizes differ by an error, so the slip keeps to nodes on both sides."""

    def call(*, edge_index, **given):
        return form(edge_index=torch.stack([edge_index[1].clamp(max=square), edge_index[0].clamp(max=square)]), **given)

    return call


test_graph = every_check(
    Form(
        "dot product",
        graph_attention,
        dot_in_loops,
        dot_tensors,
        wrong={
            "no scale": lambda **given: graph_attention(**{**given, "scale": 1.0}),
            "rows swapped": reversed_edges(graph_attention, 3),
        },
        options=dot_options,
        stages=by_mask,
        blind="plain",
    ),
    Form(
        "GAT",
        gat_attention,
        gat_in_loops,
        gat_tensors,
        wrong={
            "no LeakyReLU": lambda **given: gat_attention(**given, slope=1.0),
            "weights swapped": lambda source_weight, target_weight, **given: gat_attention(
                source_weight=target_weight, target_weight=source_weight, **given
            ),
            "rows swapped": reversed_edges(gat_attention, 3),
        },
        options=gat_options,
        blind="plain",
    ),
    Form(
        "GATv2",
        gatv2_attention,
        gatv2_in_loops,
        gatv2_tensors,
        wrong={
            "no LeakyReLU": lambda **given: gatv2_attention(**given, slope=1.0),
            "rows swapped": reversed_edges(gatv2_attention, 3),
        },
        options=gatv2_options,
        blind="plain",
    ),
)


@given(st.integers(1, 6), st.data())
def test_dot_product_equals_dense_attention_for_any_adjacency(nodes, data):
    rows = st.lists(st.booleans(), min_size=nodes, max_size=nodes)
    mask = torch.tensor(data.draw(st.lists(rows, min_size=nodes, max_size=nodes)))
    target, source = mask.nonzero(as_tuple=True)
    generator = torch.Generator().manual_seed(nodes)
    states = [torch.randn(1, 2, nodes, 3, generator=generator, dtype=torch.float64) for _ in range(3)]
    ours = graph_attention(*states, torch.stack([source, target]))
    torch.testing.assert_close(ours, attention(*states, mask=mask, backend="stages"))


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-1e3, 1e3)), max_size=12), st.randoms())
def test_edge_softmax_sums_to_one_where_edges_arrive(arrivals, random):
    random.shuffle(arrivals)
    target = torch.tensor([node for node, _ in arrivals], dtype=torch.int64)
    weights = edge_softmax(torch.tensor([logit for _, logit in arrivals], dtype=torch.float64), target, 5)
    sums = torch.zeros(5, dtype=torch.float64).index_add(0, target, weights)
    arrived = torch.zeros(5, dtype=torch.bool).index_fill(0, target, True)
    torch.testing.assert_close(sums, arrived.double())


def test_an_edge_taken_out_by_its_bias_leaves_0_and_gradient_0():
    states = torch.randn(1, 1, 3, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    index, bias = torch.tensor([[0, 1, 2], [1, 1, 2]]), torch.tensor([0.0, -torch.inf, -torch.inf])
    output = graph_attention(states, states, states, index, bias=bias)
    assert torch.equal(output[0, 0, 1], states[0, 0, 0]) and (output[0, 0, 2] == 0).all()
    (gradient,) = torch.autograd.grad(output.sum(), states)
    assert gradient.isfinite().all() and (gradient[0, 0, 2] == 0).all()


def test_gat_ranks_alike_at_every_node_and_gatv2_does_not():
    """The reason for GATv2: with GAT the best source is the same for all nodes (Brody et al., theorem 1)."""
    draw = Draw.seeded(3)
    source, target, weight = draw.normal(1, 1, 5, 4), draw.normal(1, 1, 5, 4), draw.normal(1, 4)
    index = torch.cartesian_prod(torch.arange(5), torch.arange(5)).T
    best = gat_stages(source, target, index, weight, weight).weights.view(5, 5).argmax(dim=0)
    assert len(best.unique()) == 1
    best = gatv2_stages(source, target, index, weight).weights.view(5, 5).argmax(dim=0)
    assert len(best.unique()) > 1


def test_stages_add_up():
    draw, sizes = Draw.seeded(), Sizes()
    tensors, index = dot_tensors(draw, sizes), edges(draw, sizes)
    seen = graph_stages(**tensors, edge_index=index)
    assert seen.weights.shape == (2, 6, index.shape[1])
    torch.testing.assert_close(seen.logits, seen.scores / 8**0.5)
    values = tensors["value"].repeat_interleave(2, dim=1)
    summed = torch.zeros_like(seen.output)
    for number, (source, target) in enumerate(index.T.tolist()):
        summed[:, :, target] += seen.weights[:, :, number, None] * values[:, :, source]
    torch.testing.assert_close(seen.output, summed)


def test_self_loops_replace_those_that_are_there():
    index, features = torch.tensor([[0, 2, 1, 0], [1, 1, 1, 2]]), torch.tensor([[2.0], [4.0], [100.0], [7.0]])
    looped, filled = with_self_loops(index, 3, features)
    assert looped.tolist() == [[0, 2, 0, 0, 1, 2], [1, 1, 2, 0, 1, 2]]
    assert filled is not None and filled.flatten().tolist() == [2, 4, 7, 0, 3, 7]  # 0: nobody arrives; 3: mean of 2, 4


@pytest.mark.parametrize("form", ["dot", "gat", "gatv2"])
def test_memory_grows_with_the_edges(form):
    def call(states):
        nodes = states.shape[-2]
        index = torch.stack([torch.arange(nodes), (torch.arange(nodes) * 7 + 1) % nodes])
        weight = torch.ones(2, 4, dtype=states.dtype)
        if form == "dot":
            return graph_attention(states, states, states, index)
        if form == "gat":
            return gat_attention(states, states, index, weight, weight)
        return gatv2_attention(states, states, index, weight)

    draw = Draw.seeded()
    short, long = draw.normal(1, 2, 500, 4), draw.normal(1, 2, 1000, 4)
    assert largest(call, states=long) <= 2.1 * largest(call, states=short)
    assert largest(call, states=long) < 1000**2 / 10


STATES = torch.zeros(1, 1, 4, 2)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (torch.tensor([[0, 4], [1, 2]]), ValueError, r"names source 4, but there are 4 source nodes, 0 to 3"),
        (torch.tensor([[0, 1], [1, -1]]), ValueError, r"names target -1"),
        (torch.tensor([[0, 1], [1, 2], [2, 3]]), ValueError, r"int64\[3, 2\]; \[2, edges\] is needed.*Then \.t\(\)"),
        (torch.tensor([[0.0], [1.0]]), TypeError, r"float32\[2, 1\]; int64 \[2, edges\]"),
    ],
)
def test_refusals(index, error, message):
    with pytest.raises(error, match=message):
        graph_attention(STATES, STATES, STATES, index)


def test_heads_that_do_not_fit_are_refused():
    index, weight = torch.tensor([[0], [1]]), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"gat_attention: source float32\[1, 1, 4, 2\].*weight float32\[3, 2\]"):
        gat_attention(STATES, STATES, index, weight, weight)
    with pytest.raises(ValueError, match="gatv2_attention"):
        gatv2_attention(STATES, STATES, index, weight)
