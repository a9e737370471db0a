"""ALiBi against the slopes of its paper and the tensors of Bloom and MPT."""

from __future__ import annotations

import pytest
import torch

from intently.mechanism import attention
from intently.mechanism.positions import alibi, alibi_slopes

CAUSAL = torch.ones(5, 5).tril().bool()


def plane(heads: int, queries: int, keys: int) -> torch.Tensor:
    return alibi(heads)(torch.arange(queries)[:, None], torch.arange(keys))


def test_slopes_of_the_paper():
    # Eight heads: 1/2, 1/4, ..., 1/256. Sixteen: every second exponent between, from 1/√2 on.
    assert alibi_slopes(8) == tuple(2.0**-k for k in range(1, 9))
    assert alibi_slopes(16) == pytest.approx([2 ** (-k / 2) for k in range(1, 17)])
    # Twelve: the eight, and the first four of the sixteen that are not among them.
    assert alibi_slopes(12) == pytest.approx([2.0**-k for k in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    assert alibi_slopes(1) == (2.0**-8,)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 71])
def test_equals_bloom_and_mpt_up_to_a_constant_per_row(heads):
    pytest.importorskip("transformers")
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    bloom = build_alibi_tensor(torch.ones(1, 5, dtype=torch.int64), heads, torch.float32)
    mpt = build_mpt_alibi_tensor(heads, 5)
    ours = plane(heads, 5, 5)
    seen = [torch.where(CAUSAL, each, -torch.inf).softmax(dim=-1) for each in (ours, bloom, mpt)]
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(seen[0], seen[2])
    # The control: heads in another order are told apart.
    wrong = torch.where(CAUSAL, ours.flip(0), -torch.inf).softmax(dim=-1)
    assert heads == 1 or (wrong - seen[1]).abs().max() > 0.01


def test_mpt_with_another_exponent():
    pytest.importorskip("transformers")
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs = build_mpt_alibi_tensor(6, 5, alibi_bias_max=16)  # the last query's row: slope * (1 - 5 ... 0)
    torch.testing.assert_close(alibi(6, exponent=16.0)(torch.tensor([[4]]), torch.arange(5)), theirs)


def test_four_tokens_by_hand():
    # Slopes 1/4 and 1/16 ... of four heads; distance |i - j|, symmetric, 0 on the diagonal.
    bias = plane(4, 4, 4)
    assert bias.shape == (4, 4, 4)
    assert bias[0, 3].tolist() == [-0.75, -0.5, -0.25, 0.0]
    assert bias[1, 0].tolist() == [0.0, -1 / 16, -2 / 16, -3 / 16]
    assert bias.equal(bias.mT)


def test_continues_a_cache_and_stays_exact_in_long_texts():
    # Query 1000 of a text reads the last three keys: distances 2, 1, 0, told apart in float32.
    bias = alibi(8)(torch.tensor([[1000]]), torch.tensor([998, 999, 1000]))
    assert bias[7, 0].tolist() == [-2 / 256, -1 / 256, 0.0]
    assert alibi(2)(torch.tensor(3), torch.tensor(1)).tolist() == [
        -2 * 2.0**-4,
        -2 * 2.0**-8,
    ]  # scalars, for score mods


def test_serves_attention_as_its_bias():
    states = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    logits = states @ states.mT / 8**0.5 + plane(4, 5, 5)
    truth = torch.where(CAUSAL, logits, -torch.inf).softmax(dim=-1) @ states
    torch.testing.assert_close(attention(states, states, states, mask=CAUSAL, bias=plane(4, 5, 5)), truth)


def test_refuses_no_heads():
    with pytest.raises(ValueError, match="heads is 0"):
        alibi(0)
