"""Conversions mean what the other libraries do: each is fed to its library, and reads back to the same matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intently import masks
from intently.masks import Mask

torch.manual_seed(0)
MIN = torch.finfo(torch.float32).min
PADDED = Mask.causal() & Mask.padding([3, 5])


def seen_by(attention, keys, queries=5, batch=2, heads=3):
    """Which keys get weight: the value is the identity, so the output is the attention map."""
    query, key = torch.randn(batch, heads, queries, 4), torch.randn(batch, heads, keys, 4)
    value = torch.eye(keys).expand(batch, heads, keys, keys)
    return attention(query, key, value) > 0


def test_sdpa_takes_part_where_true():
    for mask in (Mask.causal(), PADDED, Mask.per_head(Mask.causal(), Mask.full(), Mask.window(1, 1))):
        given_mask = masks.to_sdpa(mask, 5)
        seen = seen_by(
            lambda q, k, v, m=given_mask: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m), 5
        )
        assert torch.equal(seen, mask.matrix(5).expand(2, 3, 5, 5))
        assert torch.equal(masks.from_sdpa(given_mask).matrix(5), given_mask)


def test_additive_hides_in_sdpa():
    for lowest in ("min", "half", "inf"):
        added = masks.to_additive(PADDED, 5, lowest=lowest)
        seen = seen_by(
            lambda q, k, v, m=added: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m), 5
        )
        assert torch.equal(seen, PADDED.matrix(5).expand_as(seen))


def test_mha_hides_where_true():
    layer = torch.nn.MultiheadAttention(6, 3, batch_first=True).eval()
    x = torch.randn(2, 5, 6)
    mask = Mask.padding([3, 5]) & Mask.per_head(Mask.causal(), Mask.full(), Mask.window(1, 1))
    _, weights = layer(x, x, x, attn_mask=masks.to_mha(mask, 5, heads=3), average_attn_weights=False)
    assert torch.equal(weights > 0, mask.matrix(5))
    _, weights = layer(
        x,
        x,
        x,
        attn_mask=masks.to_mha(Mask.causal(), 5),
        key_padding_mask=masks.to_key_padding(Mask.padding([3, 5]), 5),
        average_attn_weights=False,
    )
    assert torch.equal(weights > 0, PADDED.matrix(5).expand(2, 3, 5, 5))


def test_mha_agrees_with_the_square_subsequent_mask():
    theirs = torch.nn.Transformer.generate_square_subsequent_mask(5)
    assert torch.equal(masks.from_additive(theirs).matrix(5), Mask.causal().matrix(5))
    assert torch.equal(masks.to_additive(Mask.causal(), 5, lowest="inf"), theirs)


def test_hf_agrees_with_transformers():
    from transformers import masking_utils as theirs

    keep = masks.to_hf(Mask.padding([3, 5]), 5)
    assert keep.dtype == torch.long
    assert keep.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert torch.equal(masks.from_hf(keep).matrix(5), Mask.padding([3, 5]).matrix(5))
    added = theirs.eager_mask(batch_size=2, q_length=5, kv_length=5, attention_mask=keep.bool())
    assert torch.equal(masks.from_additive(added).matrix(5), PADDED.matrix(5))
    assert torch.equal(masks.to_additive(PADDED, 5), added)
    step = theirs.sdpa_mask(
        batch_size=2, q_length=1, kv_length=5, q_offset=4, attention_mask=keep.bool(), allow_is_causal_skip=False
    )
    assert torch.equal(masks.from_sdpa(step).matrix(1, 5), PADDED.matrix(1, 5, offset=4))


def test_windows_and_documents_agree_with_transformers():
    from transformers import masking_utils as theirs

    for function, mask in (
        (theirs.sliding_window_causal_mask_function(3), Mask.causal() & Mask.window(3)),
        (theirs.chunked_causal_mask_function(3, torch.zeros(1).long()), Mask.causal() & Mask.documents(3, 3, 2)),
        (
            theirs.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])),
            Mask.documents(3, 5),
        ),
    ):
        assert torch.equal(masks.from_mask_mod(function, 8).matrix(8), mask.matrix(8)), mask


def test_hf_tells_only_keys():
    assert masks.to_hf(Mask.full(), 3).tolist() == [[1, 1, 1]]
    assert masks.to_hf(~Mask.keys(0), 3).tolist() == [[0, 1, 1]]
    for mask in (Mask.causal(), PADDED, Mask.per_head(Mask.full(), Mask.none())):
        with pytest.raises(ValueError, match="same for every query and head"):
            masks.to_hf(mask, 5)
        with pytest.raises(ValueError, match="key_padding_mask is"):
            masks.to_key_padding(mask, 5)


def onnx_attention(mask_input, queries, keys):
    """ONNX's own reference implementation, with identity values: its output is the attention map."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    kinds = {"bool": TensorProto.BOOL, "float32": TensorProto.FLOAT}
    array = mask_input.numpy()
    shapes = {"Q": (2, 3, queries, 4), "K": (2, 3, keys, 4), "V": (2, 3, keys, keys)}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    inputs.append(helper.make_tensor_value_info("M", kinds[str(array.dtype)], array.shape))
    node = helper.make_node("Attention", ["Q", "K", "V", "M"], ["Y"])
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    rng = np.random.default_rng(0)
    feed = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    feed["V"] = np.broadcast_to(np.eye(keys, dtype="float32"), shapes["V"]).copy()
    (out,) = ReferenceEvaluator(model).run(None, feed | {"M": array})
    return torch.from_numpy(out) > 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_onnx_reference_agrees(dtype):
    for mask in (Mask.causal(), PADDED, Mask.per_head(Mask.causal(), Mask.full(), Mask.window(1, 1))):
        written = masks.to_onnx(mask, 5, dtype=dtype)
        assert torch.equal(onnx_attention(written, 5, 5), mask.matrix(5).expand(2, 3, 5, 5))
        assert torch.equal(
            masks.from_onnx(written, queries=5, keys=5).matrix(5).expand(2, 3, 5, 5), mask.matrix(5).expand(2, 3, 5, 5)
        )


@pytest.mark.parametrize("shape", [(4,), (5, 4), (1, 4), (3, 5, 4), (2, 3, 5, 4), (2, 1, 1, 4), (5, 6)])
def test_onnx_short_and_broadcast_masks(shape):
    generator = torch.Generator().manual_seed(1)
    short = torch.rand(shape, generator=generator) > 0.4
    short[..., 0] = True  # a row hidden throughout is NaN in the reference, which hides the map
    read = masks.from_onnx(short, queries=5, keys=6).matrix(5, 6)
    assert torch.equal(onnx_attention(short, 5, 6), read.expand(2, 3, 5, 6))


def test_from_onnx_refuses():
    with pytest.raises(ValueError, match=r"bool\[7\] speaks of 7 keys, but there are 6"):
        masks.from_onnx(torch.ones(7).bool(), queries=5, keys=6)
    with pytest.raises(TypeError, match="bool or float, not int64"):
        masks.from_onnx(torch.ones(5, 6).long(), queries=5, keys=6)


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("read", "error", "message"),
    [
        (lambda: masks.from_sdpa(torch.zeros(3, 3)), TypeError, r"read as bool, not float32\[3, 3\]; from_additive"),
        (lambda: masks.from_sdpa(torch.ones(3).bool()), ValueError, r"\[query, key\].*not bool\[3\]"),
        (lambda: masks.from_sdpa(torch.ones(2, 3).bool(), queries=4), ValueError, "speaks of 2 queries.*there are 4"),
        (lambda: masks.from_mha(torch.zeros(3, 3)), TypeError, "MultiheadAttention is read as bool"),
        (lambda: masks.from_mha(torch.ones(4, 3, 3).bool()), ValueError, "heads=None does not fit"),
        (lambda: masks.from_mha(torch.ones(4, 3, 3).bool(), heads=3), ValueError, "heads=3 does not fit"),
        (lambda: masks.to_mha(PADDED, 5), ValueError, "pass heads="),
        (lambda: masks.to_mha(Mask.per_head(*[Mask.full()] * 2), 5, heads=3), ValueError, "has 2 heads, but heads=3"),
        (lambda: masks.from_key_padding(torch.ones(2, 3).long()), TypeError, "from_hf"),
        (
            lambda: masks.from_key_padding(torch.ones(2, 3, 3).bool()),
            ValueError,
            r"\[batch, key\], not bool\[2, 3, 3\]",
        ),
        (lambda: masks.from_hf(torch.ones(2, 3)), TypeError, "int or bool.*float32.*additive"),
        (lambda: masks.from_hf(torch.tensor([[1, 2, 2, 0]])), ValueError, "holds 0, 1, 2.*documents"),
        (lambda: masks.from_hf(torch.ones(2, 1, 3, 3).long()), ValueError, "from_sdpa/from_additive"),
        (lambda: masks.from_additive(torch.ones(3, 3).bool()), TypeError, "floating, not bool"),
        (lambda: masks.from_additive(torch.ones(3, 3).tril()), ValueError, "only 0 and 1.*hides nothing"),
        (lambda: masks.from_additive(torch.ones(3, 3).tril(), threshold=-5), ValueError, "only 0 and 1"),
        (lambda: masks.from_additive(torch.full((2, 2), -10000.0)), ValueError, "such as -10000.*threshold="),
        (lambda: masks.from_additive(torch.full((2, 2), math.nan)), ValueError, "NaN"),
        (lambda: masks.to_additive(Mask.full(), 2, dtype=torch.long), TypeError, "floating, not int64"),
        (lambda: masks.to_additive(Mask.full(), 2, lowest="low"), ValueError, "min, half, inf"),
        (lambda: masks.from_mask_mod(lambda b, h, q, k: q - k, 2), TypeError, "score_mod is no mask"),
    ],
)
def test_wrong_kinds_are_refused(read, error, message):
    with pytest.raises(error, match=message):
        read()


def test_additive_threshold():
    bias = torch.tensor([[0.5, -10000.0], [-2.0, 0.0]])
    assert masks.from_additive(bias, threshold=-10000.0).matrix(2).tolist() == [[True, False], [True, True]]
    mixed = torch.tensor([[0.0, -math.inf, MIN, MIN / 2]])
    assert masks.from_additive(mixed).matrix(1, 4).tolist() == [[True, False, False, False]]


def test_one_row_stands_for_all_queries_only_when_told():
    row = torch.tensor([[True, False]])
    with pytest.raises(ValueError, match="0 to 0"):
        masks.from_sdpa(row).matrix(2)
    assert torch.equal(masks.from_sdpa(row, queries=2).matrix(2), row.expand(2, 2))


# -------------------------------------------------------------------------------------------------- safe minima


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_minimum_plus_score_is_finite(dtype):
    lowest = torch.tensor(masks.lowest_score(dtype), dtype=dtype)
    assert torch.isfinite(lowest + torch.tensor(-100.0, dtype=dtype))


def test_float16_minimum_overflows_at_minus_sixteen():
    lowest = torch.tensor(masks.lowest_score(torch.float16), dtype=torch.float16)
    assert torch.isfinite(lowest - torch.tensor(15.0).half())
    assert torch.isinf(lowest - torch.tensor(16.0).half())
    half = torch.tensor(masks.lowest_score(torch.float16, "half"), dtype=torch.float16)
    assert torch.isfinite(half - torch.tensor(1000.0).half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_two_minima_overflow_and_two_halves_do_not(dtype):
    causal, padding = Mask.causal(), Mask.padding([0])  # every row hidden throughout

    def summed(lowest):
        return sum(masks.to_additive(mask, 3, dtype=dtype, lowest=lowest) for mask in (~causal & Mask.none(), padding))

    assert torch.isneginf(summed("min")).all()
    assert summed("min").softmax(-1).isnan().all()
    assert torch.isfinite(summed("half")).all()
    assert not summed("half").softmax(-1).isnan().any()
    assert torch.equal(masks.from_additive(summed("half")).matrix(3), torch.zeros(1, 1, 3, 3).bool())


# ------------------------------------------------------------------------------------------------- round trips

matrices = st.integers(0, 2**30).flatmap(
    lambda seed: st.sampled_from([(4, 5), (2, 1, 4, 5), (2, 3, 4, 5), (1, 3, 4, 5)]).map(
        lambda shape: torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5
    )
)


@given(matrices)
@settings(max_examples=40, deadline=None)
def test_round_trips(matrix):
    mask = Mask.explicit(matrix)
    batch, heads = (matrix.shape[0], 3) if matrix.ndim == 4 else (1, 1)
    wide = matrix.expand(batch, heads, 4, 5) if matrix.ndim == 4 else matrix

    def back(read):
        made = read.matrix(4, 5)
        return made.expand_as(wide) if made.ndim == wide.ndim else made.squeeze(0).squeeze(0)

    assert torch.equal(back(masks.from_sdpa(masks.to_sdpa(mask, 4, 5))), wide)
    assert torch.equal(back(masks.from_mha(masks.to_mha(mask, 4, 5, heads=heads), heads=heads)), wide)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for lowest in ("min", "half", "inf"):
            added = masks.to_additive(mask, 4, 5, dtype=dtype, lowest=lowest)
            assert added.dtype == dtype
            assert torch.equal(back(masks.from_additive(added)), wide)
    for dtype in (torch.bool, torch.float32):
        assert torch.equal(back(masks.from_onnx(masks.to_onnx(mask, 4, 5, dtype=dtype), queries=4, keys=5)), wide)
    read = masks.from_mask_mod(masks.to_mask_mod(mask, 4, 5), 4, 5, batch=batch, heads=heads)
    assert torch.equal(back(read), wide)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.sampled_from(["left", "right"]))
@settings(max_examples=40, deadline=None)
def test_key_masks_round_trip(lengths, side):
    mask = Mask.padding(lengths, side=side)
    wanted = mask.matrix(4)
    assert torch.equal(masks.from_hf(masks.to_hf(mask, 4)).matrix(4), wanted)
    assert torch.equal(masks.from_key_padding(masks.to_key_padding(mask, 4)).matrix(4), wanted)
    assert torch.equal(masks.to_hf(mask, 4).bool(), ~masks.to_key_padding(mask, 4))
