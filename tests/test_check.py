"""A check from end to end on four positions, its numbers held against weights computed by hand; and what it leaves."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect

import pytest
import torch
from tests.sites import spellings as s
from torch import Tensor, nn

import intently
from intently import CannotCheck, Intent, Mask, Target
from intently.promises import PROMISES
from intently.report import BrokenPromise

LENGTH = 4
CAUSAL = Intent(Mask.causal())


def honest(q, k, v):
    return (q @ k.mT * s.SCALE).masked_fill(s.future(q), float("-inf")).softmax(-1) @ v


def leaky(q, k, v):
    seen = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(1)
    weights = (q @ k.mT * s.SCALE).masked_fill(~seen, float("-inf")).softmax(-1)  # weights
    return weights @ v


def unscaled(q, k, v):
    scores = q @ k.mT  # scores
    return scores.masked_fill(s.future(q), float("-inf")).softmax(-1) @ v


def target(mix, intent: Intent | None = CAUSAL, **said) -> Target:
    return Target(s.Model(mix).eval(), intent, features=s.INPUT, length=LENGTH, **said)


def inputs(target: Target, samples: int, seed: int = 0) -> Tensor:
    """The numbers that a check feeds: a function of its seed."""
    return target.ready().batch(samples, {"x": LENGTH}, seed=seed, dtype=torch.float64).arguments["x"]


def scores(target: Target, x: Tensor) -> Tensor:
    """q·k of every head by hand, [batch, heads, query, key]."""
    inner = copy.deepcopy(target.model.inner).double()
    q = inner.q(x).reshape(len(x), LENGTH, s.HEADS, s.WIDTH).detach()
    k = inner.k(x).reshape(len(x), LENGTH, s.HEADS, s.WIDTH).detach()
    found = torch.zeros(len(x), s.HEADS, LENGTH, LENGTH, dtype=torch.float64)
    for head in range(s.HEADS):
        for query in range(LENGTH):
            for key in range(LENGTH):
                found[:, head, query, key] = (q[:, query, head] * k[:, key, head]).sum(-1)
    return found


def samples_in(condition: str) -> int:
    return int(condition.removeprefix("batch "))


def cells(report, promise: str):
    return {c.condition: c for c in report.grid if c.promise == promise}


# -- verdicts -------------------------------------------------------------------------------------------------------


def test_kept():
    report = intently.check(target(honest))
    assert (report.verdict, report.ok, report.intent) == ("kept", True, "causal (stated)")
    assert [(f.fault, f.severity) for f in report.findings] == [("slow-path", "note")]  # it is written out
    report.raise_if_broken()
    assert {c.verdict for c in report.grid if c.promise != "affordable"} == {"kept", "not-applicable"}
    assert {c.promise for c in report.grid} == set(PROMISES)
    assert {c.condition for c in report.grid if c.promise == "causal"} == {
        "batch 1",
        f"batch {samples_in(wide(report))}",
    }
    assert {c.condition for c in report.grid if c.promise == "finite"} >= {"float32", "bfloat16", "float16"}
    assert all(
        c.error <= c.noise for c in report.grid if c.verdict == "kept" and c.promise not in ("finite", "sees-all")
    )
    (site,) = report.sites
    assert (site.path, site.mask, site.heads, site.head_dim, site.value_dim, site.queries) == (
        "inner",
        "causal",
        3,
        4,
        6,
        LENGTH,
    )
    assert site.scale == pytest.approx(s.SCALE)
    assert report.environment["dtype"] == "float64" and report.environment["torch"] == torch.__version__
    assert report.forwards > 0 and report.seconds > 0
    assert "the model takes no key mask: it has no way to ignore pads" in report.notes


def wide(report) -> str:
    return next(c.condition for c in report.grid if c.promise == "batch-independent")


def test_leak():
    made = target(leaky)
    report = intently.check(made)
    assert (report.verdict, report.ok) == ("broken", False)
    (finding,) = report.findings
    assert (finding.fault, finding.promise, finding.site, finding.proof) == ("causal-leak", "causal", "inner", "proven")
    assert (finding.severity, finding.heads, finding.stage) == ("error", None, "mask")
    assert (finding.source.file, {finding.source.line}) == (__file__, s.lines(leaky, "weights"))
    x = inputs(made, samples_in(finding.condition))
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(1)
    weights = (scores(made, x) * 0.5).masked_fill(~seen, float("-inf")).softmax(-1)
    said = finding.witness.values
    assert (said["sample"], said["head"], said["query"], said["key"]) == (0, 0, 0, 1)
    assert said["weight"] == pytest.approx(float(weights[0, 0, 0, 1]), abs=1e-6)
    assert str(said["weight"]) in finding.witness.statement
    table = finding.witness.table
    assert table.columns == tuple(f"key {j}" for j in range(LENGTH))
    assert torch.tensor([values for _, values in table.rows]).double() == pytest.approx(weights[0, 0], abs=1e-4)
    assert set(table.marked) == {(0, 1), (1, 2), (2, 3)}
    with pytest.raises(BrokenPromise, match="causal-leak at inner"):
        report.raise_if_broken()


def test_the_error_of_a_cell_is_what_moved():
    """Each position of sample 0 is overwritten; the largest movement of an earlier output is the cell's error."""
    made = target(leaky)
    report = intently.check(made, select=["causal"])
    (name,) = [n for n in cells(report, "causal") if n != "batch 1"]
    cell, x = cells(report, "causal")[name], inputs(made, samples_in(name))
    model, stream = copy.deepcopy(made.model).double(), made.ready().main
    base, worst = model(x).detach(), 0.0
    for position in range(LENGTH):
        moved = (model(stream.change(x, 0, position, 1)).detach() - base)[0, :position].abs()
        worst = max(worst, float(moved.max()) if position else 0.0)
    assert cell.verdict == "broken" and cell.error == pytest.approx(worst, rel=1e-9)
    assert cell.noise < 1e-10 < cell.error


def test_missing_scale():
    made = target(unscaled)
    report = intently.check(made)
    (finding,) = report.findings
    assert (finding.fault, finding.promise) == ("scale-missing", "scaled")
    assert (finding.site, finding.proof) == ("inner", "proven")
    assert {finding.source.line} == s.lines(unscaled, "scores")
    values = finding.witness.values
    assert values["measured"] == pytest.approx(1.0) and values["intended"] == 0.5
    by_hand = scores(made, inputs(made, samples_in(finding.condition)))[0, values["head"], LENGTH - 1]
    rows = dict(finding.witness.table.rows)
    assert rows["q·k"] == pytest.approx(by_hand.tolist(), abs=1e-4)
    assert rows["logit"] == pytest.approx(by_hand.tolist(), abs=1e-4)
    assert rows["meant"] == pytest.approx((by_hand / 2).tolist(), abs=1e-4)


class Padded(s.Model):
    """Takes a key mask; passes it on where `listens`."""

    listens = True

    def forward(self, x, attention_mask=None):
        hidden = None if attention_mask is None or not self.listens else (attention_mask == 0)[:, None, None, :]

        def mix(q, k, v):
            logits = q @ k.mT * s.SCALE
            return (logits if hidden is None else logits.masked_fill(hidden, -1e4)).softmax(-1) @ v

        self.inner.mix = mix
        return self.inner(x)


def test_padding_leak():
    model = Padded(honest).eval()
    kept = intently.check(Target(model, Intent(Mask.full()), features=s.INPUT, length=LENGTH))
    assert kept.ok and {c.verdict for c in cells(kept, "padding-inert").values()} == {"kept"}
    model.listens = False
    made = Target(model, Intent(Mask.full()), features=s.INPUT, length=LENGTH)
    report = intently.check(made)
    (finding,) = report.findings
    assert (finding.fault, finding.promise) == ("padding-leak", "padding-inert")
    assert (finding.site, finding.proof) == ("inner", "proven")
    assert finding.condition in ("pads right", "pads left")
    said = finding.witness.values
    samples = samples_in(wide(report))
    x = inputs(made, samples)
    weights = (scores(made, x) * 0.5).softmax(-1)
    by_hand = weights[said["sample"], said["head"], said["query"], said["key"]]
    assert said["weight"] == pytest.approx(float(by_hand), abs=1e-6)
    pads = {"pads right": {2, 3}, "pads left": {0, 1}}[finding.condition]
    assert said["sample"] == 0 and said["key"] in pads and said["query"] not in pads


def test_a_fill_that_is_too_weak_says_nothing_of_the_scale():
    def tiny(q, k, v):
        return (q @ k.mT * s.SCALE).masked_fill(s.future(q), 1e-9).softmax(-1) @ v

    report = intently.check(Target(s.Model(tiny).eval(), CAUSAL, features=s.INPUT))
    assert [(f.fault, f.site, f.proof) for f in report.findings] == [("mask-ignored", "inner", "proven")]


def test_two_streams():
    class Reader(nn.Module):
        """Causal over itself, then over the whole memory."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.own, self.cross = s.Written(honest), s.Written(s.by_operator)

        def forward(self, x, memory):
            return self.cross(x + self.own(x), memory)

    report = intently.check(Target(Reader().eval(), Intent.encoder_decoder(), features=s.INPUT))
    assert report.ok, [f.message for f in report.findings]
    assert [(r.path, r.role, r.mask) for r in report.sites] == [("own", "self", "causal"), ("cross", "cross", "full")]
    lengths = {r.queries for r in report.sites} | {r.keys for r in report.sites}
    assert len(lengths) == 2, "the streams have different lengths"


@pytest.mark.parametrize("heads", [True, False])
def test_functions_of_q_k_v(heads):
    def attention(q, k, v):
        if heads:
            assert q.dim() == 4
        else:
            assert q.dim() == 3
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    assert intently.check(attention, intent=Intent(Mask.full())).ok
    report = intently.check(attention, intent=CAUSAL)
    assert [(f.fault, f.proof) for f in report.findings] == [("causal-leak", "proven")]


def test_without_an_intent_what_is_observed_is_told():
    report = intently.check(target(honest, None))
    assert (report.intent, report.ok) == ("causal (observed)", True)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_layer_of_torch(batch_first):
    layer = nn.MultiheadAttention(12, 4, batch_first=batch_first)
    report = intently.check(layer.eval(), intent=Intent(Mask.full()))
    assert report.ok, [f.message for f in report.findings]


@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_layer_of_torch(batch_first):
    encoder = nn.TransformerEncoderLayer(12, 4, 20, batch_first=batch_first)
    report = intently.check(encoder.eval(), intent=Intent(Mask.full()))
    assert report.ok, [f.message for f in report.findings]
    assert any("gradients on" in c.condition for c in report.grid)


# -- what is asked for ----------------------------------------------------------------------------------------------


def both(q, k, v):
    """Two faults: no scale, and a triangle that starts one key too late."""
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(2)
    return (q @ k.mT).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def faults(**said) -> set[str]:
    return {f.fault for f in intently.check(target(both), **said).findings}


def test_select_and_ignore():
    assert faults() == {"causal-leak", "scale-missing"}
    assert faults(select=["causal"]) == faults(select=["causal-leak"]) == {"causal-leak"}
    assert faults(select=["scaled"]) == faults(select=["scale-missing"]) == {"scale-missing"}
    assert faults(select=["causal", "scale-missing"]) == {"causal-leak", "scale-missing"}
    assert faults(ignore=["scale-missing"]) == {"causal-leak"}
    assert faults(select=["causal", "scaled"], ignore=["scale-missing"]) == {"causal-leak"}


@pytest.mark.parametrize(
    ("promise", "left"),
    [
        ("scaled", "causal-leak"),
        ("causal", "scale-missing"),
    ],
)
def test_an_ignored_promise_gives_no_finding(promise, left):
    assert faults(ignore=[promise]) == {left}


def test_what_is_not_selected_is_said_not_to_be_tried():
    report = intently.check(target(both), select=["causal"])
    assert {c.promise for c in report.grid} == set(PROMISES)
    assert {c.promise for c in report.grid if c.verdict != "not-tried"} == {"causal"}
    assert {c.note for c in report.grid if c.verdict == "not-tried"} == {"not selected"}


@pytest.mark.parametrize("said", [{"select": ["casual"]}, {"ignore": ["casual"]}, {"dtype": "float63"}], ids=str)
def test_names_that_nothing_has(said):
    with pytest.raises((CannotCheck, ValueError), match=r"casual|float63"):
        intently.check(target(leaky), **said)


def test_a_waived_promise():
    intent = dataclasses.replace(CAUSAL, waived={"causal": "it reads one token ahead"})
    report = intently.check(target(leaky, intent))
    assert report.ok and {f.severity for f in report.findings} == {"note"}
    told = {(c.verdict, c.note) for c in cells(report, "causal").values()}
    assert told == {("not-applicable", "waived: it reads one token ahead")}


def test_an_unexplained_broken_promise_is_told():
    report = intently.check(target(leaky), ignore=["causal-leak", "side-channel"])
    assert not [f for f in report.findings if f.promise == "causal"]
    assert "broken" in {c.verdict for c in cells(report, "causal").values()}
    assert any(note.startswith("causal is broken under 'batch") for note in report.notes)


def test_a_scale_that_is_meant():
    assert intently.check(target(unscaled, dataclasses.replace(CAUSAL, scale=1.0))).ok
    assert intently.check(target(unscaled, dataclasses.replace(CAUSAL, scale_is_free=True))).ok
    report = intently.check(target(honest, dataclasses.replace(CAUSAL, scale=1.0)))
    assert [f.promise for f in report.findings] == ["scaled"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_chosen_precision(dtype):
    report = intently.check(target(leaky), dtype=dtype)
    assert report.environment["dtype"] == dtype
    assert [f.fault for f in report.findings] == ["causal-leak"]
    assert intently.check(target(honest), dtype=dtype).ok


def test_an_example_call_and_a_padding_argument():
    class Odd(Padded):
        def forward(self, picture, keepers=None):
            return super().forward(picture, keepers)

    made, example = Odd(honest).eval(), (s.content(2, 6),)
    report = intently.check(made, intent=Intent(Mask.full()), inputs=example, padding="keepers:keep")
    assert report.ok
    assert {c.verdict for c in cells(report, "padding-inert").values()} == {"kept"}


def test_progress():
    seen = []
    intently.check(target(honest), progress=lambda phase, done, total: seen.append((phase, done, total)))
    assert seen and all(0 < done <= total for _, done, total in seen)
    assert all(phase.startswith(("trying", "looking", "proving")) for phase, _, _ in seen)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


# -- repeatable, and nothing is left behind -------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_report():
    one, two = (dataclasses.replace(intently.check(target(both)), seconds=0.0) for _ in "ab")
    assert one == two
    torch.manual_seed(99)  # the caller's random state plays no part
    assert dataclasses.replace(intently.check(target(both)), seconds=0.0) == one
    other = intently.check(target(both), seed=3)
    assert {(f.fault, f.site, f.proof) for f in other.findings} == {(f.fault, f.site, f.proof) for f in one.findings}
    assert other.findings[0].witness != one.findings[0].witness


class Living(nn.Module):
    """Everything that a careless check would disturb: dropout, running statistics, a counter, mixed modes."""

    calls = 0

    def __init__(self, fails_after: int | None = None):
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.inner, self.drop = nn.BatchNorm1d(s.INPUT), s.Written(honest), nn.Dropout(0.3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.fails_after = fails_after

    def forward(self, x):
        Living.calls += 1  # counted over all copies
        if self.fails_after is not None and Living.calls > self.fails_after:
            raise OSError("the power went out")
        if self.training:
            self.steps += 1
        return self.drop(self.inner(self.norm(x.mT).mT))


def surroundings():
    settings = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    return settings, torch.get_rng_state().tolist(), marks()


def marks():
    classes = nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer
    return [c.forward for c in classes], [m for m in vars(nn.Module) if "intently" in m], inspect.getsource(nn.Softmax)


def state(model):
    return (
        {k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()],
        [(p.grad, p.requires_grad, p.dtype) for p in model.parameters()], [sorted(vars(m)) for m in model.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
    )  # fmt: skip


def assert_same(before, after):
    assert before[0].keys() == after[0].keys()
    changed = [k for k, v in before[0].items() if not torch.equal(v, after[0][k])]
    assert not changed, f"changed: {changed}"
    assert before[1:] == after[1:]


@pytest.mark.parametrize(
    "training",
    [True, False],
    ids=["train", "eval"],
)
@pytest.mark.parametrize("fails_after", [None, 3, 12], ids=["runs", "raises early", "raises late"])
def test_the_model_and_torch_are_left_as_they_were(training, fails_after):
    model = Living(fails_after).train(training)
    model.drop.train(not training)
    before, around = state(model), surroundings()
    Living.calls = 0
    with pytest.raises((CannotCheck, OSError)) if fails_after is not None else contextlib.nullcontext():
        assert intently.check(Target(model, CAUSAL, features=s.INPUT)).ok
    assert Living.calls > (fails_after or 30)
    assert surroundings() == around
    assert_same(before, state(model))


def test_the_default_type_and_the_thread_count_are_put_back():
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    try:
        made = target(honest)
        around = surroundings()
        assert intently.check(made).ok
        assert surroundings() == around
        with pytest.raises((ZeroDivisionError, CannotCheck)):
            intently.check(made, progress=lambda *_: 1 / 0)
        assert surroundings() == around
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_harness_sees_a_changed_model():
    model = Living().train()
    before = state(model)
    model(s.content())
    with pytest.raises(AssertionError, match="changed"):
        assert_same(before, state(model))


class WithClassToken(nn.Module):
    """A class token of the model's own stands before the stream, so that keys are one more than its positions."""

    def __init__(self, passes_mask):
        super().__init__()
        self.embed, self.qkv, self.token = nn.Embedding(30, 16), nn.Linear(16, 48), nn.Parameter(torch.randn(1, 1, 16))
        self.passes_mask = passes_mask

    def forward(self, input_ids, attention_mask=None):
        x = torch.cat([self.token.expand(len(input_ids), -1, -1), self.embed(input_ids)], 1)
        scores = (lambda q, k, v: q @ k.mT / 4)(*self.qkv(x).chunk(3, -1))
        if attention_mask is not None and self.passes_mask:
            keep = nn.functional.pad(attention_mask.bool(), (1, 0), value=True)
            scores = scores.masked_fill(~keep[:, None], float("-inf"))
        return (scores.softmax(-1) @ self.qkv(x).chunk(3, -1)[2])[:, 0]


@pytest.mark.parametrize(("passes_mask", "found"), [(True, set()), (False, {"padding-leak"})])
def test_pads_are_told_apart_behind_a_class_token(passes_mask, found):
    torch.manual_seed(0)
    report = intently.check(WithClassToken(passes_mask))
    assert {f.fault for f in report.findings if f.severity == "error"} == found


class CausalByMask(torch.nn.Module):
    """Hides what comes later only where it is given a key mask, as one released text model does."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        q, mask = self.own(x)[:, None], None
        if attention_mask is not None:
            mask = attention_mask[:, None, None].bool() & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return x + torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)[:, 0]


def test_what_one_run_without_pads_hides_is_the_measure_for_all() -> None:
    torch.manual_seed(0)
    report = intently.check(Target(CausalByMask().eval(), features=8))
    assert report.intent.startswith("causal")
    assert {f.fault for f in report.findings if f.severity == "error"} == {"causal-leak"}


class RightWhenLookedAt(torch.nn.Module):
    """Sees both ways where its weights are asked for; else through a call that is causal, or is not."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.own, self.causal = torch.nn.Linear(8, 24), causal

    def forward(self, x: torch.Tensor, need_weights: bool = False) -> torch.Tensor:
        q, k, v = self.own(x)[:, None].chunk(3, -1)
        if need_weights:
            return x + ((q @ k.mT / 8**0.5).softmax(-1) @ v)[:, 0]
        return x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)[:, 0]


@pytest.mark.parametrize(("causal", "found"), [(True, [("causal-extra", "proven")]), (False, [])])
def test_a_call_at_fault_as_it_is_is_not_told_for_running_otherwise_when_looked_at(causal, found) -> None:
    torch.manual_seed(0)
    report = intently.check(Target(RightWhenLookedAt(causal).eval(), Intent(Mask.full()), features=8))
    assert [(f.fault, f.proof) for f in report.findings if f.severity == "error"] == found
    assert any(c.promise == "observer-neutral" and c.verdict == "broken" for c in report.grid) is causal
    assert not [n for n in report.notes if "no fault known" in n]
