"""Saturation, cost, sums and leftovers: held against hand-computed numbers and against the kernels that really run."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import numerics as zoo
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import intently
from intently import Intent, Mask, Target
from intently.promises.in_half import EXPLAINED, measured
from intently.promises.responsive import sharpness
from intently.sites import Settings, Sizes, tracing
from intently.sites.kernels import kernel_of, refused_for

FULL = Intent(Mask.full())


def site_of(function, *operands: Tensor):
    """The one call of a function of q, k and v, with its stages."""
    sizes = Sizes(operands[0].shape[0], frozenset({operands[0].shape[-2]}))
    with (
        torch.no_grad(),
        tracing(function, dict(zip("qkv", operands, strict=True)), Settings(True, sizes=sizes)) as tracer,
    ):
        function(*operands)
    (site,) = tracer.sites()
    return site


def told(target: Target, **options) -> dict[str, str]:
    return {f.fault: f.severity for f in intently.check(target, **options).findings}


# -- responsive -----------------------------------------------------------------------------------------------------


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def seen_by(queries: Tensor):
    """Keys along the axes, so that a row of the queries is its row of logits."""
    width = queries.shape[-1]
    value = torch.randn(2, 1, width, width, generator=torch.Generator().manual_seed(1)).double()
    return sharpness(
        site_of(by_hand, queries, torch.eye(width, dtype=torch.float64).expand(2, 1, width, width) * 1.0, value)
    )


def drawn(factor: float) -> Tensor:
    return factor * torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)).double()


def middle(numbers: list[float]) -> float:
    """The lower median."""
    return sorted(numbers)[(len(numbers) - 1) // 2]


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_entropy_and_gradient_are_those_of_the_weights(factor):
    gradients, entropies, spreads = [], [], []
    logits = drawn(factor).reshape(-1, 5).tolist()
    for row in logits:
        total = sum(math.exp(x) for x in row)
        weights = [math.exp(x) / total for x in row]
        gradients.append(sum(w * (1 - w) for w in weights))
        entropies.append(-sum(w * math.log(w) for w in weights))
        spreads.append(math.sqrt(sum((x - sum(row) / 5) ** 2 for x in row) / 5))
    found = seen_by(drawn(factor))
    assert found is not None
    assert float(found.gradient[0]) == pytest.approx(middle(gradients))
    assert float(found.entropy[0]) == pytest.approx(middle(entropies))
    assert float(found.spread[0]) == pytest.approx(middle(spreads))
    assert float(found.uniform[0]) == pytest.approx(math.log(5))
    assert float(found.largest[0]) == pytest.approx(max(abs(x) for row in logits for x in row))


def test_a_head_is_saturated_by_content_and_not_by_a_sink():
    sharp, soft = seen_by(drawn(40.0)), seen_by(drawn(1.0))
    sunk = seen_by(drawn(1.0) + 20.0 * (torch.arange(5) == 0))  # every query asks for the first key
    assert sharp is not None and soft is not None and sunk is not None
    assert sharp.saturated.all() and not soft.saturated.any()
    assert (sunk.gradient < 1e-2).all() and (sunk.spread > 4).all() and sunk.sink.all() and not sunk.saturated.any()


def test_one_sharp_head_of_four_is_no_fault():
    class OneSharp(zoo.Fused):
        factors = (300.0, 1.0, 1.0, 1.0)

        def mix(self, q, k, v):
            return super().mix(q * torch.tensor(self.factors).to(q)[:, None, None], k, v)

    class AllSharp(OneSharp):
        factors = (300.0, 300.0, 300.0, 300.0)

    free = {"intent": Intent(Mask.causal(), scale_is_free=True), "select": ["responsive"]}
    assert told(zoo.tower(zoo.Fused, OneSharp), **free) == {}
    assert told(zoo.tower(zoo.Fused, AllSharp), **free) == {"saturated-logits": "warning"}


# -- affordable -----------------------------------------------------------------------------------------------------


class Ran(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def q(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


CALLS = {
    "as it should be": ((q(2, 3, 7, 8), q(2, 3, 7, 8), q(2, 3, 7, 8), None, 0.0), set()),
    "narrow values": ((q(2, 3, 7, 8), q(2, 3, 7, 8), q(2, 3, 7, 4), None, 0.0), {"value width"}),
    "three axes": ((q(2, 7, 8), q(2, 7, 8), q(2, 7, 8), None, 0.0), {"axes"}),
    "dropout": ((q(2, 3, 7, 8), q(2, 3, 7, 8), q(2, 3, 7, 8), None, 0.1), {"dropout"}),
    "mask of three axes": ((q(2, 3, 7, 8), q(2, 3, 7, 8), q(2, 3, 7, 8), q(3, 7, 7), 0.0), {"mask axes"}),
    "bool mask": ((q(2, 3, 7, 8), q(2, 3, 7, 8), q(2, 3, 7, 8), q(7, 7) > -9, 0.0), set()),
    "turned": ((q(2, 3, 8, 7).mT, q(2, 3, 7, 8), q(2, 3, 7, 8), None, 0.0), {"memory order"}),
    "broadcast heads": ((q(2, 3, 7, 8), q(2, 1, 7, 8), q(2, 1, 7, 8), None, 0.0), {"broadcast heads"}),
    "two reasons": ((q(2, 7, 8), q(2, 7, 8), q(2, 7, 4), None, 0.0), {"axes", "value width"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_told_is_the_one_that_runs(name):
    (query, key, value, mask, dropout), reasons = CALLS[name]
    call = {
        "query": query, "key": key, "value": value, "mask": mask, "dropout": dropout, "causal": False, "scale": None, "enable_gqa": False,
    }  # fmt: skip
    with Ran() as ran:
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    assert any("flash" in n for n in ran.names) == (kernel_of(call) == "flash") == (not reasons)
    assert refused_for(call) == reasons


def test_a_kernel_that_is_switched_off():
    (query, key, value, *_), _ = CALLS["as it should be"]
    call = {
        "query": query,
        "key": key,
        "value": value,
        "mask": None,
        "dropout": 0.0,
        "causal": False,
        "scale": None,
        "enable_gqa": False,
    }
    with sdpa_kernel(SDPBackend.MATH):
        assert refused_for(call) == {"switched off"}
    assert refused_for(call) == frozenset()


def test_maps_that_are_returned_are_not_thrown_away():
    class Shows(nn.Module):
        shown = True

        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x):
            query, key, value = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            weights = (query @ key.mT / 8**0.5).softmax(-1)
            output = (weights @ value).transpose(1, 2).flatten(2)
            return (output, weights) if self.shown else output

    shows, hides = Shows(), Shows()
    hides.shown = False
    assert told(Target(shows, FULL, features=16), select=["slow-path"]) == {}
    assert told(Target(hides, FULL, features=16), select=["slow-path"]) == {"slow-path": "note"}


def test_a_cap_has_no_fused_kernel_and_is_left_alone():
    class Capped(zoo.Matmul):
        def mix(self, query, key, value):
            logits = 3 * torch.tanh(query @ key.mT / self.d**0.5 / 3)
            return logits.masked_fill(zoo.future(query), -torch.inf).softmax(-1) @ value

    assert told(zoo.tower(zoo.Fused, Capped), select=["slow-path"]) == {}


def test_a_window_that_is_computed_whole_is_told_on_longer_sequences():
    class Window(zoo.Fused):
        def mix(self, query, key, value):
            seen = ~zoo.future(query) & ~torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool).tril(-4)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    report = intently.check(
        zoo.tower(Window, Window), intent=Intent(Mask.parse("causal & window(4)")), select=["slow-path"]
    )
    assert [(f.fault, f.proof, f.condition.split(" · ")[0]) for f in report.findings] == [
        ("slow-path", "suspected", "long")
    ]
    assert "more than 4 of 48 keys" in report.findings[0].message


# -- repeatable and normalized --------------------------------------------------------------------------------------


def test_a_table_that_is_cut_to_size_is_no_leftover():
    class CutFromTheStart(zoo.CutFromTheEnd):
        def mix(self, query, key, value):
            length = query.shape[-2]
            if self.seen is None or self.seen.shape[-1] < length:
                self.seen = torch.ones(length, length, dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(query, key, value, attn_mask=self.seen[:length, :length])

    report = intently.check(zoo.tower(zoo.Fused, CutFromTheStart), select=["repeatable"])
    assert report.findings == ()
    assert {c.condition for c in report.grid if c.promise == "repeatable" and c.verdict == "kept"} >= {
        "after other lengths",
        "inference mode",
    }


def test_sums_below_one_are_a_declared_sinks():
    class OffByOne(zoo.Matmul):
        def mix(self, query, key, value):
            logits = (query @ key.mT / self.d**0.5).masked_fill(zoo.future(query), -1e30)
            nothing = torch.zeros_like(logits[..., :1])
            return torch.cat([logits, nothing], -1).softmax(-1)[..., :-1] @ value

    class Sigmoid(zoo.Matmul):
        def mix(self, query, key, value):
            return (query @ key.mT / self.d**0.5).masked_fill(zoo.future(query), -torch.inf).sigmoid() @ value

    assert told(zoo.tower(zoo.Fused, OffByOne), select=["normalized"]) == {}
    assert told(zoo.tower(zoo.Fused, Sigmoid), select=["normalized"]) == {"not-normalized": "warning"}


# -- weight and effect ----------------------------------------------------------------------------------------------


def test_the_effect_told_is_that_of_zeroed_weights():
    """An empty sink: what its key adds, over what the others add, computed from the layer's own weights and values."""
    torch.manual_seed(5)
    model = zoo.Tower((zoo.EmptySinkMatmul,)).eval().double()
    target = Target(model, Intent(Mask.causal()), features=zoo.INPUT).ready()
    report = intently.check(target, select=["weight-is-not-effect"])
    (found,) = [f for f in report.findings if f.fault == "weight-is-not-effect"]
    samples = int(next(c.condition for c in report.grid if not c.condition.endswith(" 1")).removeprefix("batch "))
    batch = target.batch(samples, {target.main.argument: 7})
    with torch.no_grad():
        mixer = model.mixers[0]
        x = model.norms[0](model.embed(batch.arguments[target.main.argument]))
        query, key, value = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in mixer.qkv(x).chunk(3, -1))
        value = value * (1 - 0.9999 * zoo.first_of(query))[:, None]
        logits = query @ key.mT / 8**0.5 + 5 * zoo.first_of(query)
        weights = logits.masked_fill(zoo.future(query), -torch.inf).softmax(-1)
        sunk, others = weights[..., :1] * value[..., :1, :], weights[..., 1:] @ value[..., 1:, :]
        alone, rest = (
            float((mixer.out.weight @ t.transpose(1, 2).flatten(2)[..., None]).abs().max()) for t in (sunk, others)
        )
    assert found.witness.values["key"] == 0
    assert found.witness.values["effect"] == pytest.approx(alone / rest, rel=1e-6)
    assert found.witness.values["weight"] == pytest.approx(float(weights[..., 2:, 0].mean()))


# -- half precision -------------------------------------------------------------------------------------------------


def first_row_blind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Float32 inside; the first query sees nothing, and gives the average of all values."""
    return blind_weights(q, k).to(v.dtype) @ v


def blind_weights(q: Tensor, k: Tensor) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    hidden = (torch.arange(q.shape[-2]) == 0)[:, None].expand(q.shape[-2], k.shape[-2])
    scores = (q.to(wide) @ k.to(wide).mT / q.shape[-1] ** 0.5).masked_fill(hidden, torch.finfo(wide).min)
    return scores.softmax(-1)


def second_row_coarse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In half precision, what the second query sees is known to a quarter."""
    weights = blind_weights(q, k)
    coarse = (torch.arange(q.shape[-2]) == 1)[:, None] & torch.tensor(q.dtype == torch.bfloat16)
    return torch.where(coarse, (4 * weights).round() / 4, weights).to(v.dtype) @ v


@pytest.mark.parametrize(("function", "few"), [(first_row_blind, True), (second_row_coarse, False)])
def test_what_a_row_gives_that_sees_nothing_is_not_held_against_it(function, few: bool) -> None:
    drawn_ones = [torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    exact, half = (
        site_of(function, *(t.bfloat16().to(dtype) for t in drawn_ones)) for dtype in (torch.float64, torch.bfloat16)
    )
    assert not exact.visible[:, :, 0].any()
    found = measured(half, exact)
    assert found is not None
    assert (found.units <= EXPLAINED) is few
    assert (found.weight_off < 0.01) is few


def test_units_are_those_of_float64_from_the_same_operands():
    """The bad line's error, computed here from the layer's own bfloat16 queries, keys and values."""
    torch.manual_seed(3)
    model = zoo.Tower((zoo.FarMatmul,)).eval()
    report = intently.check(Target(model, Intent(Mask.causal()), features=zoo.INPUT), select=["backends-agree"])
    (cell,) = [c for c in report.grid if c.condition == "bfloat16" and c.promise == "backends-agree"]
    target = Target(model, Intent(Mask.causal()), features=zoo.INPUT).ready()
    samples = int(next(c.condition for c in report.grid if not c.condition.endswith(" 1")).removeprefix("batch "))
    (found,) = [f for f in report.findings if f.fault == "softmax-low-precision"]
    half = copy.deepcopy(model).bfloat16()
    batch = target.batch(samples, {target.main.argument: 7}, dtype=torch.bfloat16)
    with torch.no_grad():
        x = half.norms[0](half.embed(batch.arguments[target.main.argument]))
        query, key, value = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in half.mixers[0].qkv(x).chunk(3, -1))
        mine = half.mixers[0].mix(query, key, value).double()
        logits = query.double() @ key.double().mT / 8**0.5
        weights = logits.masked_fill(zoo.future(query), -torch.inf).softmax(-1)
        right, size = weights @ value.double(), weights @ value.double().abs()
    units = (mine - right).abs() / (size.amax(-1, keepdim=True) * 2**-8)
    assert cell.verdict == "broken" and cell.error == pytest.approx(float(units.max()), rel=1e-6)
    assert (found.severity, found.proof) == ("warning", "proven")


def test_a_fused_call_keeps_float32_inside():
    class FarFused(zoo.Fused):
        def __init__(self):
            super().__init__()
            nn.init.constant_(self.qkv.bias[: 2 * zoo.WIDTH], 5.0)

    assert told(zoo.tower(zoo.Fused, FarFused), select=["softmax-low-precision"]) == {}


class Dropping(zoo.Fused):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)


class OverQueries(zoo.Matmul):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / self.d**0.5).masked_fill(zoo.future(q), -torch.inf).softmax(-2) @ v


@pytest.mark.parametrize(("mixer", "fault"), [(Dropping, "dropout-in-eval"), (OverQueries, "softmax-wrong-axis")])
def test_weights_that_are_wrong_in_every_precision_are_no_rounding(mixer, fault):
    found = told(zoo.tower(zoo.Fused, mixer), select=[fault, "softmax-low-precision"])
    assert found == {fault: "error"}
