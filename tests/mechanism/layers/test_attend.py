"""`Attend`: masks and biases of layer and call are joined, and cut to the part of the sequence that a call brings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intently import Mask
from intently.mechanism import attention, choose_backend
from intently.mechanism.layers import Attend
from intently.mechanism.positions import alibi

SMALL = settings(max_examples=40, deadline=None, derandomize=True)
LENGTH = 7
VALUE = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 1, 4, 1)
ALIKE = torch.zeros(1, 1, 4, 2)


def tensors(heads: int = 2, kv_heads: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = 3, kv_heads, LENGTH, 4
    return torch.randn(3, heads, LENGTH, 4).double(), torch.randn(shape).double(), torch.randn(shape).double()


MASKS = st.sampled_from(
    [
        Mask.full(),
        Mask.causal(),
        Mask.causal(1),
        Mask.causal() & Mask.window(3),
        Mask.window(2, 1),
        Mask.prefix(3),
        Mask.documents(3, 4),
        Mask.padding([7, 4, 0]),
        Mask.per_head(Mask.causal(), Mask.window(1, 1)),
    ]
)


@SMALL
@given(own=st.none() | MASKS, given_mask=st.none() | MASKS, as_tensor=st.booleans(), cut=st.integers(0, LENGTH - 1))
def test_any_part_of_the_queries_says_what_the_whole_says(own, given_mask, as_tensor, cut):
    query, key, value = tensors()
    full = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    planes = [full if each is None else each.matrix(LENGTH) for each in (own, given_mask)]
    expected = attention(query, key, value, mask=planes[0] & planes[1], backend="stages")
    attend = Attend(mask=own)
    whole, part = given_mask, given_mask
    if as_tensor and given_mask is not None:
        whole, part = planes[1], planes[1][..., cut:, :]
    assert torch.allclose(attend(query, key, value, mask=whole), expected, atol=1e-12)
    result = attend(query[:, :, cut:], key, value, mask=part, query_start=cut)
    assert torch.allclose(result, expected[:, :, cut:], atol=1e-12)


def test_four_tokens_by_hand():
    attend = Attend(mask=Mask.causal())
    assert attend(ALIKE, ALIKE, VALUE).flatten().tolist() == [1.0, 5.5, 37.0, 277.75]
    assert attend(ALIKE, ALIKE, VALUE, mask=~Mask.keys(0)).flatten().tolist() == [0.0, 10.0, 55.0, 370.0]
    assert attend(ALIKE[:, :, 2:], ALIKE, VALUE, query_start=2).flatten().tolist() == [37.0, 277.75]
    last = Attend(mask=Mask.causal() & Mask.window(2))
    assert last(ALIKE[:, :, 3:], ALIKE[:, :, 2:], VALUE[:, :, 2:], query_start=3, key_start=2).item() == 550.0
    # One more share, which carries nothing: (1 + 10 + 100 + 1000) / 5.
    assert Attend(sink=0.0)(ALIKE, ALIKE, VALUE)[0, 0, 0].item() == pytest.approx(222.2)


def test_biases_of_layer_and_call_are_added_and_cut():
    query, key, value = tensors()
    slope, distance = alibi(2), torch.arange(LENGTH)
    plane = slope(distance[:, None], distance)
    extra = torch.randn(LENGTH, LENGTH).double()
    attend = Attend(bias=slope)
    expected = attention(query, key, value, bias=plane + extra)
    assert torch.allclose(attend(query, key, value, bias=extra), expected)
    step = attend(query[:, :, 5:], key, value, bias=extra[5:], query_start=5)
    assert torch.allclose(step, expected[:, :, 5:])
    step = attend(query[:, :, 5:], key[:, :, 3:], value[:, :, 3:], mask=Mask.window(3), query_start=5, key_start=3)
    expected = attention(query, key, value, bias=plane, mask=Mask.window(3))[:, :, 5:]
    assert torch.allclose(step, expected)


def test_kernels_that_know_the_triangle_by_name_still_see_it():
    """A whole causal sequence reaches `attention` as a `Mask`, and the newest query of one needs no mask at all."""
    attend = Attend(mask=Mask.causal())
    query, key, value = tensors()
    whole = attend._arguments(query, key, value, None, None, 0, 0)
    assert whole["mask"] == Mask.causal()
    assert attend._arguments(query, key, value, Mask.causal(), None, 0, 0)["mask"] == Mask.causal()
    step = attend._arguments(query[:, :, -1:], key, value, None, None, LENGTH - 1, 0)
    assert step["mask"] is None
    assert choose_backend(query[:, :, -1:], key, value).name == "fused"


def test_three_axes_are_heads_and_not_a_batch():
    query, key, value = tensors(heads=4, kv_heads=2)
    attend = Attend(mask=Mask.causal())
    assert torch.allclose(attend(query[0], key[0], value[0]), attend(query, key, value)[0])
    assert attend.stages(query[0], key[0], value[0]).weights.shape == (4, LENGTH, LENGTH)


def test_a_learned_sink_is_a_parameter_and_a_given_one_is_not():
    learned, given_sink = Attend(sink=torch.nn.Parameter(torch.zeros(2))), Attend(sink=torch.zeros(2))
    assert [name for name, _ in learned.named_parameters()] == ["sink"]
    assert not list(given_sink.parameters())
    assert set(given_sink.state_dict()) == {"sink"}
    query, key, value = (each.float() for each in tensors())
    learned(query, key, value).sum().backward()
    assert learned.sink.grad.abs().min() > 0


def test_dropout_only_in_training():
    query, key, value = tensors()
    attend = Attend(dropout=0.5)
    assert not torch.equal(attend(query, key, value), attend(query, key, value))
    attend.eval()
    assert torch.equal(attend(query, key, value), attention(query, key, value))


def test_keys_that_are_gone_are_refused_by_number():
    query, key, value = tensors()
    step = query[:, :, 6:], key[:, :, 3:], value[:, :, 3:]
    with pytest.raises(ValueError, match=r"causal & window\(5\) lets query 6 see key 2, but keys 0 to 2 are not here"):
        Attend(mask=Mask.causal() & Mask.window(5))(*step, query_start=6, key_start=3)
    with pytest.raises(ValueError, match="keys 0 to 2 are not here, yet no mask hides them"):
        Attend()(*step, query_start=6, key_start=3)
    Attend(mask=Mask.causal() & Mask.window(4))(*step, query_start=6, key_start=3)


def test_what_a_layer_fixes_is_read_in_its_repr():
    assert (
        repr(Attend(mask=Mask.causal() & Mask.window(3), softcap=30.0))
        == "Attend(mask=causal & window(3), softcap=30.0)"
    )
