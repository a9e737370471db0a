"""Torch's own samples for `scaled_dot_product_attention`, those its test suite runs on, through `attention`.

The module that holds them freezes torch's global flags and changes warning filters when it is imported, so the samples are drawn in a
process of their own. As of torch 2.13 there are 25: three and four axes, a query without the batch axis of its keys, causal or not, with
and without dropout, and one float mask. There are no error inputs, no bool mask and no grouped heads among them.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from intently import Mask
from intently.mechanism import attention, choose_backend

if importlib.util.find_spec("expecttest") is None:
    pytest.skip("torch.testing._internal needs the package expecttest", allow_module_level=True)

DRAW = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.testing._internal.common_methods_invocations import op_db
(info,) = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
drawn = {}
for name in ("float64", "float32", "bfloat16", "float16"):
    torch.manual_seed(5)
    samples = info.sample_inputs("cpu", getattr(torch, name), requires_grad=False)
    drawn[name] = [(sample.input, *sample.args, sample.kwargs) for sample in samples]
torch.save(drawn, sys.argv[1])
"""

# Flex is left out: it compiles a kernel for each shape, and has tests of its own.
BACKENDS = "auto", "stages", "fused", "blocked", "math", "oracle"

# Twice the spacing of the type for half precision, where torch's kernel rounds the weights as well as the result.
TOLERANCE = {
    "float64": {"rtol": 1e-10, "atol": 1e-10},
    "float32": {"rtol": 5e-6, "atol": 5e-5},  # torch's own for these samples
    "bfloat16": {"rtol": 2**-6, "atol": 2**-5},
    "float16": {"rtol": 2**-9, "atol": 2**-8},
}


class Sample(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    kwargs: dict  # torch's: attn_mask, is_causal, dropout_p, scale, enable_gqa

    @property
    def broadcasts(self) -> bool:
        return self.query.shape[:-2] != self.key.shape[:-2]

    def expanded(self) -> Sample:
        """With the batch axes that torch would broadcast written out; grouped heads stay grouped."""
        lead = self.key.shape[:-2] if self.query.dim() < self.key.dim() else self.query.shape[:-2]
        return self._replace(query=self.query.expand(*lead, *self.query.shape[-2:]))

    def double(self) -> Sample:
        kwargs = {name: each.double() if _is_float(each) else each for name, each in self.kwargs.items()}
        return Sample(self.query.double(), self.key.double(), self.value.double(), kwargs)

    def ours(self) -> dict:
        """Torch's arguments in our words."""
        plane = self.kwargs.get("attn_mask")
        words = {"mask": plane} if plane is not None and plane.dtype == torch.bool else {"bias": plane}
        if self.kwargs.get("is_causal"):
            words["mask"] = Mask.causal()  # torch's is_causal is top-left too
        known = {"attn_mask", "is_causal", "dropout_p", "scale", "enable_gqa"}  # grouping needs no word
        assert self.kwargs.keys() <= known, f"torch has new arguments: {self.kwargs.keys() - known}"
        return words | {"scale": self.kwargs.get("scale"), "dropout": self.kwargs.get("dropout_p", 0.0)}


def _is_float(each) -> bool:
    return isinstance(each, Tensor) and each.is_floating_point()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> dict[str, list[Sample]]:
    path = tmp_path_factory.mktemp("opinfo") / "samples.pt"
    subprocess.run([sys.executable, "-c", DRAW, str(path)], check=True, timeout=300)
    return {name: [Sample(*each) for each in samples] for name, samples in torch.load(path).items()}


def certain(samples: list[Sample]) -> list[Sample]:
    return [sample.expanded() for sample in samples if not sample.kwargs.get("dropout_p")]


def test_the_samples_are_many_kinds(drawn):
    for samples in drawn.values():
        assert len(certain(samples)) >= 13
        assert {sample.query.dim() for sample in samples} == {3, 4}
        assert any(sample.broadcasts for sample in samples)
        assert any(sample.kwargs.get("is_causal") for sample in certain(samples))
        assert any(sample.kwargs.get("attn_mask") is not None for sample in certain(samples))
        assert any(sample.kwargs.get("dropout_p") for sample in samples)
        assert all(sample.query.shape[-2] != sample.key.shape[-2] for sample in samples)  # alignment tells


def compare(sample: Sample, name: str, **ours) -> None:
    """The float64 result of torch's math path against ours, in the type of the sample."""
    right = F.scaled_dot_product_attention(*sample.double()[:3], **sample.double().kwargs)
    result = attention(*sample[:3], **ours)
    assert result.dtype == sample.value.dtype
    torch.testing.assert_close(result.double(), right, **TOLERANCE[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TOLERANCE)
def test_forward(drawn, name, backend):
    for sample in certain(drawn[name]):
        assert backend == "auto" or choose_backend(*sample[:3], **sample.ours(), backend=backend).name == backend
        compare(sample, name, **sample.ours(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["float64", "float32"])
def test_gradient(drawn, name, backend):
    for sample in certain(drawn[name]):
        given, exact = ([each.detach().clone().requires_grad_() for each in s[:3]] for s in (sample, sample.double()))
        plane, bias = sample.double().kwargs.get("attn_mask"), sample.kwargs.get("attn_mask")
        if plane is not None:
            given.append(bias := bias.clone().requires_grad_())
            exact.append(plane := plane.clone().requires_grad_())
        result = attention(*given[:3], **sample.ours() | {"bias": bias}, backend=backend)
        right = F.scaled_dot_product_attention(*exact[:3], **sample.double().kwargs | {"attn_mask": plane})
        upstream = torch.linspace(-1, 1, right.numel(), dtype=torch.float64).reshape(right.shape)
        gradients = torch.autograd.grad(result, given, upstream.to(result.dtype))
        for gradient, expected in zip(gradients, torch.autograd.grad(right, exact, upstream), strict=True):
            torch.testing.assert_close(gradient.double(), expected, **TOLERANCE[name])


def test_a_query_without_the_batch_axis_is_refused(drawn):
    """Torch broadcasts it; here nothing is, for a missing axis is far more often a mistake. `expand` says it is meant."""
    for sample in drawn["float32"]:
        if sample.broadcasts:
            with pytest.raises(ValueError, match="ranks differ"):
                attention(*sample[:3], **sample.ours())


@pytest.mark.parametrize("backend", ["auto", "stages", "fused", "blocked"])
def test_dropout(drawn, backend):
    """What holds for every draw: a weight is dropped, or divided by the share that is kept.

    Two kernels draw different numbers, so the results cannot be compared. An identity in place of the values shows the weights.
    """
    for sample in drawn["float64"]:
        rate = sample.kwargs.get("dropout_p")
        if rate:
            sample = sample.expanded()
            keys = sample.key.shape[-2]
            value = torch.eye(keys, dtype=torch.float64).expand(*sample.key.shape[:-2], keys, keys)
            weights = attention(sample.query, sample.key, value, **sample.ours() | {"dropout": 0.0})
            dropped = attention(sample.query, sample.key, value, **sample.ours(), backend=backend)
            kept = dropped != 0
            torch.testing.assert_close(dropped, torch.where(kept, weights / (1 - rate), 0.0))
            assert 0 < kept[weights > 0].double().mean() < 1


def test_dropout_has_no_place_in_a_truth(drawn):
    sample = next(each.expanded() for each in drawn["float64"] if each.kwargs.get("dropout_p"))
    with pytest.raises(ValueError, match="oracle"):
        attention(*sample[:3], **sample.ours(), backend="oracle")


@pytest.mark.parametrize(
    ("wrong", "concerns"),
    [
        ({"scale": 1.0}, lambda sample: True),
        ({"mask": Mask.causal().bottom_right()}, lambda sample: sample.kwargs.get("is_causal")),
        ({"mask": None}, lambda sample: sample.kwargs.get("is_causal")),
        ({"bias": None}, lambda sample: sample.kwargs.get("attn_mask") is not None),
    ],
    ids=["no scale", "aligned bottom-right", "no mask", "no bias"],
)
@pytest.mark.parametrize("name", TOLERANCE)
def test_negative_control_a_wrong_variant_is_caught(drawn, name, wrong, concerns):
    concerned = [sample for sample in certain(drawn[name]) if concerns(sample)]
    assert concerned
    for sample in concerned:
        with pytest.raises(AssertionError):
            compare(sample, name, **sample.ours() | wrong)
