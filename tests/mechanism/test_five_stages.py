"""Each stage against numbers worked out by hand: four tokens, so that every permitted and hidden pair can be listed."""

from __future__ import annotations

import math

import pytest
import torch

from intently.mechanism import (
    aggregate,
    attention,
    mask_scale,
    merge_heads,
    normalize,
    project,
    score,
    split_heads,
    stages,
)

INF = float("inf")
LN = [math.log(n) for n in (1, 2, 3, 4)]

# One head of width 4, hence scale 1/2. Key j is (2 ln(j+1), 7, 7, 7) and query i is (s_i, 0, 0, 0), so that
#   score(i, j) = 2 s_i ln(j+1),   logit = s_i ln(j+1),   exp(logit) = (j+1) ** s_i
# with s = 1, 2, 1, 0. The values 1000, 100, 10, 1 tell in the output which tokens were mixed.
SLOPES = [1.0, 2.0, 1.0, 0.0]
QUERY = torch.tensor([[[[s, 0.0, 0.0, 0.0] for s in SLOPES]]], dtype=torch.float64)
KEY = torch.tensor([[[[2 * ln, 7.0, 7.0, 7.0] for ln in LN]]], dtype=torch.float64)
VALUE = torch.tensor([[[[1000.0], [100.0], [10.0], [1.0]]]], dtype=torch.float64)
CAUSAL = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
BACKENDS = ["stages", "fused"]


def rows(output: torch.Tensor) -> list[float]:
    return output.flatten().tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_tokens_all_seen(backend):
    # row 0, weights 1:2:3:4   -> (1000 + 200 + 30 + 4) / 10  = 123.4
    # row 1, weights 1:4:9:16  -> (1000 + 400 + 90 + 16) / 30 = 50.2
    # row 2 as row 0; row 3, all alike -> 1111 / 4            = 277.75
    assert rows(attention(QUERY, KEY, VALUE, backend=backend)) == pytest.approx([123.4, 50.2, 123.4, 277.75])


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_tokens_causal(backend):
    # row 0 sees key 0         -> 1000
    # row 1, weights 1:4       -> (1000 + 400) / 5        = 280
    # row 2, weights 1:2:3     -> (1000 + 200 + 30) / 6   = 205
    # row 3, all four          -> 1111 / 4                = 277.75
    output = attention(QUERY, KEY, VALUE, mask=CAUSAL, backend=backend)
    assert rows(output) == pytest.approx([1000.0, 280.0, 205.0, 277.75])


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_tokens_left_padded(backend):
    # Key 0 is a pad. Row 0 may see nothing                   -> 0
    # row 1 sees key 1                                        -> 100
    # row 2, weights 2:3       -> (200 + 30) / 5              = 46
    # row 3, keys 1, 2, 3      -> 111 / 3                     = 37
    keep = torch.tensor([False, True, True, True])
    assert rows(attention(QUERY, KEY, VALUE, mask=CAUSAL & keep, backend=backend)) == pytest.approx([0, 100, 46, 37])


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_tokens_with_a_bias(backend):
    # ln 2 on key 0 doubles its weight. Row 1: 2:4 -> (2000 + 400) / 6 = 400; row 2: 2:2:3 -> 2230 / 7;
    # row 3: 2:1:1:1 -> 2111 / 5 = 422.2
    bias = torch.tensor([LN[1], 0.0, 0.0, 0.0], dtype=torch.float64)
    output = attention(QUERY, KEY, VALUE, mask=CAUSAL, bias=bias, backend=backend)
    assert rows(output) == pytest.approx([1000.0, 400.0, 2230 / 7, 422.2])


def test_four_tokens_with_a_sink():
    # A sink of ln 2 adds 2 to each denominator. Row 0: 1000 / (1 + 2); row 1: 1400 / (5 + 2) = 200;
    # row 2: 1230 / (6 + 2) = 153.75; row 3: 1111 / (4 + 2)
    output = attention(QUERY, KEY, VALUE, mask=CAUSAL, sink=torch.tensor([LN[1]], dtype=torch.float64))
    assert rows(output) == pytest.approx([1000 / 3, 200.0, 153.75, 1111 / 6])


def test_a_sink_of_zero_is_the_off_by_one_softmax():
    # exp(x) / (1 + sum exp(x)): row 0 has 1:2:3:4 over 1 + 10.
    seen = stages(QUERY, KEY, VALUE, sink=0.0)
    assert seen.weights[0, 0, 0].tolist() == pytest.approx([1 / 11, 2 / 11, 3 / 11, 4 / 11])


def test_four_tokens_softcapped_before_the_mask():
    # tanh(ln n) = (n^2 - 1) / (n^2 + 1): 0, 3/5, 4/5, 15/17. A cap after the mask would lift -inf to -1.
    seen = stages(QUERY, KEY, VALUE, mask=CAUSAL, softcap=1.0)
    assert seen.logits[0, 0, 2].tolist() == pytest.approx([0.0, 0.6, 0.8, -INF])
    assert seen.logits[0, 0, 3].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_four_tokens_stage_by_stage():
    seen = stages(QUERY, KEY, VALUE, mask=CAUSAL)
    assert seen.scores[0, 0, 1].tolist() == pytest.approx([4 * ln for ln in LN])
    assert seen.logits[0, 0, 1].tolist() == pytest.approx([2 * LN[0], 2 * LN[1], -INF, -INF])
    assert seen.weights[0, 0, 1].tolist() == pytest.approx([0.2, 0.8, 0.0, 0.0])
    assert seen.weights[0, 0, 2].tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6, 0.0])


def test_score_shares_a_kv_head_between_consecutive_query_heads():
    # Four query heads 1, 2, 3, 4 over the kv heads 10 and 100: the first two read 10. Tiled they would alternate.
    query = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 4, 1, 1)
    key = torch.tensor([10.0, 100.0]).reshape(1, 2, 1, 1)
    assert score(query, key).flatten().tolist() == [10.0, 20.0, 300.0, 400.0]
    assert aggregate(query, key).flatten().tolist() == [10.0, 20.0, 300.0, 400.0]


def test_score_does_not_overflow_in_half_precision():
    # 64 * 64 * 64 = 262144, beyond the largest float16, 65504.
    states = torch.full((1, 1, 1, 64), 64.0, dtype=torch.float16)
    assert score(states, states).item() == 262144.0
    assert attention(states, states, states, backend="stages").dtype == torch.float16


def test_mask_scale_order():
    # 2 * 0.5 = 1; 3 tanh(1/3); then + 0.25; the second is hidden though its bias is large.
    logits = mask_scale(
        torch.tensor([[2.0, 2.0]], dtype=torch.float64),
        scale=0.5,
        softcap=3.0,
        bias=torch.tensor([0.25, 1e6], dtype=torch.float64),
        mask=torch.tensor([True, False]),
    )
    assert logits.tolist() == [[pytest.approx(3 * math.tanh(1 / 3) + 0.25), -INF]]


def test_normalize_survives_large_logits_and_passes_on_nan():
    # exp(1000) overflows; 1 : e between the last two, the first vanishes.
    weights = normalize(torch.tensor([[[0.0, 999.0, 1000.0]]], dtype=torch.float64))
    assert weights.flatten().tolist() == pytest.approx([0.0, 1 / (1 + math.e), math.e / (1 + math.e)])
    assert normalize(torch.tensor([[[-INF, math.nan]]])).isnan().all()


def test_normalize_gives_each_head_its_own_sink():
    # Two heads, one key of logit 0: 1 / (1 + 1) and 1 / (1 + 3). A row that sees nothing gives 0 to its keys.
    logits = torch.tensor([[[0.0], [-INF]], [[0.0], [-INF]]])
    assert normalize(logits, torch.tensor([0.0, math.log(3)])).flatten().tolist() == pytest.approx([0.5, 0, 0.25, 0])
    assert normalize(logits, torch.tensor([-INF, -INF])).flatten().tolist() == [1.0, 0.0, 1.0, 0.0]


def test_project_splits_without_mixing_tokens():
    # Two tokens of four features, two heads: head 0 takes features 0 and 1 of each token. A reshape alone would
    # give head 0 the whole of token 0.
    states = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]])
    split = [[[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [7.0, 8.0]]]]
    assert project(states, torch.eye(4), heads=2).tolist() == split
    assert project(states, torch.eye(4), torch.tensor([0.0, 0.0, 0.0, 10.0]), heads=2)[0, 1].tolist() == [
        [3.0, 14.0],
        [7.0, 18.0],
    ]
    assert merge_heads(split_heads(states, 2)).tolist() == states.tolist()


def test_split_heads_refuses_uneven_heads():
    with pytest.raises(ValueError, match="10 features do not split into 4 heads"):
        split_heads(torch.zeros(1, 3, 10), heads=4)


def test_dropout_drops_weights_and_keeps_the_mean():
    torch.manual_seed(0)
    weights, value = torch.full((1, 1, 1000), 1e-3), torch.ones(1, 1000, 1)
    kept = aggregate(weights, value, dropout=0.25).item() / (1e-3 / 0.75)
    assert kept == pytest.approx(round(kept), abs=1e-2)  # a whole number of weights of 1/0.75 of their size
    assert 650 < kept < 850


def test_five_stages_equal_a_torch_module():
    # An independent composition of all five: nn.MultiheadAttention, whose bool mask means "hidden".
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64).eval()
    states, memory = torch.randn(2, 4, 12, dtype=torch.float64), torch.randn(2, 5, 12, dtype=torch.float64)
    may_see = torch.rand(4, 5) > 0.3
    may_see[:, 0] = True
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    query, key, value = (
        project(source, weight, bias, heads=3)
        for source, weight, bias in zip((states, memory, memory), weights, biases, strict=True)
    )
    ours = module.out_proj(merge_heads(attention(query, key, value, mask=may_see)))
    theirs, _ = module(states, memory, memory, attn_mask=~may_see, need_weights=False)
    torch.testing.assert_close(ours, theirs)
