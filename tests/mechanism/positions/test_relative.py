"""T5's relative bias against T5, and its buckets against a count by hand."""

from __future__ import annotations

import pytest
import torch

from intently.mechanism.positions import RelativeBias, relative_bucket


def test_buckets_by_hand():
    # Decoder, 8 buckets, far from 16 on: 0 to 3 exact, then 4·4^(k/4): from 4, 5.7, 8, 11.3 on, 16 and beyond in the last.
    offsets = -torch.arange(20)
    buckets = relative_bucket(offsets, buckets=8, max_distance=16, bidirectional=False).tolist()
    assert buckets == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7]
    # Keys after the query share bucket 0.
    assert relative_bucket(torch.arange(5), buckets=8, max_distance=16, bidirectional=False).tolist() == [0] * 5
    # Encoder, 8 buckets: four for each side, 0 and 1 exact; after the query they start at 4, and distance 0 is "before".
    both = relative_bucket(torch.tensor([-9, -1, 0, 1, 9]), buckets=8, max_distance=16, bidirectional=True)
    assert both.tolist() == [3, 1, 0, 5, 7]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (6, 17), (64, 1000)])
def test_buckets_equal_those_of_t5(bidirectional, buckets, max_distance):
    pytest.importorskip("transformers")
    from transformers.models.t5.modeling_t5 import T5Attention

    offsets = torch.arange(-2000, 2001)
    theirs = T5Attention._relative_position_bucket(offsets, bidirectional, buckets, max_distance)
    ours = relative_bucket(offsets, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    assert ours.equal(theirs)
    # The control: the offset with its sign the other way round, query - key, is told apart.
    flipped = relative_bucket(-offsets, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    assert not flipped.equal(theirs)


@pytest.mark.parametrize("decoder", [True, False])
def test_equals_the_bias_of_t5(decoder):
    pytest.importorskip("transformers")
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=8, d_kv=2, num_heads=4, is_decoder=decoder, relative_attention_num_buckets=16)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    torch.nn.init.normal_(theirs.relative_attention_bias.weight)
    ours = RelativeBias(16, 128, heads=4, bidirectional=not decoder)
    ours.load_state_dict(theirs.relative_attention_bias.state_dict())
    assert ours(torch.arange(9)[:, None], torch.arange(200)).equal(theirs.compute_bias(9, 200)[0])
    after_a_cache = theirs.compute_bias(2, 9, past_seen_tokens=7)[0]
    assert ours(torch.arange(7, 9)[:, None], torch.arange(9)).equal(after_a_cache)


def test_learns_and_compiles():
    bias = RelativeBias(8, 16, heads=2, bidirectional=True)
    plane = bias(torch.arange(3)[:, None], torch.arange(4))
    assert plane.shape == (2, 3, 4)
    plane.sum().backward()
    assert bias.weight.grad.sum().item() == 2 * 3 * 4
    compiled = torch.compile(bias, fullgraph=True, backend="eager")
    assert compiled(torch.arange(3)[:, None], torch.arange(4)).equal(plane)
    assert bias(torch.tensor(3), torch.tensor(1)).shape == (2,)  # scalars, for score mods


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: RelativeBias(2, 16, heads=1, bidirectional=True), "even number of at least 4"),
        (lambda: RelativeBias(1, 16, heads=1, bidirectional=False), "at least 2"),
        (lambda: RelativeBias(128, 32, heads=1, bidirectional=True), "Arguments swapped"),
        (lambda: RelativeBias(32, 128, heads=0, bidirectional=True), "heads is 0"),
    ],
)
def test_refusals_say_what_is_wrong(call, says):
    with pytest.raises(ValueError, match=says):
        call()
