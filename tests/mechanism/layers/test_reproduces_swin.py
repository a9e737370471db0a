"""transformers' Swin in our layers: windows, shifted in every other block, with a learned bias for every offset."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.mechanism.layers.renaming import apart, renamed
from torch import nn

from intently.mechanism.layers import (
    AttendShiftedWindows,
    Encoder,
    FeedForward,
    MultiHeadAttention,
    TransformerBlock,
    look,
)

transformers = pytest.importorskip("transformers")

MODEL, HEADS, GRID, WINDOW, BLOCKS = 16, 4, (6, 9), (3, 3), 2
# Two spellings: transformers before and after its attention classes were made alike.
NAMES = {
    r"blocks\.(\d+)\.layernorm_before\.(.*)": r"blocks.\1.attention_norm.\2",
    r"blocks\.(\d+)\.layernorm_after\.(.*)": r"blocks.\1.feed_forward_norm.\2",
    r"blocks\.(\d+)\.attention\.self\.(query|key|value)\.(.*)": r"blocks.\1.attention.\2.\3",
    r"blocks\.(\d+)\.attention\.q_proj\.(.*)": r"blocks.\1.attention.query.\2",
    r"blocks\.(\d+)\.attention\.k_proj\.(.*)": r"blocks.\1.attention.key.\2",
    r"blocks\.(\d+)\.attention\.v_proj\.(.*)": r"blocks.\1.attention.value.\2",
    r"blocks\.(\d+)\.attention\.(?:output\.dense|o_proj)\.(.*)": r"blocks.\1.attention.output.\2",
    r"blocks\.(\d+)\.attention\..*relative_position_bias_table": r"blocks.\1.attention.attend.table",
    r"blocks\.(\d+)\.(?:intermediate\.dense|mlp\.fc1)\.(.*)": r"blocks.\1.feed_forward.inner.\2",
    r"blocks\.(\d+)\.(?:output\.dense|mlp\.fc2)\.(.*)": r"blocks.\1.feed_forward.outer.\2",
}


def theirs() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=36,
        patch_size=4,
        embed_dim=MODEL,
        depths=[BLOCKS],
        num_heads=[HEADS],
        window_size=WINDOW[0],
        attn_implementation="eager",
    )
    stage = transformers.SwinModel(config).eval().encoder.layers[0]
    for (
        name,
        parameter,
    ) in stage.named_parameters():  # states of unit scale, so that 1e-6 means float32 and nothing else
        if "norm" in name and name.endswith("weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=1.0 if "table" in name else 0.1)
    return stage


def ours(stage: nn.Module, shift: int = 1) -> Encoder:
    def block(number: int) -> TransformerBlock:
        attend = AttendShiftedWindows(HEADS, grid=GRID, window=WINDOW, shift=[shift if number % 2 else 0] * 2)
        return TransformerBlock(
            MultiHeadAttention(MODEL, HEADS, attend=attend),
            FeedForward(MODEL, 4 * MODEL, F.gelu),
            norms=[nn.LayerNorm(MODEL), nn.LayerNorm(MODEL)],
        )

    encoder = Encoder(block(number) for number in range(BLOCKS)).eval()
    encoder.load_state_dict(renamed(stage.state_dict(), NAMES))
    return encoder


@torch.no_grad()
def test_two_blocks_on_a_grid_that_is_not_square():
    stage, states = theirs(), torch.randn(2, GRID[0] * GRID[1], MODEL)
    assert apart(ours(stage)(states), stage(states, GRID)[0]) < 1e-6


@torch.no_grad()
def test_the_stages_of_the_whole_grid_say_what_the_windows_say():
    encoder, states = ours(theirs()), torch.randn(2, GRID[0] * GRID[1], MODEL)
    with look(encoder) as seen:
        plain = encoder(states)
    for number, block in enumerate(encoder.blocks):
        attention = block.attention
        dense = seen[f"blocks.{number}.attention.attend"]
        assert torch.equal(dense.weights > 0, dense.logits > float("-inf"))
        states = states + attention.output(dense.output.transpose(1, 2).flatten(2))
        states = states + block.feed_forward(block.feed_forward_norm(states))
    assert apart(states, plain) < 1e-5


@torch.no_grad()
def test_controls_the_comparison_notices_what_is_wrong():
    stage, states = theirs(), torch.randn(2, GRID[0] * GRID[1], MODEL)
    expected = stage(states, GRID)[0]
    assert apart(ours(stage, shift=0)(states), expected) > 1e-3
    assert apart(ours(stage, shift=2)(states), expected) > 1e-3
    mirrored = ours(stage)
    for block in mirrored.blocks:  # the table read as key - query
        block.attention.attend.table.copy_(block.attention.attend.table.flip(0))
    assert apart(mirrored(states), expected) > 1e-3


def test_what_windows_have_no_place_for_is_refused():
    attend, states = AttendShiftedWindows(1, grid=[4], window=[2], shift=[1]), torch.zeros(1, 1, 4, 2)
    with pytest.raises(ValueError, match="mask is given"):
        attend(states, states, states, mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="a cache is given"):
        attend(states, states, states, query_start=1)
