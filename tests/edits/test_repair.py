"""A repair makes of a faulty call the honest one: outputs equal those of a model with the same weights and no fault."""

from __future__ import annotations

import pytest
import torch
from tests.sites import spellings as s
from torch import nn

from intently import edits
from intently.sites import Replacement, Settings, Sizes, find, tracing

SIZES = Sizes(s.BATCH, frozenset({s.LENGTH}))
TRIANGLE = torch.ones(s.LENGTH, s.LENGTH, dtype=torch.bool).tril()
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def double(mix, **options) -> nn.Module:
    return s.Model(mix, **options).double().eval()


def edited(model: nn.Module, repair, x=None, *, key: str = "inner#0", keep: bool = False, **kwargs):
    """The output with a repair of one call, and the tracer."""
    x = s.content().double() if x is None else x
    with torch.no_grad(), tracing(model, {"x": x}, Settings(keep=keep, edits={key: repair}, sizes=SIZES)) as tracer:
        output = model(x, **kwargs)
    return output, tracer


def becomes(faulty, repair, honest):
    """The repaired faulty mix equals the honest one, and without a repair it does not."""
    x = s.content().double()
    with torch.no_grad():
        wanted, unrepaired = double(honest)(x), double(faulty)(x)
    assert not torch.allclose(torch.nan_to_num(unrepaired), wanted, atol=1e-4)
    got, tracer = edited(double(faulty), repair, x)
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert tracer.fired == {"inner#0": 1}
    return tracer.sites()[0]


def wide(q, k, v):
    return (q @ k.mT / s.WIDTH).softmax(-1) @ v


def over_queries(q, k, v):
    return (q @ k.mT * s.SCALE).softmax(-2) @ v


def causal_unscaled(q, k, v):
    return (q @ k.mT).masked_fill(s.future(q), float("-inf")).softmax(-1) @ v


def inverted(q, k, v):
    return (q @ k.mT * s.SCALE).masked_fill(~s.future(q), -1e9).softmax(-1) @ v


def biased_causal(q, k, v):
    distance = torch.arange(s.LENGTH)[:, None] - torch.arange(s.LENGTH)
    return (q @ k.mT * s.SCALE - 0.3 * distance.abs()).masked_fill(s.future(q), float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize(
    ("faulty", "factor", "honest"),
    [
        (s.factor_missing, 0.5, s.by_operator), (wide, 0.5, s.by_operator), (s.factor_on_q, 1.0, s.factor_missing),
        (s.factor_on_q_and_after, 0.5, s.by_operator), (causal_unscaled, 0.5, s.mask_filled),
        (s.fused_scale, 0.5, s.fused), (s.fused_factor_on_q, 0.5, s.fused),
        (s.by_einsum_heads_last, 1.0, s.factor_missing),
    ],
    ids=lambda p: p.__name__ if callable(p) else str(p),
)  # fmt: skip
def test_rescale(faulty, factor, honest):
    site = becomes(faulty, edits.rescale(factor), honest)
    assert site.scale.value == pytest.approx(factor, rel=1e-3)


@pytest.mark.parametrize(
    ("faulty", "wanted", "honest", "mask"),
    [
        (s.by_operator, TRIANGLE, s.mask_filled, "causal"), (s.mask_filled, TRIANGLE | True, s.by_operator, "full"),
        (s.mask_added_finite, TRIANGLE | True, s.by_operator, "full"),
        (s.mask_multiplied_in, TRIANGLE | True, s.by_operator, "full"), (s.fused, TRIANGLE, s.fused_causal, "causal"),
        (s.fused_causal, TRIANGLE | True, s.fused, "full"), (s.by_bmm, TRIANGLE, s.mask_filled, "causal"),
        (s.biased, TRIANGLE, biased_causal, "causal"),
    ],
    ids=lambda p: p.__name__ if callable(p) else "",
)  # fmt: skip
def test_see(faulty, wanted, honest, mask):
    assert becomes(faulty, edits.see(lambda site: wanted), honest).mask == mask


def blind_query(q, k, v):
    hidden = (torch.arange(s.LENGTH) == 4)[:, None]
    return (q @ k.mT * s.SCALE).masked_fill(hidden, -1e9).softmax(-1) @ v


def test_see_opens_a_row_that_saw_nothing():
    becomes(blind_query, edits.see(lambda site: TRIANGLE | True), s.by_operator)


def test_see_clean_opens_a_row_that_saw_nothing():
    becomes(blind_query, edits.see(lambda site: TRIANGLE | True, clean=True), s.by_operator)


def test_see_clean_takes_out_what_a_faulty_mask_added():
    def tiny(q, k, v):
        return (q @ k.mT * s.SCALE).masked_fill(torch.arange(s.LENGTH) == 4, 1e-9).softmax(-1) @ v

    def meant(q, k, v):
        return (q @ k.mT * s.SCALE).masked_fill(torch.arange(s.LENGTH) == 4, float("-inf")).softmax(-1) @ v

    becomes(tiny, edits.see(lambda site: torch.arange(s.LENGTH) < 4, clean=True), meant)


def capped(q, k, v):
    return (0.5 * torch.tanh(q @ k.mT * s.SCALE / 0.5)).softmax(-1) @ v


def capped_causal(q, k, v):
    return (0.5 * torch.tanh(q @ k.mT * s.SCALE / 0.5)).masked_fill(s.future(q), -1e9).softmax(-1) @ v


def test_see_caps_what_it_opens():
    becomes(capped_causal, edits.see(lambda site: TRIANGLE | True), capped)


PADS = torch.tensor([[False] * 3 + [True] * 2, [False] * 4 + [True]])[:, None, None]


def pads_without_bias(q, k, v):
    distance = torch.arange(s.LENGTH)[:, None] - torch.arange(s.LENGTH)
    return (q @ k.mT * s.SCALE - 3.0 * distance.abs() * ~PADS).softmax(-1) @ v


def pads_hidden(q, k, v):
    return (q @ k.mT * s.SCALE).masked_fill(PADS, float("-inf")).softmax(-1) @ v


def test_see_clean_takes_its_factor_from_keys_that_are_meant_to_be_seen():
    becomes(pads_without_bias, edits.see(lambda site: ~PADS, clean=True), pads_hidden)


def test_softmax_over_keys():
    assert becomes(over_queries, edits.softmax_over_keys(), s.by_operator).normalized_over == "keys"


def test_drop_nothing():
    assert becomes(s.dropped, edits.drop_nothing(), s.by_operator).dropout == 0.0


def test_safe_rows_give_zero():
    def nothing_to_see(q, k, v):
        hidden = torch.zeros(s.LENGTH, s.LENGTH, dtype=torch.bool)
        hidden[2] = True
        return (q @ k.mT * s.SCALE).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    def zero(q, k, v):
        out = s.by_operator(q, k, v)
        return torch.where(torch.arange(s.LENGTH)[:, None] == 2, 0.0, out)

    becomes(nothing_to_see, edits.safe_rows(), zero)


def test_safe_rows_are_finite_and_leave_other_rows_alone():
    def nothing_to_see(q, k, v):
        hidden = s.future(q) | (torch.arange(s.LENGTH) == 2)[:, None]
        return (q @ k.mT * s.SCALE).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    x = s.content().double()
    got, _ = edited(double(nothing_to_see), edits.safe_rows(), x)
    assert torch.isfinite(got).all()
    wanted = double(s.mask_filled)(x)
    others = [0, 1, 3, 4]
    torch.testing.assert_close(got[:, others], wanted[:, others], **CLOSE)


def test_as_in_another_run():
    """Mask and scale of the honest call, the queries and keys of this one."""
    x, other = s.content().double(), s.content(seed=9).double()
    _, tracer = edited(double(s.mask_filled), lambda site: None, other, keep=True)
    got, _ = edited(double(s.factor_missing), edits.as_in(tracer.sites()[0]), x)
    torch.testing.assert_close(got, double(s.mask_filled)(x), **CLOSE)


def test_one_after_the_other():
    for repairs in (
        [edits.rescale(0.5), edits.see(lambda site: TRIANGLE)],
        [edits.see(lambda site: TRIANGLE), edits.rescale(0.5)],
        [lambda site: None, edits.rescale(0.5), lambda site: None, edits.see(lambda site: TRIANGLE)],
    ):
        becomes(s.factor_missing, edits.apply_all(repairs), s.mask_filled)


def test_nothing_to_change_changes_nothing():
    x = s.content().double()
    for repair in (lambda site: None, edits.see(lambda site: None), edits.apply_all([])):
        got, tracer = edited(double(s.by_operator), repair, x)
        assert torch.equal(got, double(s.by_operator)(x))
        assert tracer.fired == {"inner#0": 1}


class Views(s.Written):
    """Heads are split by a view where a transpose is meant; or put together by a reshape alone."""

    split_wrong = merged_wrong = False

    def forward(self, x):
        def heads(t, width):
            if self.split_wrong:
                return t.reshape(t.shape[0], s.HEADS, t.shape[1], width)
            return t.unflatten(-1, (s.HEADS, width)).transpose(1, 2)

        y = self.mix(heads(self.q(x), s.WIDTH), heads(self.k(x), s.WIDTH), heads(self.v(x), s.VALUE))
        y = y.reshape(y.shape[0], y.shape[2], -1) if self.merged_wrong else y.transpose(1, 2).flatten(2)
        return self.out(y)


@pytest.mark.parametrize("mix", [s.by_operator, s.fused, s.by_bmm], ids=lambda m: m.__name__)
@pytest.mark.parametrize("fault", ["split_wrong", "merged_wrong"])
def test_split_heads(fault, mix):
    x = s.content().double()
    torch.manual_seed(1)
    model = Views(mix).double().eval()
    wanted = model(x)
    setattr(model, fault, True)
    assert not torch.allclose(model(x), wanted, atol=1e-4)
    _, tracer = edited(model, lambda site: None, x, key="(root)#0")
    (broken,) = tracer.sites()
    assert not broken.rows.are_tokens
    got, tracer = edited(model, edits.split_heads(lambda site: None, s.LENGTH, broken), x, key="(root)#0")
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert tracer.sites()[0].rows.are_tokens


@pytest.mark.parametrize("looks", [True, False])
def test_split_heads_of_a_sequence_first_layer_fed_batch_first(looks):
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(12, 3)

        def forward(self, x):
            return self.attn(x, x, x, need_weights=looks)[0]

    model, x = Wrong().double().eval(), torch.randn(2, 5, 12, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(x.transpose(0, 1)).transpose(0, 1)
    _, tracer = edited(model, lambda site: None, x, key="attn#0")
    (broken,) = tracer.sites()
    assert broken.rows.over_batch
    got, _ = edited(model, edits.split_heads(lambda site: None, s.LENGTH, broken), x, key="attn#0")
    torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_an_edit_reaches_the_fast_path():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 20, 0.0, batch_first=True), 1).double().eval()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(x, mask=~TRIANGLE)
    got, tracer = edited(model, edits.see(lambda site: TRIANGLE), x, key="layers.0.self_attn#0")
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert tracer.fired == {"layers.0.self_attn#0": 1}


def test_an_edit_is_gone_after_the_run():
    model, x = double(s.by_operator), s.content().double()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        before = model(x)
        got, _ = edited(model, edits.rescale(3.0), x)
        assert not torch.equal(got, before)
        assert torch.equal(model(x), before)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_an_edit_is_gone_after_an_exception_in_it():
    def fails(site):
        raise ZeroDivisionError("in the edit")

    model, x = double(s.by_operator), s.content().double()
    with torch.no_grad():
        before = model(x)
        with pytest.raises(ZeroDivisionError, match="in the edit"):
            edited(model, fails, x)
        assert torch.equal(model(x), before)


def test_fired_counts_every_pass_and_no_pass_shows():
    def twice(q, k, v):
        return s.by_operator(q, k, s.by_operator(q, k, v))

    _, tracer = edited(double(twice), edits.rescale(0.5), key="inner#1")
    assert tracer.fired == {"inner#1": 1}
    _, tracer = edited(double(twice), edits.rescale(0.5), key="elsewhere#0")
    assert tracer.fired == {}


@pytest.mark.parametrize(
    "mix", [s.by_operator, s.by_bmm_heads_outside, s.by_einsum_heads_last, s.fused], ids=lambda m: m.__name__
)
def test_given_weights_meet_the_values(mix):
    """Every query looks at key 1 alone: each output is the value of position 1, whatever the layout."""

    def only_key_one(site):
        weights = torch.zeros_like(site.tensors.weights)
        weights[..., 1] = 1
        return Replacement(weights=weights)

    def value_one(q, k, v):
        return v[..., 1:2, :].expand(*q.shape[:-1], -1)

    x = s.content().double()
    got, _ = edited(double(mix), only_key_one, x)
    torch.testing.assert_close(got, double(value_one)(x), **CLOSE)


def test_a_given_output_stands_in_the_models_layout():
    def zeros(site):
        tensors = site.tensors
        return Replacement(output=torch.zeros(*tensors.weights.shape[:-1], tensors.value.shape[-1]))

    model, x = double(s.by_einsum_heads_inside), s.content().double()
    got, _ = edited(model, zeros, x)
    torch.testing.assert_close(got, model.inner.out.bias.expand_as(got))


def test_an_edit_sees_the_stages_in_one_layout():
    """scores, logits, weights and values of every spelling are those of the plain one."""
    x, stages = s.content().double(), {}
    for mix in (*s.PRODUCTS, s.fused):
        _, tracer = edited(double(mix), lambda site: None, x, keep=True)
        stages[mix.__name__] = tracer.sites()[0].tensors
    first = stages["by_operator"]
    model = double(s.by_operator).inner
    q = model.q(x).unflatten(-1, (s.HEADS, s.WIDTH)).transpose(1, 2)
    k = model.k(x).unflatten(-1, (s.HEADS, s.WIDTH)).transpose(1, 2)
    torch.testing.assert_close(first.scores, q @ k.mT)
    torch.testing.assert_close(first.weights, (q @ k.mT * 0.5).softmax(-1))
    for name, tensors in stages.items():
        for stage in ("scores", "logits", "weights", "query", "key", "value"):
            torch.testing.assert_close(getattr(tensors, stage), getattr(first, stage), msg=f"{name}: {stage}")
        torch.testing.assert_close(tensors.aggregate(tensors.weights), tensors.output)


def test_find_needs_no_edit():
    assert len(find(double(s.by_operator), s.content().double())) == 1
