"""The official cases of ONNX `Attention` and `RotaryEmbedding`, all of them, through our stages.

`onnx.backend.test.loader.load_model_tests(kind="node")` imports every module of cases, for 5 to 15 seconds. Importing the two modules
that hold these operators takes half a second and yields the same cases: each draws its inputs from a seed of its own.
On onnx 1.23.2 the 202 models, inputs, outputs and tolerances of both ways were compared and are the same byte for byte.
"""

from __future__ import annotations

import importlib
import unittest
from collections import Counter
from functools import partial

import numpy as np
import pytest
from tests.mechanism import test_onnx_weak_spots as weak_spots

from intently.mechanism.onnx import Backend, attention_op, backend

onnx = pytest.importorskip("onnx")
if not onnx.__version__.startswith("1.23."):
    pytest.skip(
        f"onnx {onnx.__version__}: the cases follow the wording of their release, and ours follows 1.23",
        allow_module_level=True,
    )


def _official_cases() -> dict:
    for module in ("attention", "rotaryembedding"):
        importlib.import_module(f"onnx.backend.test.case.node.{module}")
    cases = importlib.import_module("onnx.backend.test.case.node")._NodeTestCases
    ours = ("test_attention_", "test_rotary_embedding")
    # Whoever loaded all cases before leaves more of them in this list.
    return {case.name: case for case in cases if case.name.startswith(ours) and "_expanded" not in case.name}


CASES = _official_cases()


def _operator(case) -> str:
    return case.model.graph.node[0].op_type


def _is_half(case) -> bool:
    return case.data_sets[0][0][0].dtype.itemsize == 2


def check(case) -> None:
    """Run a case; float32 is held to 1e-5, a hundredth of the official tolerance, half precision to the official one."""
    for inputs, expected in case.data_sets:
        results = Backend.run_model(case.model, inputs)
        assert len(results) == len(expected)
        for result, right in zip(results, expected, strict=True):
            assert (result.dtype, result.shape) == (right.dtype, right.shape)
            rtol = max(case.rtol, 2**-6 if right.dtype.name == "bfloat16" else 0) if _is_half(case) else 1e-5
            np.testing.assert_allclose(
                result.astype(np.float64), right.astype(np.float64), rtol=rtol, atol=case.atol, equal_nan=False
            )


@pytest.mark.parametrize("name", sorted(CASES))
def test_official_case(name):
    check(CASES[name])


def test_none_is_missing():
    if onnx.__version__ != "1.23.2":
        pytest.skip(f"counted on onnx 1.23.2, this is {onnx.__version__}")
    counts = Counter((_operator(case), case.model.opset_import[0].version) for case in CASES.values())
    assert counts == {("Attention", 23): 69, ("Attention", 24): 13, ("Attention", 25): 11, ("RotaryEmbedding", 23): 8}
    assert sum(_is_half(case) for case in CASES.values()) == 11
    assert all((case.rtol, case.atol) == (1e-3, 1e-7) for case in CASES.values())


@pytest.mark.parametrize("name", sorted(name for name, case in CASES.items() if _is_half(case)))
def test_half_precision_is_the_truth_rounded_once(name):
    """The official numbers round at every step and so stray by up to two units in the last place; ours do not.

    The truth is ONNX's evaluator in float64 on the same numbers.
    """
    case = CASES[name]
    (inputs, expected), *_ = case.data_sets
    node, kind = case.model.graph.node[0], expected[0].dtype
    evaluate = importlib.import_module("onnx.reference.ops.op_attention")._compute_attention
    arrays = iter(inputs)
    given = {name: next(arrays) for name, wire in zip(PARAMETERS, node.input, strict=False) if wire}
    exact = {name: each.astype(np.float64) if each.dtype == kind else each for name, each in given.items()}
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    truth = evaluate(**exact, **attributes)[0].astype(kind)
    # With a softmax_precision the operator asks for weights rounded to the type of Q, so there is a second rounding.
    assert _steps(Backend.run_model(case.model, inputs)[0], truth) <= ("softmax_precision" in attributes)
    assert _steps(expected[0], truth) <= 2


PARAMETERS = "Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"


def _steps(first: np.ndarray, second: np.ndarray) -> int:
    """The largest distance in units in the last place, for numbers of one sign."""
    return int(np.abs(first.view(np.int16).astype(int) - second.view(np.int16).astype(int)).max())


def test_official_runner(monkeypatch):
    """ONNX's own runner class on our backend, with its own comparison; only the loading is narrowed to our cases."""
    runner_module = importlib.import_module("onnx.backend.test.runner")
    monkeypatch.setattr(runner_module, "load_model_tests", lambda kind: list(CASES.values()) if kind == "node" else [])
    runner = runner_module.Runner(Backend, __name__)
    runner.include("^test_attention_.*_cpu$").include("^test_rotary_embedding.*_cpu$")
    result = unittest.TestResult()
    runner.test_suite.run(result)
    assert not result.failures and not result.errors, [message for _, message in result.failures + result.errors]
    assert result.testsRun - len(result.skipped) == len(CASES)


# What a mistaken implementation does; each must be caught by at least one official case.


def capped_after_mask(*tensors, softcap=0.0, **attributes):
    y, key, value, plane = attention_op(*tensors, **attributes | {"qk_matmul_output_mode": 2})
    if softcap:
        weights = (softcap * (plane / softcap).tanh()).softmax(dim=-1)
        y = weights @ value
    return y, key, value, plane


def tiled_heads(Q, K, V, *rest, **attributes):
    if Q.dim() == 4 and Q.shape[1] != K.shape[1] and not any(each is not None for each in rest):
        group = Q.shape[1] // K.shape[1]
        K, V = K.repeat(1, group, 1, 1), V.repeat(1, group, 1, 1)
    return attention_op(Q, K, V, *rest, **attributes)


def deaf_to(name, *tensors, **attributes):
    return attention_op(*tensors, **{key: value for key, value in attributes.items() if key != name})


@pytest.mark.parametrize(
    "mistaken",
    [
        capped_after_mask,
        tiled_heads,
        *(
            partial(deaf_to, name)
            for name in ("is_causal", "scale", "softcap", "left_window_size", "right_window_size")
        ),
    ],
    ids=lambda each: f"deaf to {each.args[0]}" if isinstance(each, partial) else each.__name__,
)
def test_negative_control_mistakes_are_caught(mistaken, monkeypatch):
    monkeypatch.setattr(backend.attention_operator, "attention_op", mistaken)
    caught = 0
    for case in CASES.values():
        if _operator(case) == "Attention":
            try:
                check(case)
            except (AssertionError, RuntimeError):
                caught += 1
    assert caught


@pytest.mark.parametrize("slip", weak_spots.UNSEEN, ids=lambda each: each.__name__)
def test_the_official_cases_let_these_slips_pass(slip, monkeypatch):
    """Why `test_onnx_weak_spots.py` is there. Should this fail, onnx has closed a gap, and the list may shrink."""
    monkeypatch.setattr(backend.attention_operator, "attention_op", slip)
    for case in CASES.values():
        check(case)


def test_the_official_case_on_transposing_does_not_see_it_missing(monkeypatch):
    monkeypatch.setattr(backend.attention_operator, "attention_op", weak_spots.keys_not_transposed)
    check(CASES["test_attention_3d_transpose_verification"])  # its keys and values are constant
    with pytest.raises(AssertionError):
        check(CASES["test_attention_3d"])


def test_negative_control_a_swapped_layout_is_caught(monkeypatch):
    right = backend.rotary_operator.rotary_embedding_op

    def swapped(*tensors, interleaved=0, **attributes):
        return right(*tensors, interleaved=1 - interleaved, **attributes)

    monkeypatch.setattr(backend.rotary_operator, "rotary_embedding_op", swapped)
    for case in CASES.values():
        if _operator(case) == "RotaryEmbedding":
            with pytest.raises(AssertionError):
                check(case)
