"""Each promise: kept by an honest model, broken by one that breaks it, with the error that can be counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tests.sites import spellings as s
from torch import nn

import intently
from intently import CannotCheck, Intent, Mask, Target
from intently.promises import PROMISES, conditions_of, difference
from intently.promises.cells import reach
from intently.promises.trial import Trial
from intently.targets import Padding, Stream, Switch
from intently.targets.running import Runner

LENGTH = 4
FULL, CAUSAL = Intent(Mask.full()), Intent(Mask.causal())


def target(mix, intent: Intent = FULL) -> Target:
    return of(s.Model(mix), intent)


def of(model: nn.Module, intent: Intent = FULL) -> Target:
    return Target(model.eval(), intent, features=s.INPUT, length=LENGTH)


def cells(made: Target, promise: str):
    """The cells of one promise, by condition."""
    return {c.condition: c for c in intently.check(made, select=[promise]).grid if c.promise == promise}


def verdicts(made: Target, promise: str) -> set[str]:
    return {c.verdict for c in cells(made, promise).values()}


def broken(found) -> set[str]:
    return {name for name, cell in found.items() if cell.verdict == "broken"}


def honest_causal(q, k, v):
    return (q @ k.mT * s.SCALE).masked_fill(s.future(q), float("-inf")).softmax(-1) @ v


# What can be said of a model of vectors without a mask, a cache, an order or a second sequence, under a full intent.
SPOKEN_OF = {
    "sees-all", "batch-independent", "repeatable", "observer-neutral", "finite", "backends-agree", "scaled", "normalized",
    "responsive",
}  # fmt: skip


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("mix", [s.by_operator, s.by_einsum_heads_last, s.fused], ids=lambda m: m.__name__)
def test_an_honest_model_keeps_them_all(promise, mix):
    if promise == "affordable":
        return  # right, and dearer than it need be: see test_numerics
    assert verdicts(target(mix), promise) == {"kept" if promise in SPOKEN_OF else "not-applicable"}


@pytest.mark.parametrize("promise", PROMISES)
def test_its_text(promise):
    made = PROMISES[promise]
    assert made.name == promise and made.statement.endswith(".") and made.how and made.sources and made.applies_to


# -- one by one -----------------------------------------------------------------------------------------------------


def test_causal():
    assert verdicts(target(honest_causal, CAUSAL), "causal") == {"kept"}
    assert verdicts(target(s.by_operator, CAUSAL), "causal") == {"broken"}
    assert verdicts(target(s.by_operator, Intent()), "causal") == {"not-applicable"}  # observed: full


def test_causal_leaves_a_pooled_output_alone():
    class Pooled(s.Model):
        def forward(self, x):
            return super().forward(x).mean(1)

    assert verdicts(of(Pooled(s.by_operator), CAUSAL), "causal") == {"not-tried"}


def test_a_window_reaches_further_through_layers_and_never_forward():
    seen = Mask.parse("causal & window(2)").matrix(5)
    assert torch.equal(reach(seen), torch.ones(5, 5).tril().bool())
    assert torch.equal(reach(torch.eye(4).bool()), torch.eye(4).bool())
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()
    assert torch.equal(reach(blocks), blocks)


def test_sees_all_counts_pairs():
    found = cells(target(honest_causal), "sees-all")
    assert {c.verdict for c in found.values()} == {"broken"}
    assert {c.error for c in found.values()} == {float(LENGTH * (LENGTH - 1) // 2)}  # the strict upper triangle


def test_batch_independent():
    def across(q, k, v):
        return (q @ k.mT * s.SCALE).softmax(0) @ v

    assert verdicts(target(across), "batch-independent") == {"broken"}


def test_being_alone_is_a_batch_too():
    class Counting(s.Model):
        def forward(self, x):
            return super().forward(x) * (1.0 + 0.01 * x.shape[0])

    (cell,) = cells(of(Counting(s.by_operator)), "batch-independent").values()
    assert cell.verdict == "broken" and "being alone" in cell.note


def test_repeatable():
    assert verdicts(target(s.dropped), "repeatable") == {"broken"}
    assert verdicts(target(s.dropped_in_eval), "repeatable") == {"kept"}


class Looked(s.Model):
    """Computes something else when it is asked for its weights."""

    honest = True

    def forward(self, x, need_weights=False):
        self.inner.mix = s.by_operator if self.honest or not need_weights else s.factor_missing
        return super().forward(x)


def test_observer_neutral():
    model = Looked(s.by_operator)
    assert verdicts(of(model), "observer-neutral") == {"kept"}
    model.honest = False
    found = cells(of(model), "observer-neutral")
    assert broken(found) == {n for n in found if n.startswith("need_weights=True")}
    assert any(c.note == "tracing changes no bit" for c in found.values())


class Backends(s.Model):
    use_flash: bool
    honest = True

    def __init__(self):
        super().__init__(s.by_operator)
        self.use_flash = True

    def forward(self, x):
        slow = s.by_operator if self.honest else s.factor_missing
        self.inner.mix = s.fused if self.use_flash else slow
        return super().forward(x)


def test_backends_agree():
    model = Backends()
    assert verdicts(of(model), "backends-agree") == {"kept"}
    model.honest = False
    found = cells(of(model), "backends-agree")
    assert broken(found) == {n for n in found if n.startswith("use_flash=False")} != set()


def test_a_call_that_is_not_softmax_times_values_is_held_against_float64():
    def wrong(q, k, v):
        return (q @ k.mT * s.SCALE).float().softmax(-1).to(q.dtype) @ v

    assert "broken" not in verdicts(target(wrong), "backends-agree")  # rounding of a float32 step is no fault


def test_finite_counts_rows():
    def blind(q, k, v):
        hidden = (torch.arange(LENGTH) == 2)[:, None]
        return (q @ k.mT * s.SCALE).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    found = cells(target(blind), "finite")
    assert {c.verdict for c in found.values()} == {"broken"}
    for name, cell in found.items():
        if name.startswith("batch "):
            assert cell.error == float(name.removeprefix("batch "))  # one row of each sample


def test_finite_in_half_precision():
    def large(q, k, v):
        scores = q @ k.mT * s.SCALE * 2e5 / 2e5  # 65504 is the largest half
        return scores.softmax(-1) @ v

    found = cells(target(large), "finite")
    assert (found["float32"].verdict, found["bfloat16"].verdict, found["float16"].verdict) == ("kept", "kept", "broken")


def test_scaled_is_a_relative_error():
    for mix, error in ((s.factor_missing, 1.0), (s.factor_on_q_and_after, 0.5), (s.factor_of_baddbmm, 0.75)):
        (cell,) = cells(target(mix), "scaled").values()
        assert (cell.verdict, cell.error) == ("broken", pytest.approx(error, rel=1e-6))


def test_scaled_one_head_of_three():
    (cell,) = cells(target(s.factor_of_each_head), "scaled").values()
    assert cell.error == pytest.approx(1.0, rel=1e-6)  # 1.0 where 0.5 is meant; the others are 1 and ½ of it


def test_a_field_of_the_configuration_may_be_the_factor_unless_the_intent_says_it():
    model = s.Model(s.factor_of_baddbmm)  # 0.125
    model.config = {"query_pre_attn_scalar": 8}
    (told,) = cells(of(model, Intent(Mask.full(), scale=0.5)), "scaled").values()
    (untold,) = cells(of(model), "scaled").values()
    assert (told.verdict, told.error) == ("broken", pytest.approx(0.75))
    assert untold.verdict == "kept"


@pytest.mark.parametrize(
    ("changed", "error"),
    [(lambda w: w * 0.5, 0.5), (lambda w: w * 1.25, 0.25), (lambda w: w / w.sum(-1, keepdim=True), 0.0)],
)
def test_normalized(changed, error):
    def mix(q, k, v):
        return changed((q @ k.mT * s.SCALE).softmax(-1)) @ v

    (cell,) = cells(target(mix), "normalized").values()
    assert cell.error == pytest.approx(error, abs=1e-9)
    assert cell.verdict == ("broken" if error else "kept")


def test_a_sink_takes_its_part():
    def sink(q, k, v):
        logits = F.pad(q @ k.mT * s.SCALE, (0, 1))
        return logits.softmax(-1)[..., :-1] @ v

    assert verdicts(target(sink), "normalized") == {"kept"}


class Padded(s.Model):
    """Hides pads; `counts` adds something that depends on how many there are."""

    hides = True
    counts = False

    def forward(self, x, attention_mask=None):
        hidden = None if attention_mask is None or not self.hides else (attention_mask == 0)[:, None, None, :]

        def mix(q, k, v):
            logits = q @ k.mT * s.SCALE
            return (logits if hidden is None else logits.masked_fill(hidden, float("-inf"))).softmax(-1) @ v

        self.inner.mix = mix
        return self.inner(x) * (1 + 0.1 * x.shape[1] if self.counts else 1)


@pytest.mark.parametrize(
    ("hides", "counts", "right"), [(True, False, "kept"), (False, False, "broken"), (True, True, "broken")]
)
def test_padding_inert(hides, counts, right):
    model = Padded(s.by_operator)
    model.hides, model.counts = hides, counts
    found = cells(Target(model.eval(), FULL, features=s.INPUT), "padding-inert")
    assert found["pads right"].verdict == right
    assert found["pads left"].verdict == ("kept" if hides else "broken")
    if counts:
        assert "their number has" in found["pads right"].note


class PadsByBackend(Padded):
    """Makes another thing of pads under another backend; `leaks` are the backends (as `use_flash`) that see pads."""

    use_flash: bool
    leaks: tuple[bool, ...] = ()

    def __init__(self):
        super().__init__(s.by_operator)
        self.use_flash = True

    def forward(self, x, attention_mask=None):
        self.hides = self.use_flash not in self.leaks
        if attention_mask is not None and not self.use_flash:
            x = x * (2 - attention_mask[..., None])
        return super().forward(x, attention_mask)


@pytest.mark.parametrize(
    ("leaks", "right"), [((), "kept"), ((True, False), "not-tried"), ((True,), "broken"), ((False,), "broken")]
)
def test_what_backends_make_of_pads_is_told_as_a_leak_where_both_let_it_out(leaks, right):
    model = PadsByBackend()
    model.leaks = leaks
    found = cells(Target(model.eval(), FULL, features=s.INPUT), "backends-agree")
    assert found["use_flash=False · pads right"].verdict == right
    assert found["use_flash=False · batch 2"].verdict == "kept"


# -- the parts ------------------------------------------------------------------------------------------------------


def test_difference():
    nan, inf = float("nan"), float("inf")
    one = torch.tensor([[[1.0, 2.0], [nan, 1.0], [inf, 1.0], [nan, 1.0]]])
    two = torch.tensor([[[1.5, 1.0], [nan, 1.0], [inf, 3.0], [0.0, 1.0]]])
    assert difference(one, two).tolist() == [[1.0, 0.0, 2.0, inf]]


def test_conditions():
    stream = Stream("x", "features", width=3)
    plain = Target(None, streams=(stream,))
    assert sorted(c.name for c in conditions_of(plain, 3)) == ["batch 1", "batch 3"]
    padded = dataclasses.replace(stream, padding=Padding("mask", True))
    masked = Target(None, streams=(padded,), switches=(Switch("fast", backend=True),))
    names = {c.name for c in conditions_of(masked, 3)}
    layouts = {
        "batch 1",
        "batch 3",
        "mask of ones",
        "mask of ones, batch 1",
        "pads right",
        "pads right, batch 1",
        "pads left",
    }
    assert names == layouts | {f"fast · {name}" for name in layouts}
    lengths = Target(None, streams=(dataclasses.replace(stream, padding=Padding("lengths", form="lengths")),))
    assert "pads left" not in {c.name for c in conditions_of(lengths, 3)}


def test_pads_lie_where_the_layout_says():
    made = Target(Padded(s.by_operator).eval(), FULL, features=s.INPUT).ready()
    conditions = conditions_of(made, 2)
    trial = Trial(made, FULL, Runner(made, torch.float64), conditions, {"x": 7})
    kept = {c.name: trial.kept(c.layout).get("x") for c in conditions}
    assert kept["batch 2"] is None and kept["mask of ones"].all()
    assert kept["pads right"].tolist() == [[True] * 4 + [False] * 3, [True] * 6 + [False]]
    assert kept["pads left"].tolist() == [[False] * 3 + [True] * 4, [False] + [True] * 6]


def test_influence_moves_what_attends():
    """Through a causal layer position j moves the outputs from j on, of sample 0 alone."""
    made = target(honest_causal, CAUSAL).ready()
    conditions = conditions_of(made, 2)
    trial = Trial(made, CAUSAL, Runner(made, torch.float64), conditions, {"x": LENGTH})
    wide = next(c for c in conditions if c.layout.samples == 2)
    moved = trial.influence(wide).moved["x"] > 1e-12
    assert torch.equal(moved[:, 0], torch.ones(LENGTH, LENGTH).triu().bool())
    assert not moved[:, 1].any()


def test_a_model_that_works_out_how_long_its_answer_is_cannot_be_compared() -> None:
    class Repeats(s.Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out if bool(x[0].sum() < -1) else torch.cat([out, out], 1)

    with pytest.raises(CannotCheck, match="depends on what goes in"):
        intently.check(of(Repeats(s.by_operator), FULL))
