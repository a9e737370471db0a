"""transformers' BERT in our layers: a small random one, and MiniLM with its published weights where a folder has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.mechanism.layers.renaming import apart, renamed
from torch import nn

from intently.mechanism.layers import Attend, Encoder, TransformerBlock

transformers = pytest.importorskip("transformers")

NAMES = {
    r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)\.(.*)": r"blocks.\1.attention.\2.\3",
    r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(.*)": r"blocks.\1.attention.output.\2",
    r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.(.*)": r"blocks.\1.attention_norm.\2",
    r"encoder\.layer\.(\d+)\.intermediate\.dense\.(.*)": r"blocks.\1.feed_forward.inner.\2",
    r"encoder\.layer\.(\d+)\.output\.dense\.(.*)": r"blocks.\1.feed_forward.outer.\2",
    r"encoder\.layer\.(\d+)\.output\.LayerNorm\.(.*)": r"blocks.\1.feed_forward_norm.\2",
}


def ours(model: nn.Module, scale: float | None = None, placement: str = "post") -> Encoder:
    sizes = model.config
    encoder = Encoder(
        TransformerBlock.classic(
            sizes.hidden_size,
            sizes.num_attention_heads,
            sizes.intermediate_size,
            activation=nn.functional.gelu,
            placement=placement,
            attend=Attend(scale=scale),
        )
        for _ in range(sizes.num_hidden_layers)
    ).eval()
    for module in encoder.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = sizes.layer_norm_eps
    encoder.load_state_dict(renamed(model.state_dict(), NAMES))
    return encoder


def small() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        initializer_range=0.15,
        attn_implementation="eager",  # written out, where ours runs the fused kernel
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.0)
    return model.eval()


def batch(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    keep = torch.ones(3, 12, dtype=torch.bool)
    keep[1, 7:] = False
    keep[2, 1:] = False
    return torch.arange(36).view(3, 12) * 977 % vocabulary, keep


@torch.no_grad()
def test_a_small_one_with_pads():
    model = small()
    tokens, keep = batch(40)
    expected = model(tokens, attention_mask=keep.long()).last_hidden_state
    result = ours(model)(model.embeddings(tokens), keep=keep)
    assert apart(result[keep], expected[keep]) < 1e-6


@torch.no_grad()
def test_controls_the_comparison_notices_what_is_wrong():
    model = small()
    tokens, keep = batch(40)
    expected = model(tokens, attention_mask=keep.long()).last_hidden_state
    states = model.embeddings(tokens)
    assert apart(ours(model, scale=1.0)(states, keep=keep)[keep], expected[keep]) > 1e-3
    assert apart(ours(model)(states)[keep], expected[keep]) > 1e-3
    assert apart(ours(model, placement="pre")(states, keep=keep)[keep], expected[keep]) > 1e-3


def published() -> list[Path]:
    named = os.environ.get("INTENTLY_MODELS")
    folders = sorted(Path(named).glob("*/config.json")) if named else []
    return [each.parent for each in folders if '"bert"' in each.read_text()]


@pytest.mark.skipif(not published(), reason="INTENTLY_MODELS names no folder with a BERT in it, such as MiniLM")
@pytest.mark.parametrize("folder", published() or [Path("none")], ids=lambda folder: folder.name)
@torch.no_grad()
def test_published_weights(folder):
    model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokens, keep = batch(model.config.vocab_size)
    expected = model(tokens, attention_mask=keep.long()).last_hidden_state
    result = ours(model)(model.embeddings(tokens), keep=keep)
    assert apart(result[keep], expected[keep]) < 1e-6
