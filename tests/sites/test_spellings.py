"""Every spelling of attention is found once, with the path, line, sizes, factor and mask that it is built with."""

from __future__ import annotations

import pytest
import torch
from tests.sites import spellings as s
from torch import Tensor, nn

import intently
from intently.sites import find


def only(model: nn.Module, *args: Tensor):
    found = intently.sites(model.eval(), *args)
    assert len(found) == 1, [f.path for f in found]
    return found[0]


def sizes(site):
    return site.heads, site.kv_heads, site.head_dim, site.value_dim, site.queries, site.keys


PLAIN = (s.HEADS, s.HEADS, s.WIDTH, s.VALUE, s.LENGTH, s.LENGTH)


def name(function) -> str:
    return function.__name__


@pytest.mark.parametrize("mix", (*s.PRODUCTS, *s.SOFTMAXES), ids=name)
def test_written_out(mix):
    site = only(s.Model(mix), s.content())
    assert sizes(site) == PLAIN
    assert (site.path, site.role, site.kind, site.kernel, site.mask) == ("inner", "self", "dot", "written out", "full")
    assert site.scale.factors == pytest.approx([s.SCALE] * s.HEADS, rel=1e-4) and site.scale.exact
    assert (site.dropout, site.bias, site.normalized_over, site.rows.are_tokens) == (0.0, "none", "keys", True)
    torch.testing.assert_close(site.row_sum.double(), torch.ones(s.BATCH, s.HEADS, s.LENGTH).double())


@pytest.mark.parametrize("mix", (*s.PRODUCTS, *s.SOFTMAXES), ids=name)
def test_line(mix):
    site = only(s.Model(mix), s.content())
    assert site.source.file == s.__file__
    assert {site.source.line} == s.lines(mix, "weights")
    assert {site.line("aggregate").line} <= s.lines(mix, "values")


@pytest.mark.parametrize(("mix", "factor"), s.FACTORS.items(), ids=lambda p: name(p) if callable(p) else str(p))
def test_factor(mix, factor):
    site = only(s.Model(mix), s.content())
    assert site.scale.factors == pytest.approx([factor] * s.HEADS, rel=1e-4)
    assert site.scale.value == pytest.approx(factor, rel=1e-4)
    assert (site.mask, site.bias) == ("full", "none")


def test_factor_of_each_head():
    site = only(s.Model(s.factor_of_each_head), s.content())
    assert site.scale.factors == pytest.approx([0.5, 0.25, 1.0], rel=1e-4)
    assert site.scale.value is None


@pytest.mark.parametrize("mix", s.MASKS, ids=name)
def test_mask(mix):
    site = only(s.Model(mix), s.content())
    assert site.mask == "causal"
    assert torch.equal(site.visible, torch.ones(5, 5).tril().bool().expand(2, 3, 5, 5))
    assert site.scale.factors == pytest.approx([s.SCALE] * s.HEADS, rel=1e-4)
    assert site.bias == "none"


@pytest.mark.parametrize("mix", (s.heads_stacked, s.scores_stacked), ids=name)
def test_heads_put_side_by_side(mix):
    site = only(s.Model(mix), s.content())
    assert sizes(site)[:1] + sizes(site)[2:] == (s.HEADS, s.WIDTH, s.VALUE, s.LENGTH, s.LENGTH)
    assert site.mask == "full"


def test_heads_one_by_one():
    sites = find(s.Model(s.heads_one_by_one).eval(), s.content())
    assert [x.path for x in sites] == ["inner#0", "inner#1", "inner#2"]
    for site in sites:
        assert (site.heads, site.head_dim, site.value_dim) == (1, s.WIDTH, s.VALUE)
        assert site.scale.value == pytest.approx(s.SCALE, rel=1e-4)


def test_dropout():
    site = only(s.Model(s.dropped), s.content())
    assert (site.dropout, site.mask) == (0.25, "full")
    assert only(s.Model(s.dropped_in_eval), s.content()).dropout == 0.0


def test_softcap():
    site = only(s.Model(s.capped), s.content())
    assert site.scale.softcap == 2.0
    assert site.scale.factors == pytest.approx([s.SCALE] * s.HEADS, rel=1e-3)
    assert site.mask == "full"


@pytest.mark.parametrize(
    "mix", (s.grouped_by_repeat, s.grouped_by_expand, s.grouped_by_broadcast, s.fused_grouped), ids=name
)
def test_grouped_heads(mix):
    site = only(s.Model(mix, heads=6, kv_heads=2), s.content())
    assert sizes(site) == (6, 2, s.WIDTH, s.VALUE, s.LENGTH, s.LENGTH)
    assert site.scale.factors == pytest.approx([s.SCALE] * 6, rel=1e-4)
    assert site.mask == "full"


def test_a_bias_is_no_mask():
    site = only(s.Model(s.biased), s.content())
    assert site.mask == "full"
    assert site.bias.startswith("additive") and site.bias.endswith("the same in every sample")
    assert site.scale.factors == pytest.approx([s.SCALE] * s.HEADS, rel=1e-3)


@pytest.mark.parametrize(
    ("mix", "mask", "factor"),
    [
        (s.fused, "full", 0.5), (s.fused_causal, "causal", 0.5), (s.fused_bool, "causal", 0.5),
        (s.fused_float, "causal", 0.5), (s.fused_scale, "full", 0.3), (s.fused_factor_on_q, "full", 1.5),
    ],
    ids=lambda p: name(p) if callable(p) else str(p),
)  # fmt: skip
def test_fused(mix, mask, factor):
    site = only(s.Model(mix), s.content())
    assert sizes(site) == PLAIN
    assert (site.path, site.role, site.kind, site.mask, site.bias) == ("inner", "self", "fused", mask, "none")
    assert site.kernel.startswith("sdpa ")
    assert site.scale.factors == pytest.approx([factor] * s.HEADS)
    assert (site.source.file, {site.source.line}) == (s.__file__, s.lines(mix, "weights"))


def test_fused_dropout():
    assert only(s.Model(s.fused_dropout), s.content()).dropout == 0.25


@pytest.mark.parametrize("mix", (s.by_operator, s.by_bmm, s.by_einsum_heads_inside, s.fused), ids=name)
def test_cross_attention(mix):
    model = s.Written(mix).eval()
    x, memory = s.content(), s.content(length=8, seed=3)
    (site,) = find(model, x, memory)
    assert (site.path, site.role, site.queries, site.keys) == ("(root)", "cross", 5, 8)
    assert (site.origins["query"], site.origins["key"], site.origins["value"]) == ({"x"}, {"memory"}, {"memory"})
    assert site.mask == "full" and site.scale.value == pytest.approx(0.5, rel=1e-4)


def test_cross_attention_of_equal_lengths_is_told_by_its_arguments():
    (site,) = find(s.Written(s.by_operator).eval(), s.content(), s.content(seed=3))
    assert site.role == "cross"


def test_tensordot():
    class One(nn.Module):
        """One sample, one head: what tensordot can say."""

        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(7, 4), nn.Linear(7, 4), nn.Linear(7, 6)

        def forward(self, x):
            scores = torch.tensordot(self.q(x), self.k(x), dims=([1], [1])) * 0.5
            return torch.tensordot(scores.softmax(-1), self.v(x), dims=1)

    site = only(One(), torch.randn(5, 7))
    assert sizes(site) == (1, 1, 4, 6, 5, 5)
    assert site.scale.value == pytest.approx(0.5, rel=1e-4) and site.mask == "full"


def test_a_function_of_q_k_v():
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6)
    (site,) = find(s.by_operator, q, k, v)
    assert (site.path, site.queries, site.keys, site.heads) == ("(root)", 5, 7, 3)


def test_two_calls_in_one_module_are_numbered():
    def twice(q, k, v):
        return s.by_operator(q, k, s.by_matmul(q, k, v))

    sites = find(s.Model(twice).eval(), s.content())
    assert [x.path for x in sites] == ["inner#0", "inner#1"]
    assert [x.key_name for x in sites] == ["inner#0", "inner#1"]


@pytest.mark.parametrize("masked", ["added", "filled"])
def test_a_key_mask_differs_by_sample_and_is_seen_to_enter(masked):
    class Padded(s.Written):
        def forward(self, x, attention_mask):
            hidden = (attention_mask == 0)[:, None, None, :]

            def mix(q, k, v):
                logits = q @ k.mT * s.SCALE
                if masked == "added":
                    logits = logits + torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(logits.dtype).min)
                else:
                    logits = logits.masked_fill(hidden, float("-inf"))
                return logits.softmax(-1) @ v

            self.mix = mix
            return super().forward(x)

    keep = torch.ones(2, 5, dtype=torch.long)
    keep[0, 3:] = 0
    (site,) = find(Padded(s.by_operator).eval(), s.content(), keep)
    assert "attention_mask" in site.side
    assert torch.equal(site.visible, keep.bool()[:, None, None, :].expand(2, 3, 5, 5))


def test_views_without_the_transpose_are_seen():
    class Scrambled(s.Written):
        def forward(self, x):
            q, k = (p(x).view(x.shape[0], s.HEADS, x.shape[1], s.WIDTH) for p in (self.q, self.k))
            v = self.v(x).view(x.shape[0], s.HEADS, x.shape[1], s.VALUE)
            return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))

    (site,) = find(Scrambled(s.by_operator).eval(), s.content())
    assert set(site.rows.scrambled) >= {"query", "key", "value"} and not site.rows.are_tokens


@pytest.mark.parametrize("transposed", [True, False])
def test_an_output_projection_may_have_weights_for_each_head(transposed):
    class Grouped(s.Written):
        def forward(self, x):
            q, k = (p(x).unflatten(-1, (s.HEADS, s.WIDTH)).transpose(1, 2) for p in (self.q, self.k))
            y = self.mix(q, k, self.v(x).unflatten(-1, (s.HEADS, s.VALUE)).transpose(1, 2))
            y = (y.transpose(1, 2) if transposed else y).reshape(-1, s.HEADS, s.VALUE).transpose(0, 1)
            weight = self.out.weight.T.reshape(s.HEADS, s.VALUE, -1)
            return torch.bmm(y, weight).sum(0).unflatten(0, x.shape[:2])

    (site,) = find(Grouped(s.by_operator).eval(), s.content())
    assert site.rows.scrambled == (() if transposed else ("output",))


@pytest.mark.parametrize(("dim", "axis"), [(-2, "queries"), (1, "heads"), (0, "batch")])
def test_a_softmax_over_another_axis_is_told(dim, axis):
    def mix(q, k, v):
        return (q @ k.mT * s.SCALE).softmax(dim) @ v

    assert only(s.Model(mix), s.content()).normalized_over == axis


def test_no_attention_no_site():
    class Gate(nn.Module):
        """A softmax over features and a product, and no attention."""

        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(7, 3), nn.Linear(7, 21)

        def forward(self, x):
            gate = self.gate(x).softmax(-1)
            return (gate[..., None] * self.experts(x).unflatten(-1, (3, 7))).sum(-2)

    assert find(Gate(), s.content()) == ()
    assert find(nn.Linear(7, 7), s.content()) == ()
