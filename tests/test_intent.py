"""What an intent says of itself, and how it is read from words."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from intently import Intent, Mask
from intently.masks import MaskSyntaxError
from intently.promises.cells import reach_through


@pytest.mark.parametrize("text", ["encoder-decoder", "Encoder_Decoder", " seq2seq ", "encoder decoder"])
def test_encoder_decoder(text):
    intent = Intent.parse(text)
    assert intent == Intent.encoder_decoder()
    assert torch.equal(intent.mask.matrix(4), torch.ones(4, 4).tril().bool())
    assert intent.encoder.matrix(4).all() and intent.memory.matrix(4, 6).all()
    assert str(intent) == "encoder-decoder: causal decoder, full encoder, full memory"


def test_a_phrase():
    intent = Intent.parse("causal & window(2)")
    assert torch.equal(intent.mask.matrix(4), torch.ones(4, 4).tril().triu(-1).bool())
    assert str(intent) == "causal & window(2)"
    assert (intent.encoder, intent.scale, intent.scale_is_free, intent.waived, intent.origin) == (
        None,
        None,
        False,
        {},
        "stated",
    )


def test_words_that_mean_nothing():
    with pytest.raises(MaskSyntaxError):
        Intent.parse("casual")


@pytest.mark.parametrize(
    ("intent", "causal"),
    [
        (Intent(), None), (Intent(Mask.causal()), True), (Intent(Mask.full()), False), (Intent.encoder_decoder(), True),
        (Intent(Mask.causal() & Mask.window(3)), True), (Intent.parse("prefix(3)"), False),
        (Intent.parse("window(2, 2)"), False),
        (Intent.parse("causal & documents(5, 7)"), True),
    ],
    ids=str,
)  # fmt: skip
def test_is_causal(intent, causal):
    assert intent.is_causal is causal


def test_nothing_stated():
    assert str(Intent()) == "not stated"


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Intent().scale = 2.0


WINDOW = Mask.causal() & Mask.window(4)


def test_by_layer():
    intent = Intent(layers=(WINDOW, WINDOW, Mask.causal(), WINDOW))
    assert intent.mask == Mask.causal()
    assert [intent.mask_at(f"model.layers.{n}.attn") for n in range(5)] == [WINDOW, WINDOW, Mask.causal(), WINDOW, None]
    assert intent.mask_at("(root)#2") == Mask.causal()
    assert intent.mask_at("model.conv1d.attn") is None
    assert str(intent) == "causal & window(4) in layers 0–1, 3, causal in layer 2"
    assert intent.is_windowed
    assert intent.is_causal


def test_layers_of_which_none_is_the_widest():
    intent = Intent(layers=(WINDOW, Mask.causal() & Mask.chunks(3)))
    assert torch.equal(intent.mask.matrix(9), WINDOW.matrix(9) | (Mask.causal() & Mask.chunks(3)).matrix(9))


def test_one_mask_for_all_layers():
    intent = Intent(WINDOW)
    assert intent.mask_at("a.7.b") == intent.mask_at("(root)") == WINDOW
    assert Intent().mask_at("a.0") is None
    assert not Intent(Mask.causal()).is_windowed
    assert str(Intent(layers=(WINDOW, WINDOW))) == str(WINDOW)


def test_reach_through_layers():
    """Two windows of 3 keys reach 4 back, as one of 5 does; a full layer among them reaches all."""
    narrow = Mask.causal() & Mask.window(3)
    two = reach_through([narrow, narrow], 9)
    assert torch.equal(two, (Mask.causal() & Mask.window(5)).matrix(9))
    assert torch.equal(reach_through([narrow, Mask.causal(), narrow], 9), Mask.causal().matrix(9))
    # A chain may pass through positions that no single mask joins to the output.
    assert torch.equal(reach_through([Mask.keys(0)], 3), Mask.keys(0).matrix(3) | torch.eye(3).bool())
    assert torch.equal(
        reach_through([Mask.explicit(torch.eye(3).bool().roll(1, 0)), Mask.keys(1)], 3),
        torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]]).bool(),
    )
