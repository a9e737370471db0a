"""The graph layers against the formulas of PyG's documentation in numpy, on weights under PyG's names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from intently.mechanism.layers import (
    GraphAttention,
    GraphAttentionV2,
    from_gat_conv,
    from_gatv2_conv,
    look,
    to_gat_conv,
    to_gatv2_conv,
)

FEATURES, WIDTH, HEADS, EDGE = 5, 3, 2, 4
INDEX = torch.tensor([[0, 1, 3, 2, 2, 0], [2, 2, 0, 3, 2, 2]])  # one self-loop, one edge twice; nobody points at 1


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


STATES, EDGES = normal(0, 4, FEATURES), normal(1, INDEX.shape[1], EDGE)
GAT_CONV = {
    "lin.weight": normal(2, HEADS * WIDTH, FEATURES),
    "att_src": normal(3, 1, HEADS, WIDTH),
    "att_dst": normal(4, 1, HEADS, WIDTH),
    "lin_edge.weight": normal(5, HEADS * WIDTH, EDGE),
    "att_edge": normal(6, 1, HEADS, WIDTH),
}
GATV2_CONV = {
    "lin_l.weight": normal(7, HEADS * WIDTH, FEATURES),
    "lin_l.bias": normal(8, HEADS * WIDTH),
    "lin_r.weight": normal(9, HEADS * WIDTH, FEATURES),
    "lin_r.bias": normal(10, HEADS * WIDTH),
    "lin_edge.weight": normal(11, HEADS * WIDTH, EDGE),
    "att": normal(12, 1, HEADS, WIDTH),
}


def looped(edges):
    """Own edges away, one per node in their place, with the mean of the features that arrive (0 where none do)."""
    kept = [(int(j), int(i), e) for (j, i), e in zip(INDEX.T, edges, strict=True) if j != i]
    loops = []
    for node in range(4):
        arriving = [e for _, i, e in kept if i == node]
        loops.append((node, node, np.mean(arriving, axis=0) if arriving else np.zeros(EDGE)))
    return kept + loops


def summed(logits, values, kept):
    output = np.zeros((4, HEADS, WIDTH))
    for node in range(4):
        arriving = [n for n, (_, i, _) in enumerate(kept) if i == node]
        for head in range(HEADS):
            shares = np.exp([logits[n][head] for n in arriving])
            for n, share in zip(arriving, shares / shares.sum(), strict=True):
                output[node, head] += share * values[kept[n][0], head]
    return output


def leaky_relu(x):
    return np.where(x >= 0, x, 0.2 * x)


def gat_by_hand(weights, kept):
    x = (STATES @ weights["lin.weight"].T).reshape(4, HEADS, WIDTH)
    logits = []
    for j, i, e in kept:
        edge = (weights["lin_edge.weight"] @ e).reshape(HEADS, WIDTH)
        total = weights["att_src"][0] * x[j] + weights["att_dst"][0] * x[i] + weights["att_edge"][0] * edge
        logits.append(leaky_relu(total.sum(-1)))
    return summed(logits, x, kept)


def gatv2_by_hand(weights, kept):
    left = (STATES @ weights["lin_l.weight"].T + weights["lin_l.bias"]).reshape(4, HEADS, WIDTH)
    right = (STATES @ weights["lin_r.weight"].T + weights["lin_r.bias"]).reshape(4, HEADS, WIDTH)
    logits = []
    for j, i, e in kept:
        edge = (weights["lin_edge.weight"] @ e).reshape(HEADS, WIDTH)
        logits.append((weights["att"][0] * leaky_relu(left[j] + right[i] + edge)).sum(-1))
    return summed(logits, left, kept)


CASES = {
    "GAT": (GraphAttention, from_gat_conv, to_gat_conv, GAT_CONV, gat_by_hand),
    "GATv2": (GraphAttentionV2, from_gatv2_conv, to_gatv2_conv, GATV2_CONV, gatv2_by_hand),
}


def built(name, merge="concat", self_loops=True, **slips):
    layer_class, read, _, weights, _ = CASES[name]
    bias = normal(13, HEADS * WIDTH if merge == "concat" else WIDTH)
    layer = layer_class(
        FEATURES, WIDTH, HEADS, merge=merge, edge_features=EDGE, self_loops=self_loops, **slips
    ).double()
    layer.load_state_dict(read({name: torch.from_numpy(each) for name, each in {**weights, "bias": bias}.items()}))
    return layer, bias


@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name):
    by_hand, weights = CASES[name][4], CASES[name][3]
    arguments = torch.from_numpy(STATES), INDEX, torch.from_numpy(EDGES)

    layer, bias = built(name)
    expected = by_hand(weights, looped(EDGES))
    torch.testing.assert_close(layer(*arguments), torch.from_numpy(expected.reshape(4, -1) + bias))

    layer, bias = built(name, merge="mean")
    torch.testing.assert_close(layer(*arguments), torch.from_numpy(expected.mean(axis=1) + bias))

    layer, bias = built(name, self_loops=False)
    kept = [(int(j), int(i), e) for (j, i), e in zip(INDEX.T, EDGES, strict=True)]
    output = layer(*arguments)
    torch.testing.assert_close(output, torch.from_numpy(by_hand(weights, kept).reshape(4, -1) + bias))
    assert torch.equal(output[1], torch.from_numpy(bias))  # nobody points at node 1


@pytest.mark.parametrize("name", CASES)
def test_wrong_variants_are_caught(name):
    expected = CASES[name][4](CASES[name][3], looped(EDGES)).reshape(4, -1)
    states, edges = torch.from_numpy(STATES), torch.from_numpy(EDGES)
    layer, bias = built(name)
    wrong = [
        layer(states, INDEX.flip(0), edges),
        built(name, slope=0.0)[0](states, INDEX, edges),
        built(name, self_loops=False)[0](states, INDEX, edges),
        layer(states, INDEX, edges.flip(0)),
    ]
    assert not any(np.allclose(each.detach().numpy(), expected + bias) for each in wrong)


@pytest.mark.parametrize("name", CASES)
def test_looking_changes_nothing_and_shows_the_weights(name):
    layer, _ = built(name)
    arguments = torch.from_numpy(STATES), INDEX, torch.from_numpy(EDGES)
    quiet = layer(*arguments)
    with look(layer) as seen:
        assert torch.equal(layer(*arguments), quiet)
    index, _ = layer.edges(INDEX, 4)
    weights = seen[""].weights
    assert weights.shape == (HEADS, index.shape[1]) == (HEADS, 9)
    sums = torch.zeros(HEADS, 4, dtype=torch.float64).index_add(1, index[1], weights)
    torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_signals_on_one_graph(name):
    layer, _ = built(name)
    batch = torch.stack([torch.from_numpy(STATES), torch.from_numpy(normal(14, 4, FEATURES))])
    edges = torch.from_numpy(EDGES)
    torch.testing.assert_close(layer(batch, INDEX, edges), torch.stack([layer(each, INDEX, edges) for each in batch]))


@pytest.mark.parametrize("name", CASES)
def test_writes_back_what_it_read(name):
    theirs = CASES[name][2](built(name)[0].state_dict())
    assert theirs.keys() == {*CASES[name][3], "bias"}
    assert all(np.array_equal(theirs[each].numpy(), tensor) for each, tensor in CASES[name][3].items())


def test_older_names_are_read_and_strange_ones_refused():
    assert from_gat_conv({"lin_src.weight": torch.zeros(2, 3)}).keys() == {"project.weight"}
    with pytest.raises(ValueError, match=r"no place for \{'res.weight': 'float32\[2, 3\]'\}"):
        from_gatv2_conv({"res.weight": torch.zeros(2, 3)})


@pytest.mark.parametrize("name", CASES)
def test_refusals(name):
    layer, _ = built(name)
    states, edges = torch.from_numpy(STATES), torch.from_numpy(EDGES)
    with pytest.raises(ValueError, match=r"none were given as edge features, but .* \[edges, 4\]"):
        layer(states, INDEX)
    with pytest.raises(ValueError, match=r"states is float64\[4, 4\]; \[\*batch, nodes, 5\]"):
        layer(states[:, :4], INDEX, edges)
    with pytest.raises(ValueError, match="merge is 'sum'"):
        CASES[name][0](FEATURES, WIDTH, HEADS, merge="sum")


def test_dropout_only_in_training():
    layer, states = GraphAttention(5, 4, dropout=0.5), torch.randn(4, 5)
    layer.eval()
    assert torch.equal(layer(states, INDEX), layer(states, INDEX))
    layer.train()
    assert not torch.equal(layer(states, INDEX), layer(states, INDEX))
