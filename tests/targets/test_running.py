"""A target runs as a private copy, in eval mode and in the precision that is asked for; each forward pass counts."""

from __future__ import annotations

import pytest
import torch
from tests.sites import spellings as s

from intently import CannotCheck, Intent, Mask, Target
from intently.targets.running import Runner, trace_once


def ready(model) -> Target:
    return Target(model, Intent(Mask.full()), features=s.INPUT, length=s.LENGTH).ready()


def run(runner: Runner) -> torch.Tensor:
    return runner.output(runner.target.batch(2, {"x": s.LENGTH}, dtype=runner.dtype))


class Tables(s.Model):
    """Holds a table as a plain attribute, which `to` does not move."""

    def __init__(self):
        super().__init__(s.by_operator)
        self.table, self.ids = torch.ones(s.INPUT), torch.arange(3)

    def forward(self, x):
        assert x.dtype == self.table.dtype, "the table stayed behind"
        return super().forward(x * self.table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain_attributes_follow_the_precision(dtype):
    model = Tables().eval()
    runner = Runner(ready(model), dtype)
    assert run(runner).shape == (2, s.LENGTH, s.INPUT)
    assert (runner.model.table.dtype, runner.model.ids.dtype) == (dtype, torch.int64)
    assert model.table.dtype == torch.float32 and next(model.parameters()).dtype == torch.float32


def test_the_copy_is_in_eval_mode_and_the_model_stays_in_its_own():
    model = s.Model(s.by_operator).train()
    runner = Runner(ready(model), torch.float64)
    assert not any(m.training for m in runner.model.modules()) and all(m.training for m in model.modules())
    assert runner.model is not model


def test_outputs_are_those_of_the_model():
    model = s.Model(s.fused_causal).double().eval()
    runner = Runner(ready(model))
    batch = runner.target.batch(2, {"x": s.LENGTH})
    assert torch.equal(runner.output(batch), model(batch.arguments["x"]))
    output, (site,) = runner.traced(batch)
    assert torch.equal(output, runner.output(batch)) and site.mask == "causal"


def test_forward_passes_are_counted():
    calls = []

    def counted(q, k, v):
        calls.append(1)
        return s.by_operator(q, k, v)

    runner = Runner(ready(s.Model(counted).eval()), torch.float64)
    calls.clear()
    for _ in range(3):
        run(runner)
    assert runner.forwards == len(calls) == 4  # the first run also finds the axes of the output


def test_a_model_that_cannot_be_copied():
    class Held(s.Model):
        def __deepcopy__(self, memo):
            raise TypeError("it holds a socket")

    target = ready(Held(s.by_operator).eval())
    with pytest.raises(CannotCheck, match=r"Held cannot be copied, so it cannot be run in float64.*it holds a socket"):
        Runner(target, torch.float64)


def test_trace_once():
    (site,) = trace_once(Target(s.Model(s.by_operator).eval(), features=s.INPUT))
    assert (site.path, site.dtype, site.mask) == ("inner", "float32", "full")
    (record,) = Target(s.Model(s.by_operator).eval(), features=s.INPUT).sites()
    assert (record.path, record.scale) == ("inner", pytest.approx(s.SCALE, rel=1e-4))
