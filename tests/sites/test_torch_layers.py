"""torch's own layers, on the fast path and off it: one site a call, named by the module that makes it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from intently.sites import find

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]

WIDTH, HEADS = 12, 4
SCALE = 3**-0.5  # 1 / √(12 / 4)


def batch(length: int = 5, samples: int = 2, *, first: bool = True) -> torch.Tensor:
    return torch.randn(samples, length, WIDTH) if first else torch.randn(length, samples, WIDTH)


def fields(site):
    return site.path, site.role, site.heads, site.head_dim, site.queries, site.keys, site.mask


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("looks", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_multihead(batch_first, looks, grad, training):
    from intently.sites import Settings, Sizes, tracing

    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).train(training)
    x = batch(first=batch_first)
    with torch.set_grad_enabled(grad), tracing(layer, {"query": x}, Settings(sizes=Sizes(2, frozenset({5})))) as tracer:
        layer(x, x, x, need_weights=looks)
    (site,) = tracer.sites()
    assert fields(site) == ("(root)", "self", HEADS, WIDTH // HEADS, 5, 5, "full")
    assert site.scale.value == pytest.approx(SCALE, rel=1e-4)
    assert (site.dropout, site.rows.are_tokens) == (0.0, True)


@pytest.mark.parametrize("looks", [True, False], ids=["weights", "no weights"])
def test_multihead_reads_its_masks(looks):
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x, pads, future = batch(), torch.zeros(2, 5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool).triu(1)
    pads[1, 3:] = True
    (site,) = find(layer, x, x, x, key_padding_mask=pads, attn_mask=future, need_weights=looks)
    wanted = (~pads)[:, None, None, :] & ~future
    assert torch.equal(site.visible, wanted.expand(2, HEADS, 5, 5))


@pytest.mark.parametrize("looks", [True, False], ids=["weights", "no weights"])
def test_multihead_masks_are_seen_to_enter(looks):
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x, pads, future = batch(), torch.zeros(2, 5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool).triu(1)
    (site,) = find(layer, x, x, x, key_padding_mask=pads, attn_mask=future, need_weights=looks)
    assert {"key_padding_mask", "attn_mask"} <= site.side


@pytest.mark.parametrize("make", [nn.MultiheadAttention, lambda w, h: encoder()], ids=["attention", "encoder"])
def test_sequence_first_layers_attend_over_positions(make):
    layer, x = make(WIDTH, HEADS).eval(), batch(first=False)
    (site, *_) = find(layer, x, x, x) if isinstance(layer, nn.MultiheadAttention) else find(layer, x)
    assert (site.heads, site.queries, site.rows.are_tokens) == (HEADS, 5, True)
    assert site.visible.shape == (2, HEADS, 5, 5)


def test_multihead_on_a_memory_of_another_width():
    layer = nn.MultiheadAttention(WIDTH, HEADS, kdim=7, vdim=9, batch_first=True).eval()
    (site,) = find(layer, batch(), torch.randn(2, 8, 7), torch.randn(2, 8, 9))
    assert fields(site) == ("(root)", "cross", HEADS, WIDTH // HEADS, 5, 8, "full")


def test_multihead_dropout_is_only_there_in_training():
    layer = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.25, batch_first=True)
    x = batch()
    for looks in (True, False):
        assert find(layer.train(), x, x, x, need_weights=looks)[0].dropout == 0.25
        assert find(layer.eval(), x, x, x, need_weights=looks)[0].dropout == 0.0


def encoder(layers: int = 2, **options) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 20, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, layers)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
def test_encoder(batch_first, training):
    model = encoder(batch_first=batch_first).train(training)
    sites = find(model, batch(first=batch_first))
    assert [fields(site) for site in sites] == [
        (f"layers.{i}.self_attn", "self", HEADS, WIDTH // HEADS, 5, 5, "full") for i in range(2)
    ]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_encoder_with_pads(training):
    model = encoder(batch_first=True).train(training)
    pads = torch.zeros(2, 5, dtype=torch.bool)
    pads[0, 3:] = True
    for site in find(model, batch(), src_key_padding_mask=pads):
        real = (~pads)[:, None, None, :].expand(2, HEADS, 5, 5)
        assert torch.equal(site.visible[0], real[0]) and torch.equal(site.visible[1], real[1])
        assert "src_key_padding_mask" in site.side


def test_encoder_with_a_triangle():
    model = encoder(batch_first=True).eval()
    triangle = nn.Transformer.generate_square_subsequent_mask(5)
    for options in ({}, {"is_causal": True}):
        assert [s.mask for s in find(model, batch(), mask=triangle, **options)] == ["causal", "causal"]


def test_encoder_layer():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 20, batch_first=True).eval()
    (site,) = find(layer, batch())
    assert fields(site) == ("self_attn", "self", HEADS, WIDTH // HEADS, 5, 5, "full")


def test_decoder_layer():
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 20, batch_first=True).eval()
    triangle = nn.Transformer.generate_square_subsequent_mask(5)
    own, cross = find(layer, batch(), batch(8), tgt_mask=triangle)
    assert fields(own) == ("self_attn", "self", HEADS, WIDTH // HEADS, 5, 5, "causal")
    assert fields(cross) == ("multihead_attn", "cross", HEADS, WIDTH // HEADS, 5, 8, "full")


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
def test_transformer(batch_first):
    model = nn.Transformer(WIDTH, HEADS, 1, 2, 20, dropout=0.0, batch_first=batch_first).eval()
    sites = find(model, batch(8, first=batch_first), batch(5, first=batch_first))
    assert [(s.path, s.role, s.queries, s.keys) for s in sites] == [
        ("encoder.layers.0.self_attn", "self", 8, 8),
        ("decoder.layers.0.self_attn", "self", 5, 5), ("decoder.layers.0.multihead_attn", "cross", 5, 8),
        ("decoder.layers.1.self_attn", "self", 5, 5), ("decoder.layers.1.multihead_attn", "cross", 5, 8),
    ]  # fmt: skip
