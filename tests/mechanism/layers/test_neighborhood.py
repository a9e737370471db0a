"""The neighborhood layer against its formula in numpy, position by position, and its weights under other names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from intently.mechanism.forms import neighbors
from intently.mechanism.layers import NeighborhoodAttention, from_dinat, from_natten, look, to_dinat, to_natten

HEADS, MODEL, GRID, SIZE, DILATION = 2, 6, (4, 5), (3, 2), (1, 2)


def layer_and_states() -> tuple[NeighborhoodAttention, torch.Tensor]:
    torch.manual_seed(5)
    layer = NeighborhoodAttention(MODEL, HEADS, size=SIZE, dilation=DILATION).double()
    assert layer.relative is not None
    nn.init.normal_(layer.relative)
    return layer, torch.randn(2, *GRID, MODEL, dtype=torch.float64)


def in_numpy(weights, states):
    """Three rows inside the grid, and of the columns of one parity the own and the one before, or the first two."""
    weights = {name: each.detach().numpy() for name, each in weights.items()}

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    output = np.zeros_like(states)
    for b, row, column in np.ndindex(states.shape[:3]):
        rows = [min(max(row - 1, 0), GRID[0] - 3) + n for n in range(3)]
        columns = [column, column + 2] if column < 2 else [column - 2, column]
        mixed = []
        for head in range(HEADS):
            part = slice(head * 3, head * 3 + 3)
            query = linear("query", states[b, row, column])[part]
            logits, values = [], []
            for r in rows:
                for c in columns:
                    bias = weights["relative"][head, r - row + 2, (c - column) // 2 + 1]
                    logits.append(query @ linear("key", states[b, r, c])[part] / np.sqrt(3) + bias)
                    values.append(linear("value", states[b, r, c])[part])
            shares = np.exp(logits) / np.exp(logits).sum()
            mixed.append(shares @ np.array(values))
        output[b, row, column] = linear("output", np.concatenate(mixed))
    return output


def test_equals_the_formula():
    layer, states = layer_and_states()
    expected = torch.from_numpy(in_numpy(layer.state_dict(), states.numpy()))
    torch.testing.assert_close(layer(states), expected)
    layer.dilation = 1
    assert not torch.allclose(layer(states), expected)  # the comparison sees a wrong dilation


def test_looking_changes_nothing_and_shows_the_weights():
    layer, states = layer_and_states()
    model = nn.Sequential(nn.LayerNorm(MODEL).double(), layer)
    quiet = model(states)
    with look(model) as seen:
        output = model(states)
    assert torch.equal(output, quiet)
    stages = seen["1"]
    assert stages.weights.shape == (2, HEADS, 20, 6) == (2, HEADS, *neighbors(GRID, SIZE, DILATION).shape)
    torch.testing.assert_close(stages.weights.sum(-1), torch.ones(2, HEADS, 20, dtype=torch.float64))
    torch.testing.assert_close(layer.output(stages.output.transpose(1, 2).flatten(2)).view_as(output), output)


def test_dropout_only_in_training():
    layer = NeighborhoodAttention(4, 1, size=(3,), dropout=0.5)
    states = torch.randn(1, 6, 4)
    layer.eval()
    assert torch.equal(layer(states), layer(states))
    layer.train()
    assert not torch.equal(layer(states), layer(states))


def test_reads_and_writes_natten():
    """The layout of its module: one `qkv` of three blocks, `rpb`, `proj`; computed here as that module does."""
    layer, states = layer_and_states()
    theirs = to_natten(layer.state_dict())
    assert {name: list(each.shape) for name, each in theirs.items()} == {
        "qkv.weight": [18, 6], "qkv.bias": [18], "proj.weight": [6, 6], "proj.bias": [6], "rpb": [2, 5, 3],
    }  # fmt: skip
    merged = states @ theirs["qkv.weight"].T + theirs["qkv.bias"]
    query, _, value = merged.reshape(2, *GRID, 3, HEADS, 3).permute(3, 0, 4, 1, 2, 5).unbind(0)
    torch.testing.assert_close(query.flatten(2, 3), layer._arguments(states)[0][0])
    torch.testing.assert_close(value.flatten(2, 3), layer._arguments(states)[0][2])
    back = from_natten(theirs)
    assert all(torch.equal(back[name], each) for name, each in layer.state_dict().items())
    fresh = NeighborhoodAttention(MODEL, HEADS, size=SIZE, dilation=DILATION).double()
    fresh.load_state_dict(back)
    assert torch.equal(fresh(states), layer(states))


def test_reads_and_writes_dinat():
    dinat = pytest.importorskip("transformers.models.dinat.modeling_dinat")
    config = dinat.DinatConfig()
    theirs = nn.Module()  # the module itself asks for NATTEN when it is built
    theirs.self = dinat.NeighborhoodAttention(config, MODEL, HEADS, 3, 1)
    theirs.output = dinat.NeighborhoodAttentionOutput(config, MODEL)
    layer = NeighborhoodAttention(MODEL, HEADS, size=(3, 3))
    layer.load_state_dict(from_dinat(theirs.state_dict()))
    theirs.load_state_dict(to_dinat(layer.state_dict()))


@pytest.mark.parametrize("shape", [(4, 5, 6), (1, 4, 5, 7), (1, 6, 4, 5)])
def test_states_of_another_form_are_refused(shape):
    layer, _ = layer_and_states()
    with pytest.raises(ValueError, match=r"\[\*batch, 2 axes of the grid, 6\] is needed"):
        layer(torch.zeros(shape, dtype=torch.float64))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="model 6 does not split into 4 heads"):
        NeighborhoodAttention(6, 4, size=(3,))
