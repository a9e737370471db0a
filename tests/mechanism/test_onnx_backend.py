"""The backend's doors: graphs of several nodes, versions, devices, dtypes, and what it refuses."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
import torch

from intently.mechanism import attention
from intently.mechanism.onnx import Backend, attention_op, rotary_embedding_op
from intently.mechanism.positions import rotary_angles, rotate

onnx = pytest.importorskip("onnx")
helper = pytest.importorskip("onnx.helper")
numpy_helper = pytest.importorskip("onnx.numpy_helper")


def model_of(*nodes, inputs, output, opset=23, constants=()):
    float_type = onnx.TensorProto.FLOAT
    codes = {np.dtype("int64"): onnx.TensorProto.INT64}
    graph = helper.make_graph(
        list(nodes),
        "attention",
        [
            helper.make_tensor_value_info(name, codes.get(each.dtype, float_type), each.shape)
            for name, each in inputs.items()
        ],
        [helper.make_tensor_value_info(output, float_type, list("bhqw"))],
        [numpy_helper.from_array(array, name) for name, array in constants],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


ATTENTION = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], is_causal=1)
QKV = {"Q": random(1, 2, 3, 4), "K": random(1, 2, 3, 4) + 1, "V": random(1, 2, 3, 5)}
WINDOW = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], left_window_size=1)


def test_rotation_then_attention():
    """Caches as initializers, two rotations, one attention: the same as our own functions in a row."""
    angles = rotary_angles(torch.arange(8), 4)
    constants = (("cos", angles.cos.numpy()), ("sin", angles.sin.numpy()), ("at", np.array([[2, 3, 4]])))
    nodes = [
        helper.make_node("RotaryEmbedding", ["Q", "cos", "sin", "at"], ["q"]),
        helper.make_node("RotaryEmbedding", ["K", "cos", "sin", "at"], ["k"]),
        helper.make_node("Attention", ["q", "k", "V"], ["Y"], is_causal=1),
    ]
    model = model_of(*nodes, inputs=QKV, output="Y", constants=constants)
    query, key, value = (torch.tensor(each) for each in QKV.values())
    turned = [rotate(each, rotary_angles(torch.arange(2, 5), 4)) for each in (query, key)]
    right = attention(*turned, value, mask=torch.ones(3, 3).tril().bool(), backend="stages")
    prepared = Backend.prepare(model)
    for inputs in (list(QKV.values()), QKV):
        (result,) = prepared.run(inputs)
        np.testing.assert_allclose(result, right.numpy(), rtol=1e-6, atol=1e-6)
    assert Backend.is_compatible(model)


def test_run_node_leaves_out_what_the_node_leaves_out():
    node = helper.make_node("Attention", ["Q", "K", "V", "", "", "", "N"], ["Y", "", "", "S"], qk_matmul_output_mode=3)
    results = Backend.run_node(node, [*QKV.values(), np.array([2])])
    assert [each.shape for each in results] == [(1, 2, 3, 5), (1, 2, 3, 3)]
    assert (results[1][..., 2] == 0).all()
    right = attention_op(*(torch.tensor(each) for each in QKV.values()), nonpad_kv_seqlen=torch.tensor([2]))
    np.testing.assert_array_equal(results[0], right.Y.numpy())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_come_and_go(dtype):
    kind = getattr(pytest.importorskip("ml_dtypes"), dtype, dtype)
    inputs = [each.astype(kind) for each in QKV.values()]
    (result,) = Backend.run_node(ATTENTION, inputs)
    assert result.dtype == np.dtype(kind)
    right = attention_op(*(torch.tensor(each) for each in QKV.values()), is_causal=1).Y
    np.testing.assert_allclose(result.astype(np.float64), right.numpy(), rtol=0.05, atol=0.05)


def test_the_opset_chooses_the_version():
    with pytest.raises(ValueError, match="version 24 of Attention does not know left_window_size"):
        Backend.prepare(model_of(WINDOW, inputs=QKV, output="Y", opset=24))
    assert not Backend.is_compatible(model_of(WINDOW, inputs=QKV, output="Y", opset=24))
    seen = Backend.run_model(model_of(WINDOW, inputs=QKV, output="Y", opset=24), QKV, version=25)
    np.testing.assert_array_equal(seen[0], Backend.run_node(WINDOW, list(QKV.values()))[0])
    with pytest.raises(ValueError, match="version 23 of Attention does not know left_window_size"):
        Backend.run_node(WINDOW, list(QKV.values()), opset_version=23)
    newest = onnx.defs.onnx_opset_version()
    if onnx.defs.get_schema("Attention").since_version <= 25:
        later = Backend.prepare(model_of(ATTENTION, inputs=QKV, output="Y", opset=newest))
        assert later.steps[0].attributes["version"] == min(25, newest)


def test_an_attention_newer_than_ours_is_refused(monkeypatch):
    class Schema:
        since_version = 31

    monkeypatch.setattr(onnx.defs, "get_schema", lambda *_, **__: Schema)
    with pytest.raises(ValueError, match="opset 31 has Attention in version 31"):
        Backend.prepare(model_of(ATTENTION, inputs=QKV, output="Y", opset=31))


def test_refusals():
    softmax = helper.make_node("Softmax", ["Q"], ["Y"])
    with pytest.raises(ValueError, match="is Softmax; only Attention and RotaryEmbedding"):
        Backend.prepare(model_of(softmax, inputs={"Q": QKV["Q"]}, output="Y"))
    elsewhere = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], domain="com.microsoft")
    with pytest.raises(ValueError, match=r"com\.microsoft\.Attention"):
        Backend.prepare(model_of(elsewhere, inputs=QKV, output="Y"))
    with pytest.raises(ValueError, match="opset 22 has no Attention"):
        Backend.prepare(model_of(ATTENTION, inputs=QKV, output="Y", opset=22))
    misspelt = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], causal=1)
    with pytest.raises(ValueError, match="Attention has no attribute causal"):
        Backend.run_node(misspelt, list(QKV.values()))
    with pytest.raises(ValueError, match="2 inputs for the 3"):
        Backend.run_node(ATTENTION, list(QKV.values())[:2])
    prepared = Backend.prepare(model_of(ATTENTION, inputs=QKV, output="Y"))
    with pytest.raises(ValueError, match="1 inputs for the 3"):
        prepared.run([QKV["Q"]])
    with pytest.raises(ValueError, match=r"no value for the graph's inputs \['V'\]"):
        prepared.run({"Q": QKV["Q"], "K": QKV["K"]})
    foreign = helper.make_model(
        helper.make_graph([ATTENTION], "g", [], []), opset_imports=[helper.make_opsetid("x", 1)]
    )
    with pytest.raises(ValueError, match="imports no opset of the default domain"):
        Backend.prepare(foreign)


def test_devices():
    assert Backend.supports_device("CPU")
    assert Backend.supports_device("CUDA") == torch.cuda.is_available()
    assert not Backend.supports_device("CUDA:99")
    assert not Backend.supports_device("TPU")
    with pytest.raises(ValueError, match="device is 'TPU'"):
        Backend.prepare(model_of(ATTENTION, inputs=QKV, output="Y"), "TPU")


def test_without_onnx_the_operators_work_and_the_backend_says_what_to_install(monkeypatch):
    for name in [
        name for name in sys.modules if name == "onnx" or name.startswith(("onnx.", "intently.mechanism.onnx"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    bare = importlib.import_module("intently.mechanism.onnx")
    assert bare.attention_op(*(torch.tensor(each) for each in QKV.values())).Y.shape == (1, 2, 3, 5)
    with pytest.raises(ImportError, match=r"pip install 'intently\[onnx\]'"):
        bare.Backend.run_node(ATTENTION, list(QKV.values()))


def test_rotary_by_hand():
    """Three pairs of width 6, quarter turns: (1, 2) becomes (-2, 1). Partial, both layouts, three axes."""
    cos, sin = torch.zeros(1, 2), torch.ones(1, 2)  # position 0 is a quarter turn of two pairs
    at = torch.zeros(1, 1, dtype=torch.int64)
    states = torch.tensor([[[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]]])
    half = rotary_embedding_op(states, cos, sin, at, rotary_embedding_dim=4)
    assert half.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0, 5.0, 6.0]
    interleaved = rotary_embedding_op(states, cos, sin, at, rotary_embedding_dim=4, interleaved=1)
    assert interleaved.flatten().tolist() == [-2.0, 1.0, -4.0, 3.0, 5.0, 6.0]
    merged = torch.arange(8.0).reshape(1, 1, 8)  # two heads of width 4
    turned = rotary_embedding_op(merged, cos[None], sin[None], num_heads=2)
    assert turned.flatten().tolist() == [-2.0, -3.0, 0.0, 1.0, -6.0, -7.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("shape", "cache", "at", "attributes", "message"),
    [
        ((1, 3, 8), (9, 2), (1, 3), {}, "num_heads is needed"),
        ((3, 8), (9, 2), (1, 3), {}, "X is"),
        ((1, 2, 3, 4), (9, 3), (1, 3), {}, "do not turn 4 features"),
        ((1, 2, 3, 4), (9, 2), (1, 4), {}, r"must be \[batch, length\] = \[1, 3\]"),
        ((1, 2, 3, 4), (1, 2, 2), None, {}, "without position_ids"),
        ((1, 2, 3, 4), (1, 3, 2), (1, 3), {}, "with position_ids"),
        ((1, 2, 3, 4), (0, 2), (1, 3), {}, "position_ids reach"),
        ((1, 2, 3, 4), (9, 2), (1, 3), {"interleaved": 2}, "interleaved is 2"),
    ],
)
def test_rotary_refusals(shape, cache, at, attributes, message):
    positions = None if at is None else torch.zeros(at, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        rotary_embedding_op(torch.zeros(shape), torch.ones(cache), torch.zeros(cache), positions, **attributes)
