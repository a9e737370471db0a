"""What the official ONNX cases let pass: own cases with values by hand, each with the slip that it is there to catch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from intently.mechanism.onnx import attention_op
from intently.mechanism.onnx.attention_operator import PRECISIONS

VALUES = torch.tensor([1.0, 10.0, 100.0, 1000.0]).reshape(1, 1, 4, 1)
BLANK = torch.zeros(1, 1, 4, 2)
FLOAT, FLOAT16, DOUBLE, BFLOAT16 = 1, 10, 11, 16


def column(*numbers: float, dtype=torch.float32) -> torch.Tensor:
    """Keys or values of width 1, one head, one sample."""
    return torch.tensor(numbers, dtype=dtype).reshape(1, 1, -1, 1)


# Each case takes the operator, so that the same lines hold a slip to account.


def short_bool_mask(op):
    seen = torch.tensor([True, True])  # four keys, two spoken of: the others are hidden
    torch.testing.assert_close(op(BLANK, BLANK, VALUES, seen).Y, torch.full((1, 1, 4, 1), 5.5))


def short_float_mask(op):
    bias = torch.tensor([[0.0, math.log(3.0)]])  # weights 1/4 and 3/4 on the values 1 and 10
    result = op(BLANK, BLANK, VALUES, bias, qk_matmul_output_mode=2)
    torch.testing.assert_close(result.Y, torch.full((1, 1, 4, 1), 7.75))
    assert (result.qk_matmul_output[..., 2:] == -torch.inf).all()


def short_mask_beyond_the_padding(op):
    seen, lengths = torch.ones(4, 3, dtype=torch.bool), torch.tensor([2])
    seen[:, 0] = False  # of the two keys that are tokens, key 1 is left
    torch.testing.assert_close(op(BLANK, BLANK, VALUES, seen, None, None, lengths).Y, torch.full((1, 1, 4, 1), 10.0))


def softmax_in_bfloat16(op):
    # bfloat16 has 1 and 1.0078125, nothing between: both logits become 1 and share alike.
    result = op(column(1.0), column(1.0, 1.003), column(0.0, 1.0), softmax_precision=BFLOAT16, qk_matmul_output_mode=3)
    torch.testing.assert_close(result.qk_matmul_output.flatten(), torch.tensor([0.5, 0.5]), rtol=0, atol=0)
    assert result.Y.item() == 0.5
    assert result.Y.dtype == torch.float32


def softmax_in_float16(op):
    # 1 and 1.0004 are the same float16, and -1e5 is beyond its range: -inf, whose weight is exactly 0.
    result = op(column(1.0), column(1.0, 1.0004, -1e5), column(0.0, 1.0, 9.0), softmax_precision=FLOAT16)
    assert result.Y.item() == 0.5


def softmax_in_float64(op):
    # Sixty-four weights that are right to the last bit of float32, which a softmax in float32 does not reach.
    query, key = column(1.0), column(*np.linspace(-3, 3, 64))
    exact = torch.exp(key.double().flatten() - 3)
    exact = (exact / exact.sum()).float()
    result = op(query, key, torch.ones_like(key), softmax_precision=DOUBLE, qk_matmul_output_mode=3)
    torch.testing.assert_close(result.qk_matmul_output.flatten(), exact, rtol=0, atol=0)


def scores_before_the_softcap(op):
    # 2 * 3 * 0.5 = 3 and 2 * -4 * 0.5 = -4; capped they would be 2 tanh(1.5) and 2 tanh(-2).
    operands = column(2.0), column(3.0, -4.0), column(0.0, 0.0)
    raw = op(*operands, scale=0.5, softcap=2.0, qk_matmul_output_mode=0).qk_matmul_output.flatten()
    assert raw.tolist() == [3.0, -4.0]
    capped = op(*operands, scale=0.5, softcap=2.0, qk_matmul_output_mode=1).qk_matmul_output.flatten()
    torch.testing.assert_close(capped, torch.tensor([2 * math.tanh(1.5), -2 * math.tanh(2.0)]))


def scores_before_the_mask(op):
    seen = torch.tensor([True, False])
    for mode in (0, 1):
        plane = op(column(2.0), column(3.0, -4.0), column(0.0, 0.0), seen, qk_matmul_output_mode=mode).qk_matmul_output
        assert plane.flatten().tolist() == [6.0, -8.0]


def heads_of_three_axes(op):
    # Two heads of width 2. Head 0 of both queries matches token 1, head 1 matches token 0, and the scale makes that certain.
    query = torch.tensor([[[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]]])
    key = torch.tensor([[[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]])
    value = torch.tensor([[[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]])
    result = op(query, key, value, scale=1000.0, q_num_heads=2, kv_num_heads=2)
    assert result.Y.tolist() == [[[10.0, 11.0, 2.0, 3.0]] * 2]
    assert result.present_value.tolist() == [[[[0.0, 1.0], [10.0, 11.0]], [[2.0, 3.0], [12.0, 13.0]]]]


def queries_of_three_axes(op):
    # As above, and the queries differ: query 0 asks for token 1 with head 0, query 1 for token 0.
    query = torch.tensor([[[1.0, 0.0, 1.0, 0.0], [-1.0, 0.0, -1.0, 0.0]]])
    key = torch.tensor([[[-1.0, 0.0, 1.0, 0.0], [1.0, 0.0, -1.0, 0.0]]])
    value = torch.tensor([[[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]])
    result = op(query, key, value, scale=1000.0, q_num_heads=2, kv_num_heads=2)
    assert result.Y.tolist() == [[[10.0, 11.0, 2.0, 3.0], [0.0, 1.0, 12.0, 13.0]]]


def negative_scale(op):
    # Logits 0 and -log 3: weights 3/4 and 1/4 on 1 and 10.
    result = op(column(1.0), column(0.0, math.log(3.0)), column(1.0, 10.0), scale=-1.0)
    torch.testing.assert_close(result.Y.flatten(), torch.tensor([3.25]))


# The slips.


def zero_padded(Q, K, V, attn_mask=None, *rest, **attributes):
    if attn_mask is not None and attn_mask.shape[-1] < K.shape[-2] and (not rest or rest[0] is None):
        tail = attn_mask.new_full(
            (*attn_mask.shape[:-1], K.shape[-2] - attn_mask.shape[-1]), attn_mask.dtype == torch.bool
        )
        attn_mask = torch.cat((attn_mask, tail), dim=-1)
    return attention_op(Q, K, V, attn_mask, *rest, **attributes)


def zero_padded_to_the_length(Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad=None, **attributes):
    """Takes a short mask for a reason to drop it wherever the padding is known."""
    if attn_mask is not None and attn_mask.shape[-1] < K.shape[-2] and nonpad is not None:
        attn_mask = None if attn_mask.dtype == torch.bool else zero_pad(attn_mask, K.shape[-2])
    return attention_op(Q, K, V, attn_mask, past_key, past_value, nonpad, **attributes)


def zero_pad(attn_mask, keys):
    return torch.nn.functional.pad(attn_mask, (0, keys - attn_mask.shape[-1]))


def deaf_to_precision(*tensors, softmax_precision=None, **attributes):
    return attention_op(*tensors, **attributes)


def capped_in_mode_0(*tensors, softcap=0.0, qk_matmul_output_mode=0, **attributes):
    mode = 1 if softcap and qk_matmul_output_mode == 0 else qk_matmul_output_mode
    return attention_op(*tensors, softcap=softcap, qk_matmul_output_mode=mode, **attributes)


def masked_in_mode_0_and_1(*tensors, qk_matmul_output_mode=0, **attributes):
    return attention_op(*tensors, qk_matmul_output_mode=max(2, qk_matmul_output_mode), **attributes)


def keys_not_transposed(Q, K, V, *rest, q_num_heads=None, kv_num_heads=None, **attributes):
    """Reshapes the keys and values to [batch, heads, length, width] without moving the axes."""
    if Q.dim() == 3:
        K, V = (each.reshape(each.shape[0], kv_num_heads, each.shape[1], -1) for each in (K, V))
        Q = Q.unflatten(-1, (q_num_heads, -1)).transpose(1, 2)
        result = attention_op(Q, K, V, *rest, **attributes)
        return result._replace(Y=result.Y.transpose(1, 2).flatten(2))
    return attention_op(Q, K, V, *rest, **attributes)


def sign_lost(*tensors, scale=None, **attributes):
    return attention_op(*tensors, scale=None if scale is None else abs(scale), **attributes)


# Those that pass every official case; `test_onnx_official.py` holds them to that.
UNSEEN = [zero_padded, zero_padded_to_the_length, deaf_to_precision, capped_in_mode_0, sign_lost]

CAUGHT = [
    (short_bool_mask, zero_padded),
    (short_float_mask, zero_padded),
    (short_mask_beyond_the_padding, zero_padded_to_the_length),
    (softmax_in_bfloat16, deaf_to_precision),
    (softmax_in_float16, deaf_to_precision),
    (softmax_in_float64, deaf_to_precision),
    (scores_before_the_softcap, capped_in_mode_0),
    (scores_before_the_mask, masked_in_mode_0_and_1),
    (heads_of_three_axes, keys_not_transposed),
    (queries_of_three_axes, keys_not_transposed),
    (negative_scale, sign_lost),
]


@pytest.mark.parametrize("case", [case for case, _ in CAUGHT], ids=lambda each: each.__name__)
def test_right_values(case):
    case(attention_op)


@pytest.mark.parametrize(("case", "slip"), CAUGHT, ids=lambda each: each.__name__)
def test_negative_control_the_slip_is_caught(case, slip):
    with pytest.raises(AssertionError):
        case(slip)


@pytest.mark.parametrize("code", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_softmax_may_have_any_precision_and_gives_back_the_type_of_the_query(dtype, code):
    result = attention_op(
        BLANK.to(dtype), BLANK.to(dtype), VALUES.to(dtype), softmax_precision=code, qk_matmul_output_mode=3
    )
    assert result.Y.dtype == result.qk_matmul_output.dtype == dtype
    assert (result.qk_matmul_output == 0.25).all()
    torch.testing.assert_close(result.Y, torch.full_like(result.Y, 277.75))  # the mean of the four values


def test_the_value_may_have_a_type_of_its_own():
    result = attention_op(BLANK.half(), BLANK.half(), VALUES.double())
    assert (result.Y.dtype, result.present_value.dtype) == (torch.float16, torch.float64)
    torch.testing.assert_close(result.Y, torch.full_like(result.Y, 277.75))


def test_positions_by_hand():
    """Two new queries after a past of two: query i stands at position 2 + i, and the window hangs on that."""
    query, new = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1)
    past = torch.zeros(1, 1, 2, 1), VALUES[:, :, :2]

    def outputs(**attributes):
        return attention_op(query, new, VALUES[:, :, 2:], None, *past, **attributes).Y.flatten().tolist()

    assert outputs(is_causal=1) == pytest.approx([37.0, 277.75])  # 111 / 3 and 1111 / 4
    assert outputs(is_causal=1, left_window_size=1) == [55.0, 550.0]
    assert outputs(left_window_size=0) == [550.0, 1000.0]  # keys 2, 3 and key 3
    assert outputs(left_window_size=1, right_window_size=0) == [55.0, 550.0]
    assert outputs(right_window_size=0) == outputs(is_causal=1)


def test_padding_by_hand():
    """Four queries; with 2 tokens the offset is -2, so queries 0 and 1 stand before every key and receive 0."""
    result = attention_op(
        BLANK.expand(2, 1, 4, 2), BLANK.expand(2, 1, 4, 2), VALUES.expand(2, 1, 4, 1),
        nonpad_kv_seqlen=torch.tensor([2, 4]), is_causal=1, qk_matmul_output_mode=3,
    )  # fmt: skip
    assert result.Y[0].flatten().tolist() == [0.0, 0.0, 1.0, 5.5]
    assert result.Y[1].flatten().tolist() == pytest.approx([1.0, 5.5, 37.0, 277.75])
    assert (result.qk_matmul_output[0, 0, :2] == 0).all()


def test_a_row_that_sees_nothing_passes_back_no_gradient():
    query, key, value = (torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.zeros(3, 3, dtype=torch.float64)
    bias[1] = -torch.inf
    output = attention_op(query, key, value, bias, is_causal=1, softcap=3.0).Y
    assert (output[:, :, 1] == 0).all()
    gradients = torch.autograd.grad(output.square().sum(), (query, key, value))
    assert all(each.isfinite().all() for each in gradients)
    assert (gradients[0][:, :, 1] == 0).all()


@pytest.mark.parametrize("past", range(7))
def test_a_cache_changes_nothing(past):
    """The rows of the whole sequence are those of its end, whatever part of the keys was cached."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, heads, 6, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    attributes = {"is_causal": 1, "left_window_size": 2, "softcap": 3.0}
    whole = attention_op(query, key, value, **attributes)
    rest = attention_op(
        query[:, :, past:],
        key[:, :, past:],
        value[:, :, past:],
        None,
        key[:, :, :past],
        value[:, :, :past],
        **attributes,
    )
    torch.testing.assert_close(rest.Y, whole.Y[:, :, past:])
    assert torch.equal(rest.present_key, key)
    outside = attention_op(query[:, :, past:], key, value, nonpad_kv_seqlen=torch.tensor([6, 6]), **attributes)
    torch.testing.assert_close(outside.Y, whole.Y[:, :, past:])


Q3 = torch.zeros(1, 4, 4)


@pytest.mark.parametrize(
    ("arguments", "attributes", "message"),
    [
        ((), {"version": 22}, "version is 22; 23, 24 or 25"),
        ((), {"version": 24, "left_window_size": 2}, "version 24 of Attention does not know left_window_size"),
        ((), {"version": 23, "right_window_size": 0}, "version 23 of Attention does not know right_window_size"),
        ((), {"version": 23, "nonpad_kv_seqlen": torch.tensor([4])}, "does not know nonpad_kv_seqlen"),
        ((torch.ones(4, 2).bool(),), {"version": 23}, "shorter than the keys came with version 24"),
        ((torch.ones(4, 5).bool(),), {}, r"attn_mask bool\[4, 5\] does not broadcast to .* = \[1, 1, 4, 4\]"),
        ((torch.ones(4, 4).int(),), {}, "attn_mask is int32"),
        ((torch.ones(2).bool(),), {"nonpad_kv_seqlen": torch.tensor([3])}, "fewer than the 3"),
        ((), {"nonpad_kv_seqlen": torch.tensor([5])}, "lengths from 0 to the 4 keys"),
        ((), {"nonpad_kv_seqlen": torch.tensor([4.0])}, r"float32\[1\]; int64\[1\] is needed"),
        ((None, BLANK, VALUES), {"nonpad_kv_seqlen": torch.tensor([4])}, "exclude each other"),
        ((None, BLANK), {}, "past_key was passed alone"),
        ((None, BLANK[0], VALUES[0]), {}, r"past_key float32\[1, 4, 2\] does not continue"),
        ((None, BLANK.double(), VALUES.double()), {}, "differ in dtype"),
        ((), {"is_causal": 2}, "is_causal is 2"),
        ((), {"softcap": -1.0}, "softcap is -1.0"),
        ((), {"qk_matmul_output_mode": 4}, "qk_matmul_output_mode is 4"),
        ((), {"softmax_precision": 2}, "softmax_precision is 2"),
        ((), {"left_window_size": -2}, "left_window_size is -2"),
        ((), {"q_num_heads": 1}, "have four axes"),
        ((), {"version": 23, "kv_num_heads": 2}, "have four axes"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_refusals(arguments, attributes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        attention_op(BLANK, BLANK, VALUES, *arguments, **attributes)


def test_refusals_of_three_axes():
    with pytest.raises(ValueError, match="q_num_heads and kv_num_heads are needed"):
        attention_op(Q3, Q3, Q3, q_num_heads=2)
    with pytest.raises(ValueError, match="do not split into 3 heads"):
        attention_op(Q3, Q3, Q3, q_num_heads=3, kv_num_heads=1)
    with pytest.raises(ValueError, match="all three with 4 axes"):
        attention_op(BLANK, Q3, Q3)
    with pytest.raises(TypeError, match="Q and K differ in dtype"):
        attention_op(BLANK, BLANK.double(), VALUES)
