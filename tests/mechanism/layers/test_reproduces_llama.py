"""transformers' Llama (grouped heads, rotary positions, SwiGLU) and Qwen3 (normalised queries and keys) in our layers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.mechanism.layers.renaming import apart, renamed
from torch import nn

from intently.mechanism.layers import Decoder, GrowingCache, MultiHeadAttention, TransformerBlock
from intently.mechanism.positions import Rotary
from intently.mechanism.steady import QKRMSNorm

transformers = pytest.importorskip("transformers")

MODEL, HEADS, KV_HEADS, WIDTH, HIDDEN, BLOCKS, LENGTH = 32, 4, 2, 8, 48, 2, 9
SIZES = {
    "vocab_size": 40,
    "hidden_size": MODEL,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
}
NAMES = {
    r"norm\.weight": r"norm.weight",
    r"layers\.(\d+)\.self_attn\.q_proj\.(.*)": r"blocks.\1.attention.query.\2",
    r"layers\.(\d+)\.self_attn\.k_proj\.(.*)": r"blocks.\1.attention.key.\2",
    r"layers\.(\d+)\.self_attn\.v_proj\.(.*)": r"blocks.\1.attention.value.\2",
    r"layers\.(\d+)\.self_attn\.o_proj\.(.*)": r"blocks.\1.attention.output.\2",
    r"layers\.(\d+)\.self_attn\.q_norm\.weight": r"blocks.\1.attention.qk_norm.query_gain",
    r"layers\.(\d+)\.self_attn\.k_norm\.weight": r"blocks.\1.attention.qk_norm.key_gain",
    r"layers\.(\d+)\.mlp\.gate_proj\.(.*)": r"blocks.\1.feed_forward.gate.\2",
    r"layers\.(\d+)\.mlp\.up_proj\.(.*)": r"blocks.\1.feed_forward.inner.\2",
    r"layers\.(\d+)\.mlp\.down_proj\.(.*)": r"blocks.\1.feed_forward.outer.\2",
    r"layers\.(\d+)\.input_layernorm\.(.*)": r"blocks.\1.attention_norm.\2",
    r"layers\.(\d+)\.post_attention_layernorm\.(.*)": r"blocks.\1.feed_forward_norm.\2",
}
KEEP = torch.ones(3, LENGTH, dtype=torch.bool)
KEEP[0, :4] = False
KEEP[2, :1] = False
TOKENS = torch.arange(3 * LENGTH).view(3, LENGTH) * 7 % 40


def theirs(kind: str) -> nn.Module:
    config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind](
        **SIZES, attn_implementation="eager"
    )
    model = {"llama": transformers.LlamaModel, "qwen3": transformers.Qwen3Model}[kind](config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    nn.init.normal_(model.embed_tokens.weight)  # of unit scale, so that 1e-6 means float32 and nothing else
    return model.eval()


def ours(model: nn.Module, kind: str, layout: str = "half") -> Decoder:
    def block() -> TransformerBlock:
        made = TransformerBlock.gated(MODEL, HEADS, HIDDEN, kv_heads=KV_HEADS)
        made.attention = MultiHeadAttention(
            MODEL,
            HEADS,
            kv_heads=KV_HEADS,
            width=WIDTH,
            bias=False,
            position=Rotary(WIDTH, layout=layout),
            qk_norm=QKRMSNorm(WIDTH) if kind == "qwen3" else None,
        )
        return made

    decoder = Decoder([block() for _ in range(BLOCKS)], norm=nn.RMSNorm(MODEL, eps=1e-6)).eval()
    decoder.load_state_dict(renamed(model.state_dict(), NAMES))
    return decoder


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@torch.no_grad()
def test_a_batch_padded_on_the_left(kind):
    model = theirs(kind)
    positions = (KEEP.long().cumsum(-1) - 1).clamp(min=0)
    expected = model(TOKENS, attention_mask=KEEP.long(), position_ids=positions, use_cache=False).last_hidden_state
    result = ours(model, kind)(model.embed_tokens(TOKENS), keep=KEEP)
    assert apart(result[KEEP], expected[KEEP]) < 1e-6


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@torch.no_grad()
def test_steps_with_a_cache_on_both_sides():
    model = theirs("llama")
    decoder = ours(model, "llama")
    caches, past = [GrowingCache() for _ in decoder.blocks], None
    for start, stop in [(0, 5), (5, 6), (6, 9)]:
        keep = KEEP[:, :stop]
        positions = (keep.long().cumsum(-1) - 1).clamp(min=0)[:, start:]
        step = model(
            TOKENS[:, start:stop],
            attention_mask=keep.long(),
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
        )
        past = step.past_key_values
        result = decoder(model.embed_tokens(TOKENS[:, start:stop]), keep=keep, caches=caches)
        new = keep[:, start:]
        assert apart(result[new], step.last_hidden_state[new]) < 1e-6


@torch.no_grad()
def test_controls_the_comparison_notices_what_is_wrong():
    model = theirs("llama")
    expected = model(TOKENS, use_cache=False).last_hidden_state
    states, right = model.embed_tokens(TOKENS), ours(model, "llama")
    assert apart(right(states), expected) < 1e-6
    assert apart(ours(model, "llama", layout="interleaved")(states), expected) > 1e-2

    tiled = ours(model, "llama")
    for block in tiled.blocks:  # kv heads repeated as 0 1 0 1 instead of 0 0 1 1
        order = block.attention.query.weight.unflatten(0, (HEADS, WIDTH))[[0, 2, 1, 3]].flatten(0, 1)
        block.attention.query.weight.copy_(order)
        output = block.attention.output.weight.unflatten(1, (HEADS, WIDTH))[:, [0, 2, 1, 3]].flatten(1, 2)
        block.attention.output.weight.copy_(output)
    assert apart(tiled(states), expected) > 1e-2

    unscaled = ours(model, "llama")
    for block in unscaled.blocks:
        block.attention.attend.scale = 1.0
    assert apart(unscaled(states), expected) > 1e-2


def published() -> list[Path]:
    named = os.environ.get("INTENTLY_MODELS")
    folders = sorted(Path(named).glob("*/config.json")) if named else []
    return [each.parent for each in folders if '"llama"' in each.read_text()]


@pytest.mark.skipif(not published(), reason="INTENTLY_MODELS names no folder with a Llama in it, such as SmolLM2")
@pytest.mark.parametrize("folder", published() or [Path("none")], ids=lambda folder: folder.name)
@torch.no_grad()
def test_published_weights(folder):
    """Dozens of blocks add up what float32 rounds, so the measure is how far their own two paths are apart."""
    model = transformers.LlamaModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    sizes = model.config
    rotary = getattr(sizes, "rope_parameters", None) or {"rope_theta": sizes.rope_theta}
    heads = sizes.num_attention_heads
    with torch.device("meta"):
        decoder = Decoder(
            [
                TransformerBlock.gated(
                    sizes.hidden_size,
                    heads,
                    sizes.intermediate_size,
                    kv_heads=sizes.num_key_value_heads,
                    position=Rotary(sizes.hidden_size // heads, base=rotary["rope_theta"]),
                    eps=sizes.rms_norm_eps,
                )
                for _ in range(sizes.num_hidden_layers)
            ],
            norm=nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps),
        ).eval()
    decoder.load_state_dict(renamed(model.state_dict(), NAMES), assign=True)
    tokens = torch.arange(3 * LENGTH).view(3, LENGTH) * 977 % sizes.vocab_size
    asked = {
        "attention_mask": KEEP.long(),
        "position_ids": (KEEP.long().cumsum(-1) - 1).clamp(min=0),
        "use_cache": False,
    }
    expected = model(tokens, **asked).last_hidden_state[KEEP]
    model.set_attn_implementation("sdpa")
    fused = model(tokens, **asked).last_hidden_state[KEEP]
    result = decoder(model.embed_tokens(tokens), keep=KEEP)[KEEP]
    assert 0 < apart(result, expected) < 4 * apart(fused, expected) < 1e-3
    vocabulary = model.embed_tokens.weight.T
    assert torch.equal((result @ vocabulary).argmax(-1), (expected @ vocabulary).argmax(-1))
