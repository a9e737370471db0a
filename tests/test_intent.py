"""What an intent says of itself, and how it is read from words."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from intently import Intent, Mask
from intently.masks import MaskSyntaxError


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
