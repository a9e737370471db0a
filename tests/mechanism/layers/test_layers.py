"""The layers as modules: right against the functions, loud where miswired, and at home in autocast, compile and deepcopy."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from intently import Mask
from intently.mechanism import attention
from intently.mechanism.forms import Projections, cross_attention, multi_head_attention
from intently.mechanism.layers import (
    AdditiveAttention,
    Attend,
    CrossAttention,
    Decoder,
    Encoder,
    FeedForward,
    GatedFeedForward,
    GrowingCache,
    MultiHeadAttention,
    PreallocatedCache,
    TransformerBlock,
    greedy,
)
from intently.mechanism.positions import Rotary, positions_from_padding

LENGTH, MODEL = 6, 16


def projections(layer: MultiHeadAttention | CrossAttention) -> Projections:
    linear = layer.query, layer.key, layer.value, layer.output
    return Projections(*[each.weight for each in linear], *[each.bias for each in linear])


def test_a_layer_says_what_the_function_says():
    layer = MultiHeadAttention(MODEL, heads=4, kv_heads=2, width=3, value_width=5, attend=Attend(softcap=3.0)).double()
    states = torch.randn(2, LENGTH, MODEL).double()
    expected = multi_head_attention(states, projections(layer), heads=4, kv_heads=2, mask=Mask.causal(), softcap=3.0)
    assert torch.allclose(layer(states, mask=Mask.causal()), expected, atol=1e-12)
    assert torch.allclose(layer(states[0], mask=Mask.causal()), expected[0], atol=1e-12)  # no batch axis


def test_cross_attention_says_what_the_function_says():
    layer = CrossAttention(MODEL, heads=4, source_model=10, kv_heads=2).double()
    receiving, source = torch.randn(2, LENGTH, MODEL).double(), torch.randn(2, 4, 10).double()
    expected = cross_attention(
        receiving=receiving, source=source, projections=projections(layer), heads=4, kv_heads=2, mask=Mask.keys(0, 2)
    )
    assert torch.allclose(layer(receiving=receiving, source=source, mask=Mask.keys(0, 2)), expected, atol=1e-12)


@torch.no_grad()
def test_additive_attention_written_out_in_loops():
    layer = AdditiveAttention(4, hidden=3, source_model=5).double()
    receiving, source = torch.randn(1, 2, 4).double(), torch.randn(1, 3, 5).double()
    result = layer(receiving=receiving, source=source, mask=torch.tensor([True, True, False]))
    for row in range(2):
        energies = [
            float(layer.weight @ torch.tanh(layer.query.weight @ receiving[0, row] + layer.key.weight @ source[0, key]))
            for key in range(2)
        ]
        shares = torch.tensor(energies).double().exp()
        expected = (shares[0] * source[0, 0] + shares[1] * source[0, 1]) / shares.sum()
        assert torch.allclose(result[0, row], expected, atol=1e-12)


def test_feed_forwards_by_hand():
    plain, gated = FeedForward(1, 1, F.relu, bias=False), GatedFeedForward(1, 1, torch.exp)
    for layer in (plain, gated):
        for number, parameter in enumerate(layer.parameters()):
            nn.init.constant_(parameter, number + 2.0)
    assert plain(torch.tensor([[5.0], [-5.0]])).flatten().tolist() == [30.0, 0.0]  # 3 · relu(2 · x)
    assert gated(torch.tensor([[0.5]])).item() == pytest.approx(4 * 2.718281828 * 1.5)  # 4 · exp(2 · x) · (3 · x)


def test_one_tensor_in_both_places_is_refused():
    layer, states = CrossAttention(MODEL, heads=4), torch.randn(1, 3, MODEL)
    with pytest.raises(ValueError, match="a stream would ask itself"):
        layer(receiving=states, source=states)
    with pytest.raises(TypeError, match="positional"):
        layer(states, states)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiHeadAttention(10, heads=4), "model 10 does not split into 4 heads of equal width; give width="),
        (lambda: MultiHeadAttention(16, heads=4, kv_heads=3), "4 heads are no multiple of 3 kv heads"),
        (lambda: CrossAttention(16, heads=0), "0 heads are no multiple of 0 kv heads"),
        (
            lambda: TransformerBlock(nn.Identity(), nn.Identity(), norms=[nn.Identity()]),
            "1 norms for 2 parts; one each is needed",
        ),
        (lambda: TransformerBlock.classic(8, 2, 8, placement="middle"), "placement is 'middle'"),
        (
            lambda: MultiHeadAttention(8, heads=2)(torch.zeros(1, 3, 9)),
            r"float32\[1, 3, 9\]; \[\*batch, length, 8\] is needed",
        ),
        (
            lambda: CrossAttention(8, heads=2, source_model=6)(
                receiving=torch.zeros(1, 3, 6), source=torch.zeros(1, 3, 8)
            ),
            r"receiving is float32\[1, 3, 6\]; \[\*batch, length, 8\] is needed",
        ),
        (
            lambda: TransformerBlock.classic(8, 2, 8)(torch.zeros(1, 3, 8), source=torch.zeros(1, 3, 8)),
            "this block has no cross-attention and would ignore it",
        ),
        (
            lambda: TransformerBlock.classic(8, 2, 8, cross=CrossAttention(8, 2))(torch.zeros(1, 3, 8)),
            "this block has cross-attention, so it needs source=",
        ),
        (
            lambda: Decoder([TransformerBlock.classic(8, 2, 8)]).read(torch.zeros(1, 3, 8)),
            "block 0 has no cross-attention",
        ),
    ],
)
def test_what_does_not_fit_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_decoder_is_causal_though_its_blocks_say_nothing():
    model = Decoder(TransformerBlock.gated(MODEL, heads=4, hidden=24) for _ in range(2)).double()
    states = torch.randn(1, LENGTH, MODEL).double().requires_grad_()
    for position in range(LENGTH):
        (gradient,) = torch.autograd.grad(model(states)[0, position].sum(), states)
        assert (gradient[0].abs().sum(dim=-1) > 0).tolist() == [other <= position for other in range(LENGTH)]


def test_an_encoder_reads_all_but_the_pads():
    keep = torch.tensor([[True] * 4 + [False] * 2])
    model = Encoder(TransformerBlock.classic(MODEL, heads=4, hidden=24) for _ in range(2)).double()
    states = torch.randn(1, LENGTH, MODEL).double().requires_grad_()
    for position in range(4):
        # Weighed unevenly: what a norm gives sums to nothing.
        result = model(states, keep=keep)[0, position] @ torch.arange(MODEL).double()
        (gradient,) = torch.autograd.grad(result, states)
        assert (gradient[0].abs().sum(dim=-1) > 1e-12).tolist() == keep[0].tolist()
    alone = model(states[:, :4])
    assert torch.allclose(model(states, keep=keep)[:, :4], alone, atol=1e-12)
    narrow = model(states, keep=keep, mask=Mask.window(1, 1))
    assert torch.allclose(narrow[:, :4], model(states[:, :4], mask=Mask.window(1, 1)), atol=1e-12)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_dropout_leaves_evaluation_alone(placement):
    block = TransformerBlock.classic(MODEL, 4, 24, placement=placement, dropout=0.5, attend=Attend(dropout=0.5))
    states = torch.randn(1, LENGTH, MODEL)
    assert not torch.equal(block(states), block(states))
    block.eval()
    assert torch.equal(block(states), block(states))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_the_truth(dtype):
    layer = MultiHeadAttention(MODEL, heads=4, position=Rotary(4), attend=Attend(mask=Mask.causal())).to(dtype)
    states = torch.randn(2, LENGTH, MODEL, dtype=dtype)
    truth = copy.deepcopy(layer).double()(states.double())
    result = layer(states)
    assert result.dtype == dtype
    assert (result.double() - truth).abs().max() < 8 * torch.finfo(dtype).eps


def test_autocast_casts_the_projections_and_nothing_breaks():
    layer = MultiHeadAttention(MODEL, heads=4, position=Rotary(4), attend=Attend(mask=Mask.causal()))
    states = torch.randn(2, LENGTH, MODEL)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(states)
    assert result.dtype == torch.bfloat16
    assert (result.float() - layer(states)).abs().max() < 0.05


def test_a_decoder_is_one_graph_to_the_compiler():
    model = Decoder(TransformerBlock.gated(MODEL, 4, 24, kv_heads=2, position=Rotary(4)) for _ in range(2)).eval()
    states = torch.randn(2, LENGTH, MODEL)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(states), model(states), atol=1e-6)


def test_a_layer_is_copied_and_saved_whole(tmp_path):
    layer = MultiHeadAttention(MODEL, heads=4, attend=Attend(mask=Mask.causal(), sink=nn.Parameter(torch.randn(4))))
    states = torch.randn(1, LENGTH, MODEL)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = MultiHeadAttention(MODEL, heads=4, attend=Attend(mask=Mask.causal(), sink=nn.Parameter(torch.zeros(4))))
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    for each in (other, copy.deepcopy(layer)):
        assert torch.equal(each(states), layer(states))


def test_backends_are_chosen_by_the_layer():
    states = torch.randn(1, 2, LENGTH, 4)
    for backend in ("stages", "fused", "blocked", "math", "oracle"):
        attend = Attend(mask=Mask.causal() & Mask.window(3), backend=backend)
        expected = attention(states, states, states, mask=attend.mask, backend="stages")
        assert torch.allclose(attend(states, states, states), expected, atol=1e-6)


@pytest.mark.parametrize("make", [GrowingCache, lambda: PreallocatedCache(LENGTH + 5)])
def test_writing_on_says_what_reading_it_whole_says(make):
    """Greedy steps with caches against a model that reads everything anew; prompts of two lengths, padded on the left."""
    vocabulary, new = 11, 5
    embed, head = nn.Embedding(vocabulary, MODEL), nn.Linear(MODEL, vocabulary)
    model = Decoder(TransformerBlock.gated(MODEL, 4, 24, kv_heads=2, position=Rotary(4)) for _ in range(2))
    prompt = torch.randint(vocabulary, (2, LENGTH))
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    keep[0, :2] = False
    caches, kept = [make() for _ in model.blocks], [keep]

    def step(tokens: torch.Tensor) -> torch.Tensor:
        if caches[0].length:
            kept.append(torch.ones(2, 1, dtype=torch.bool))
        return head(model(embed(tokens), keep=torch.cat(kept, dim=1), caches=caches))

    written = greedy(step, prompt, new)
    assert torch.equal(written[:, :LENGTH], prompt)
    with torch.no_grad():
        for row, pads in enumerate([2, 0]):
            tokens = prompt[row, pads:]
            for _ in range(new):
                logits = head(model(embed(tokens[None])))
                tokens = torch.cat([tokens, logits[0, -1].argmax()[None]])
            assert torch.equal(tokens, written[row, pads:])
    assert positions_from_padding(keep)[0, 2] == 0
