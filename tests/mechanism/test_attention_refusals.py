"""What `attention` refuses, and that the message names the numbers and the likely cause."""

from __future__ import annotations

import pytest
import torch

from intently.mechanism import attention, choose_backend, reference, stages, torch_math

QUERY, KEY, VALUE = torch.zeros(2, 6, 4, 8), torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5, 7)


def refusal(error: type[Exception], query=QUERY, key=KEY, value=VALUE, **options) -> str:
    with pytest.raises(error) as caught:
        attention(query, key, value, **options)
    return str(caught.value)


def says(message: str, *parts: str) -> bool:
    missing = [part for part in parts if part not in message]
    assert not missing, (missing, message)
    return True


def test_the_harness_lets_the_right_call_pass():
    assert attention(QUERY, KEY, VALUE).shape == (2, 6, 4, 7)
    with pytest.raises(AssertionError):
        says("nothing of the kind", "float32")


def test_content():
    assert says(refusal(TypeError, query=[[1.0]]), "query is list", "torch.Tensor")
    assert says(refusal(TypeError, query=QUERY.long()), "int64[2, 6, 4, 8]", "Token ids")
    assert says(refusal(TypeError, key=KEY.to(torch.complex64)), "key is complex64")
    assert says(refusal(ValueError, query=torch.zeros(8)), "float32[8]")
    assert says(refusal(TypeError, value=VALUE.double()), "dtypes differ", "float64[2, 3, 5, 7]", "cache")
    assert says(refusal(ValueError, query=QUERY[0]), "ranks differ", "float32[6, 4, 8]", "head axis")


def test_shapes():
    assert says(refusal(ValueError, key=KEY[..., :6]), "query width 8 and key width 6", "swapped")
    assert says(refusal(ValueError, value=VALUE[..., :4, :]), "5 keys but 4 values", "float32[2, 3, 4, 7]")
    assert says(refusal(ValueError, value=VALUE[:, :1]), "3 key heads but 1 value heads")
    assert says(refusal(ValueError, query=QUERY[:, :4]), "4 query heads are no multiple of 3 kv heads")
    assert says(refusal(ValueError, key=KEY[:1], value=VALUE[:1]), "batch axes differ", "expand")
    assert says(refusal(ValueError, query=QUERY[..., :0], key=KEY[..., :0]), "width 0")
    flat = refusal(ValueError, query=torch.zeros(2, 4, 8), key=torch.zeros(3, 5, 8), value=torch.zeros(3, 5, 7))
    assert says(flat, "batch axes differ", "single head")


def test_masks():
    assert says(refusal(TypeError, mask=torch.zeros(4, 5)), "mask is float32[4, 5]", "belongs in `bias`")
    assert says(refusal(TypeError, mask=torch.ones(4, 5).long()), "mask is int64[4, 5]", "mask.bool()", "~mask.bool()")
    assert says(refusal(TypeError, mask="causal"), "mask is str", "intently.Mask")
    yes = torch.ones(1).bool()
    assert says(
        refusal(ValueError, mask=yes.expand(2, 5)), "bool[2, 5]", "[2, 6, 4, 5]", "sample and key", "[:, None, None, :]"
    )
    assert says(refusal(ValueError, mask=yes.expand(2, 4, 5)), "bool[2, 4, 5]", "[batch, query, key]", "[:, None]")
    assert says(refusal(ValueError, mask=yes.expand(5, 4)), "[key, query]", ".mT")
    assert says(refusal(ValueError, mask=yes.expand(3, 2, 6, 4, 5)), "Axes align from the right")
    flat = [tensor[:, 0] for tensor in (QUERY, KEY, VALUE)]
    assert says(refusal(ValueError, *flat, mask=yes.expand(2, 5)), "[batch, query, key] = [2, 4, 5]", "[:, None, :]")


def test_bias():
    assert says(refusal(TypeError, bias=torch.ones(4, 5).bool()), "bias is bool[4, 5]", "belongs in `mask`")
    assert says(refusal(TypeError, bias=1.0), "bias is float")
    assert says(refusal(ValueError, bias=torch.ones(4, 6)), "bias float32[4, 6]", "[2, 6, 4, 5]")


def test_bias_by_rule():
    asked = "bias(query_index int64[1, 1], key_index int64[1])"
    assert says(refusal(TypeError, bias=lambda i, j: None), asked, "returned NoneType", "float tensor")
    assert says(refusal(TypeError, bias=lambda i, j: i - j), asked, "returned int64[1, 1]")
    assert says(refusal(ValueError, bias=lambda i, j: torch.zeros(4, 1, 1)), asked, "float32[4, 1, 1]", "[2, 6, 1, 1]")
    # Right for one pair, wrong for more: noticed when it is asked for more.
    assert says(refusal(ValueError, bias=lambda i, j: (i + 0.0).mT), "query_index int64[4, 1]", "float32[1, 4]")


def test_numbers():
    assert says(refusal(TypeError, scale=torch.ones(6)), "scale is float32[6]", "into the query")
    assert says(refusal(ValueError, scale=float("nan")), "scale is nan")
    assert says(refusal(ValueError, softcap=0.0), "softcap is 0.0")
    assert says(refusal(ValueError, softcap=-5.0), "softcap is -5.0")
    assert says(refusal(ValueError, dropout=1.0), "dropout is 1.0")
    assert says(refusal(ValueError, sink=torch.zeros(3)), "sink float32[3]", "6 heads need [6]")
    assert says(refusal(TypeError, sink=torch.zeros(6).long()), "sink is int64[6]")
    assert says(refusal(ValueError, backend="flash"), "backend is 'flash'")


@pytest.mark.parametrize("call", [stages, choose_backend, reference, torch_math])
def test_every_function_has_the_same_door(call):
    with pytest.raises(TypeError, match="belongs in `bias`"):
        call(QUERY, KEY, VALUE, mask=torch.zeros(4, 5))
