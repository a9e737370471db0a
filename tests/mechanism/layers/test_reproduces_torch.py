"""torch's own modules, their weights in our layers, the same numbers in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.mechanism.layers.renaming import apart
from torch import nn

from intently import Mask
from intently.masks import from_key_padding, from_mha
from intently.mechanism.layers import (
    Attend,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    MultiHeadAttention,
    TransformerBlock,
    from_decoder_layer,
    from_encoder_layer,
    from_multihead_attention,
    look,
    to_decoder_layer,
    to_encoder_layer,
    to_multihead_attention,
)

BATCH, LENGTH, KEYS, MODEL, HEADS = 3, 6, 5, 16, 4
HIDE = torch.zeros(BATCH, LENGTH, dtype=torch.bool)  # torch's key_padding_mask: True = hidden
HIDE[0, 4:] = True
HIDE[2, 1:] = True
TRIANGLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)  # torch's attn_mask: True = hidden


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return apart(ours, theirs) < 1e-6


def scattered(module: nn.Module) -> nn.Module:
    """Biases and gains start as 0 and 1 in torch, and so would hide a mistake."""
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.0)
    return module.eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "attention", "both"])
def test_multihead_attention_on_itself(masks, batch_first, bias):
    theirs = scattered(nn.MultiheadAttention(MODEL, HEADS, bias=bias, batch_first=batch_first))
    ours = MultiHeadAttention.from_torch(theirs)
    states = torch.randn(BATCH, LENGTH, MODEL)
    hide = HIDE if masks in ("padding", "both") else None
    triangle = TRIANGLE if masks in ("attention", "both") else None
    mask = Mask.full()
    if hide is not None:
        mask &= from_key_padding(hide)
    if triangle is not None:
        mask &= from_mha(triangle)
    stream = states if batch_first else states.transpose(0, 1)
    expected, weights = theirs(
        stream, stream, stream, key_padding_mask=hide, attn_mask=triangle, average_attn_weights=False
    )
    expected = expected if batch_first else expected.transpose(0, 1)
    assert close(ours(states, mask=mask), expected)
    with look(ours) as seen:
        ours(states, mask=mask)
    assert close(seen["attend"].weights, weights)


@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 10}], ids=["packed", "separate"])
def test_multihead_attention_to_a_source(widths):
    theirs = scattered(nn.MultiheadAttention(MODEL, HEADS, batch_first=True, **widths))
    ours = CrossAttention.from_torch(theirs)
    receiving, source = torch.randn(BATCH, LENGTH, MODEL), torch.randn(BATCH, KEYS, theirs.kdim)
    hide = HIDE[:, :KEYS]
    expected = theirs(receiving, source, source, key_padding_mask=hide)[0]
    assert close(ours(receiving=receiving, source=source, mask=Mask.padding(keep=~hide)), expected)


def test_an_appended_key_of_zeros_is_a_sink_of_0():
    theirs = scattered(nn.MultiheadAttention(MODEL, HEADS, batch_first=True, add_zero_attn=True))
    states = torch.randn(BATCH, LENGTH, MODEL)
    expected = theirs(states, states, states, key_padding_mask=HIDE)[0]
    assert close(MultiHeadAttention.from_torch(theirs)(states, mask=Mask.padding(keep=~HIDE)), expected)


def test_what_has_no_place_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"bias_k is float32\[1, 1, 16\] \(add_bias_kv=True\)"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(MODEL, HEADS, add_bias_kv=True))
    with pytest.raises(ValueError, match=r"use CrossAttention\.from_torch"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(MODEL, HEADS, kdim=10, vdim=10))
    with pytest.raises(ValueError, match="keys of width 10 and values of width 9"):
        CrossAttention.from_torch(nn.MultiheadAttention(MODEL, HEADS, kdim=10, vdim=9))
    with pytest.raises(ValueError, match="no kv heads"):
        to_multihead_attention(MultiHeadAttention(MODEL, HEADS, kv_heads=2).state_dict())


def test_from_torch_takes_dtype_dropout_and_mode_along():
    theirs = nn.MultiheadAttention(MODEL, HEADS, dropout=0.3, dtype=torch.float64)
    ours = MultiHeadAttention.from_torch(theirs)
    assert ours.attend.dropout == 0.3
    assert ours.training
    assert ours.query.weight.dtype == torch.float64
    assert not MultiHeadAttention.from_torch(theirs.eval()).training


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("activation", [F.relu, F.gelu], ids=["relu", "gelu"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", ""])
def test_encoder_layer(norm_first, activation, masked):
    theirs = scattered(
        nn.TransformerEncoderLayer(MODEL, HEADS, 32, activation=activation, batch_first=True, norm_first=norm_first)
    )
    ours = TransformerBlock.classic(
        MODEL, HEADS, 32, activation=activation, placement="pre" if norm_first else "post"
    ).eval()
    ours.load_state_dict(from_encoder_layer(theirs.state_dict()))
    states = torch.randn(BATCH, LENGTH, MODEL)
    if masked:
        expected = theirs(states, src_mask=TRIANGLE, src_key_padding_mask=HIDE)
        assert close(ours(states, mask=Mask.causal() & Mask.padding(keep=~HIDE)), expected)
    else:
        assert close(ours(states), theirs(states))


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
def test_encoder(norm_first):
    layer = nn.TransformerEncoderLayer(MODEL, HEADS, 32, batch_first=True, norm_first=norm_first)
    last = nn.LayerNorm(MODEL)
    theirs = scattered(nn.TransformerEncoder(layer, 3, norm=last, enable_nested_tensor=False))
    placement = "pre" if norm_first else "post"
    ours = Encoder(
        [TransformerBlock.classic(MODEL, HEADS, 32, placement=placement) for _ in range(3)], norm=nn.LayerNorm(MODEL)
    ).eval()
    for block, each in zip(ours.blocks, theirs.layers, strict=True):
        block.load_state_dict(from_encoder_layer(each.state_dict()))
    ours.norm.load_state_dict(last.state_dict())
    states = torch.randn(BATCH, LENGTH, MODEL)
    expected = theirs(states, src_key_padding_mask=HIDE)
    assert close(ours(states, keep=~HIDE)[~HIDE], expected[~HIDE])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
def test_encoder_and_decoder(norm_first):
    theirs = scattered(nn.Transformer(MODEL, HEADS, 2, 2, 32, batch_first=True, norm_first=norm_first))
    placement = "pre" if norm_first else "post"

    def block(cross: CrossAttention | None = None) -> TransformerBlock:
        return TransformerBlock.classic(MODEL, HEADS, 32, cross=cross, placement=placement)

    ours = EncoderDecoder(
        Encoder([block() for _ in range(2)], norm=nn.LayerNorm(MODEL)),
        Decoder([block(CrossAttention(MODEL, HEADS)) for _ in range(2)], norm=nn.LayerNorm(MODEL)),
    ).eval()
    for mine, each in zip(ours.encoder.blocks, theirs.encoder.layers, strict=True):
        mine.load_state_dict(from_encoder_layer(each.state_dict()))
    for mine, each in zip(ours.decoder.blocks, theirs.decoder.layers, strict=True):
        mine.load_state_dict(from_decoder_layer(each.state_dict()))
    ours.encoder.norm.load_state_dict(theirs.encoder.norm.state_dict())
    ours.decoder.norm.load_state_dict(theirs.decoder.norm.state_dict())
    source, target = torch.randn(BATCH, KEYS, MODEL), torch.randn(BATCH, LENGTH, MODEL)
    hide = HIDE[:, :KEYS]
    expected = theirs(
        source,
        target,
        tgt_mask=TRIANGLE,
        src_key_padding_mask=hide,
        memory_key_padding_mask=hide,
        tgt_key_padding_mask=HIDE,
    )
    result = ours(source=source, target=target, source_keep=~hide, target_keep=~HIDE)
    assert close(result[~HIDE], expected[~HIDE])


@pytest.mark.parametrize(
    ("theirs", "there", "back"),
    [
        (nn.MultiheadAttention(MODEL, HEADS), from_multihead_attention, to_multihead_attention),
        (nn.MultiheadAttention(MODEL, HEADS, bias=False), from_multihead_attention, to_multihead_attention),
        (nn.MultiheadAttention(MODEL, HEADS, kdim=10, vdim=9), from_multihead_attention, to_multihead_attention),
        (nn.TransformerEncoderLayer(MODEL, HEADS, 32), from_encoder_layer, to_encoder_layer),
        (nn.TransformerEncoderLayer(MODEL, HEADS, 32, bias=False), from_encoder_layer, to_encoder_layer),
        (nn.TransformerDecoderLayer(MODEL, HEADS, 32), from_decoder_layer, to_decoder_layer),
    ],
    ids=["attention", "no bias", "separate", "encoder layer", "encoder layer, no bias", "decoder layer"],
)
def test_there_and_back_is_where_it_was(theirs, there, back):
    state = theirs.state_dict()
    again = back(there(state))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_controls_the_comparison_notices_what_is_wrong():
    theirs = scattered(nn.MultiheadAttention(MODEL, HEADS, batch_first=True))
    states = torch.randn(BATCH, LENGTH, MODEL)
    expected = theirs(states, states, states, key_padding_mask=HIDE)[0]
    state = from_multihead_attention(theirs.state_dict())
    right = Mask.padding(keep=~HIDE)

    def result(mask=right, attend=None, **changed) -> torch.Tensor:
        layer = MultiHeadAttention(MODEL, HEADS, attend=attend)
        layer.load_state_dict({**state, **changed})
        return layer(states, mask=mask)

    assert close(result(), expected)
    assert not close(result(mask=None), expected)
    assert not close(result(attend=Attend(scale=1.0)), expected)
    exchanged = {"query.weight": state["key.weight"], "key.weight": state["query.weight"]}
    assert not close(result(**exchanged), expected)
    interleaved = state["value.weight"].unflatten(0, (HEADS, -1)).transpose(0, 1).flatten(0, 1)
    assert not close(result(**{"value.weight": interleaved}), expected)

    layer = scattered(nn.TransformerEncoderLayer(MODEL, HEADS, 32, batch_first=True))
    block = TransformerBlock.classic(MODEL, HEADS, 32, placement="pre").eval()
    block.load_state_dict(from_encoder_layer(layer.state_dict()))
    assert not close(block(states), layer(states))
