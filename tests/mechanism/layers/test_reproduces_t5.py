"""transformers' T5 in our layers: encoder and decoder, one relative bias for all blocks, no scale, RMSNorm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.mechanism.layers.renaming import apart, renamed
from torch import nn

from intently.mechanism.layers import (
    Attend,
    CrossAttention,
    Decoder,
    Encoder,
    EncoderDecoder,
    FeedForward,
    GatedFeedForward,
    GrowingCache,
    MultiHeadAttention,
    TransformerBlock,
)
from intently.mechanism.positions import RelativeBias

transformers = pytest.importorskip("transformers")

MODEL, HEADS, WIDTH, HIDDEN, BLOCKS = 32, 4, 6, 48, 2
BUCKETS, FAR = 8, 12
SOURCE, TARGET = 17, 15  # longer than max_distance, so that the coarse buckets are read
SELF = {"q": "query", "k": "key", "v": "value", "o": "output"}


def names(last: int) -> dict[str, str]:
    """Their layer.0 is self-attention, layer.1 cross-attention in the decoder, the last one the feed-forward."""
    found = {r"final_layer_norm\.weight": r"norm.weight"}
    for theirs, role in SELF.items():
        found[rf"block\.(\d+)\.layer\.0\.SelfAttention\.{theirs}\.weight"] = rf"blocks.\1.attention.{role}.weight"
        found[rf"block\.(\d+)\.layer\.1\.EncDecAttention\.{theirs}\.weight"] = rf"blocks.\1.cross.{role}.weight"
    for theirs, role in {"wi": "inner", "wi_0": "gate", "wi_1": "inner", "wo": "outer"}.items():
        found[rf"block\.(\d+)\.layer\.{last}\.DenseReluDense\.{theirs}\.weight"] = (
            rf"blocks.\1.feed_forward.{role}.weight"
        )
    found[r"block\.(\d+)\.layer\.0\.layer_norm\.weight"] = r"blocks.\1.attention_norm.weight"
    found[r"block\.(\d+)\.layer\.1\.layer_norm\.weight"] = r"blocks.\1.cross_norm.weight"
    found[rf"block\.(\d+)\.layer\.{last}\.layer_norm\.weight"] = r"blocks.\1.feed_forward_norm.weight"
    return found


def theirs(feed_forward: str) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=40,
        d_model=MODEL,
        d_kv=WIDTH,
        d_ff=HIDDEN,
        num_layers=BLOCKS,
        num_heads=HEADS,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=FAR,
        feed_forward_proj=feed_forward,
        decoder_start_token_id=0,
        attn_implementation="eager",  # written out, where ours runs the fused kernel
    )
    model = transformers.T5Model(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif "relative_attention_bias" in name:
            nn.init.normal_(parameter)
        else:
            nn.init.normal_(parameter, std=0.1)
    nn.init.normal_(model.shared.weight)  # of unit scale, so that 1e-6 means float32 and nothing else
    return model.eval()


def ours(model: nn.Module, scale: float | None = 1.0, bidirectional: bool = True) -> EncoderDecoder:
    def block(relative: RelativeBias, crosses: bool) -> TransformerBlock:
        shape = {"width": WIDTH, "bias": False}
        hidden = (
            GatedFeedForward(MODEL, HIDDEN, lambda x: F.gelu(x, approximate="tanh"))
            if model.config.is_gated_act
            else FeedForward(MODEL, HIDDEN, F.relu, bias=False)
        )
        return TransformerBlock(
            MultiHeadAttention(MODEL, HEADS, attend=Attend(scale=scale, bias=relative), **shape),
            hidden,
            norms=[nn.RMSNorm(MODEL, eps=1e-6) for _ in range(3 if crosses else 2)],
            cross=CrossAttention(MODEL, HEADS, attend=Attend(scale=scale), **shape) if crosses else None,
        )

    def stack(kind: type, name: str, bidirectional: bool, crosses: bool) -> nn.Module:
        relative = RelativeBias(BUCKETS, FAR, heads=HEADS, bidirectional=bidirectional)  # one for all blocks
        made = kind([block(relative, crosses) for _ in range(BLOCKS)], norm=nn.RMSNorm(MODEL, eps=1e-6))
        state = renamed(model.state_dict(), names(2 if crosses else 1), under=name + ".")
        table = model.state_dict()[f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        made.load_state_dict(
            state | {f"blocks.{number}.attention.attend.bias.weight": table for number in range(BLOCKS)}
        )
        return made

    return EncoderDecoder(
        stack(Encoder, "encoder", bidirectional, crosses=False), stack(Decoder, "decoder", False, crosses=True)
    ).eval()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keep = torch.ones(2, SOURCE, dtype=torch.bool)
    keep[1, 11:] = False
    return torch.randint(1, 40, (2, SOURCE)), torch.randint(1, 40, (2, TARGET)), keep


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
@torch.no_grad()
def test_the_whole_model(feed_forward):
    model = theirs(feed_forward)
    source, target, keep = batch()
    expected = model(input_ids=source, attention_mask=keep.long(), decoder_input_ids=target, use_cache=False)
    result = ours(model)(source=model.shared(source), target=model.shared(target), source_keep=keep)
    assert apart(result, expected.last_hidden_state) < 1e-6
    encoded = ours(model).encoder(model.shared(source), keep=keep)
    assert apart(encoded[keep], expected.encoder_last_hidden_state[keep]) < 1e-6


@torch.no_grad()
def test_written_token_by_token():
    model = theirs("gated-gelu")
    source, target, keep = batch()
    expected = model(input_ids=source, attention_mask=keep.long(), decoder_input_ids=target, use_cache=False)
    layers = ours(model)
    memory = layers.decoder.read(layers.encoder(model.shared(source), keep=keep))
    caches = [GrowingCache() for _ in layers.decoder.blocks]
    steps = [
        layers.decoder(model.shared(token), source=memory, source_keep=keep, caches=caches)
        for token in target.split(1, dim=1)
    ]
    assert apart(torch.cat(steps, dim=1), expected.last_hidden_state) < 1e-6


@torch.no_grad()
def test_controls_the_comparison_notices_what_is_wrong():
    model = theirs("relu")
    source, target, keep = batch()
    expected = model(input_ids=source, attention_mask=keep.long(), decoder_input_ids=target, use_cache=False)

    def result(layers: EncoderDecoder, keep: torch.Tensor | None = keep) -> torch.Tensor:
        return layers(source=model.shared(source), target=model.shared(target), source_keep=keep)

    assert apart(result(ours(model)), expected.last_hidden_state) < 1e-6
    assert apart(result(ours(model, scale=None)), expected.last_hidden_state) > 1e-3
    assert apart(result(ours(model, bidirectional=False)), expected.last_hidden_state) > 1e-3
    assert apart(result(ours(model), keep=None), expected.last_hidden_state) > 1e-3
