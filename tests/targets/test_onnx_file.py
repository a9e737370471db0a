"""ONNX files as targets: faults planted in hand-written and in exported graphs are named at their node and proven; good graphs are silent."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from torch import nn

import intently
from intently.errors import CannotCheck
from intently.report import Report
from intently.sites import find
from intently.sites.onnx import Replay, operators
from intently.targets import load

WIDTH = 12


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed + sum(shape)).standard_normal(shape) * 0.4).astype(np.float32)


def model(text: str, opset: int, **stored: np.ndarray) -> onnx.ModelProto:
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["":{opset}]> {text}')
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in stored.items())
    onnx.checker.check_model(made)
    return made


def written_out(*, masked: bool = True, scaled: bool = True, shape: str = "b, n", length: int = 64) -> onnx.ModelProto:
    """One head, MatMul, Softmax, MatMul, with a stored triangle; nodes without names."""
    names = {"wq": 1, "wk": 2, "wv": 3, "wo": 4}
    return model(
        f"""g (float[{shape}, {WIDTH}] x) => (float[{shape}, {WIDTH}] y) {{
          q = MatMul(x, wq)  k = MatMul(x, wk)  v = MatMul(x, wv)
          kt = Transpose<perm=[0, 2, 1]>(k)
          s0 = MatMul(q, kt)
          s1 = {"Mul(s0, scale)" if scaled else "Identity(s0)"}
          sh = Shape(s1)
          one = ConstantOfShape<value = float[1] {{1.0}}>(sh)
          low = Trilu<upper=0>(one)
          keep = Cast<to=9>(low)
          s2 = {"Where(keep, s1, hidden)" if masked else "Identity(s1)"}
          w = Softmax<axis=-1>(s2)
          a = MatMul(w, v)
          o = MatMul(a, wo)
          y = Add(x, o)
        }}""",
        17,
        scale=np.float32(WIDTH**-0.5),
        hidden=np.float32(-1e9),
        **{n: drawn(WIDTH, WIDTH, seed=s) for n, s in names.items()},
    )


def by_einsum(*, masked: bool = True) -> onnx.ModelProto:
    project = 'Einsum<equation="bnw,whd->bnhd">'
    return model(
        f"""g (float[b, n, {WIDTH}] x) => (float[b, n, {WIDTH}] y) {{
          q = {project}(x, wq)  k = {project}(x, wk)  v = {project}(x, wv)
          s0 = Einsum<equation="bqhd,bkhd->bhqk">(q, k)
          s1 = Mul(s0, scale)
          sh = Shape(s1)
          one = ConstantOfShape<value = float[1] {{1.0}}>(sh)
          low = Trilu<upper=0>(one)
          keep = Cast<to=9>(low)
          s2 = {"Where(keep, s1, hidden)" if masked else "Identity(s1)"}
          w = Softmax<axis=-1>(s2)
          a = Einsum<equation="bhqk,bkhd->bqhd">(w, v)
          y = Einsum<equation="bqhd,hdw->bqw">(a, wo)
        }}""",
        17,
        scale=np.float32(0.5),
        hidden=np.float32(-np.inf),
        **{n: drawn(WIDTH, 3, 4, seed=s) for n, s in {"wq": 1, "wk": 2, "wv": 3}.items()},
        wo=drawn(3, 4, WIDTH),
    )


def by_nodes(*, causal: tuple[int, int] = (1, 1), scale: str = "") -> onnx.ModelProto:
    """Two `Attention` nodes of opset 23; the first shares one kv head among three."""
    return model(
        f"""g (int64[b, n] input_ids) => (float[b, n, {WIDTH}] y) {{
          x = Gather(table, input_ids)
          q0 = MatMul(x, wq0)  k0 = MatMul(x, wk0)  v0 = MatMul(x, wv0)
          a0 = Attention<q_num_heads=3, kv_num_heads=1, is_causal={causal[0]}>(q0, k0, v0)
          x1 = Add(x, a0)
          q1 = MatMul(x1, wq1)  k1 = MatMul(x1, wk1)  v1 = MatMul(x1, wv1)
          a1 = Attention<q_num_heads=3, kv_num_heads=3, is_causal={causal[1]}{scale}>(q1, k1, v1)
          y = Add(x1, a1)
        }}""",
        23,
        table=drawn(17, WIDTH),
        **{f"w{n}{i}": drawn(WIDTH, 4 if i == 0 and n != "q" else WIDTH, seed=s) for s, n in enumerate("qkv") for i in (0, 1)},
    )  # fmt: skip


def checked(proto: onnx.ModelProto, folder: Path, intent: str = "causal") -> Report:
    path = folder / "model.onnx"
    onnx.save(proto, path)
    return intently.check(load(str(path), intent=intent))


def told(report: Report) -> list[tuple[str, str, str]]:
    return [(f.fault, f.site, f.proof) for f in report.findings]


@pytest.mark.parametrize("good", [written_out(), by_einsum(), by_nodes(), written_out(shape="1, 6")])
def test_good_graphs_are_silent(good: onnx.ModelProto, tmp_path: Path) -> None:
    report = checked(good, tmp_path)
    assert report.ok and not report.findings
    assert {s.mask for s in report.sites} == {"causal"}


@pytest.mark.parametrize(
    "bad, fault, site",
    [
        (written_out(masked=False), "causal-leak", "Softmax_11"),
        (written_out(scaled=False), "scale-missing", "Softmax_11"),
        (written_out(masked=False, shape="1, 6"), "causal-leak", "Softmax_11"),
        (by_einsum(masked=False), "causal-leak", "Softmax_10"),
        (by_nodes(causal=(0, 1)), "causal-leak", "Attention_4"),
        (by_nodes(causal=(1, 0)), "causal-leak", "Attention_9"),
        (by_nodes(scale=", scale=1.0"), "scale-missing", "Attention_9"),
    ],
)
def test_planted_faults_are_named_at_their_node_and_proven(
    bad: onnx.ModelProto, fault: str, site: str, tmp_path: Path
) -> None:
    assert told(checked(bad, tmp_path)) == [(fault, site, "proven")]


def test_a_graph_of_one_sample_says_what_it_leaves_out(tmp_path: Path) -> None:
    report = checked(written_out(shape="1, 6"), tmp_path)
    assert not any("batch 2" in c.condition for c in report.grid)
    assert {c.verdict for c in report.grid if c.promise == "batch-independent"} == {"not-applicable"}
    assert any("1 sample at a time" in n for n in report.notes)
    assert any("6 positions of x and no other number" in n for n in report.notes)


def test_two_broken_layers_are_both_proven(tmp_path: Path) -> None:
    found = told(checked(by_nodes(causal=(0, 0)), tmp_path))
    assert found == [("causal-leak", "Attention_4", "proven"), ("causal-leak", "Attention_9", "proven")]


def test_functions_and_branches_are_entered(tmp_path: Path) -> None:
    """Attention inside a function of the model, called from a branch of an `If`."""
    whole = by_einsum(masked=False)
    body = list(whole.graph.node)
    weights = [i.name for i in whole.graph.initializer]
    function = helper.make_function("own", "Layer", ["x", *weights], ["y"], body, [helper.make_opsetid("", 17)])
    inner = helper.make_node("Layer", ["x", *weights], ["z"], domain="own")
    other = helper.make_node("Identity", ["x"], ["z"])
    out = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    branches = {
        f"{n}_branch": helper.make_graph([node], n, [], [out]) for n, node in {"then": inner, "else": other}.items()
    }
    graph = helper.make_graph(
        [helper.make_node("If", ["yes"], ["y"], name="choice", **branches)],
        "g",
        list(whole.graph.input),
        list(whole.graph.output),
        [*whole.graph.initializer, numpy_helper.from_array(np.array(True), "yes")],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    made = helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=10)
    assert told(checked(made, tmp_path)) == [("causal-leak", "choice", "proven")]


def test_an_operator_that_is_not_known_is_left_to_onnxruntime(tmp_path: Path) -> None:
    """`Hardmax` beside the attention: the replay runs it by itself, and the sites are found all the same."""
    proto = written_out()
    node = helper.make_node("Hardmax", ["y"], ["hard"], axis=-1)
    proto.graph.node.append(node)
    proto.graph.output.append(helper.make_tensor_value_info("hard", TensorProto.FLOAT, ["b", "n", WIDTH]))
    x = torch.randn(2, 5, WIDTH)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    theirs = session.run(None, {"x": x.numpy()})
    mine = Replay(proto)(x=x)
    for ours, other in zip(mine.values(), theirs, strict=True):
        np.testing.assert_allclose(ours.numpy(), other, atol=1e-5)
    assert len(find(Replay(proto), x=x)) == 1


def looped(masked: bool) -> onnx.ModelProto:
    """The attention inside a `Loop` that runs once: nothing inside it can be replayed."""
    proto = written_out(masked=masked)
    body = helper.make_graph(
        [*proto.graph.node, helper.make_node("Identity", ["going"], ["goes"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "n", WIDTH]),
        ],
        [
            helper.make_tensor_value_info("goes", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", "n", WIDTH]),
        ],
    )
    once = [numpy_helper.from_array(np.array(1), "once"), numpy_helper.from_array(np.array(True), "yes")]
    graph = helper.make_graph(
        [helper.make_node("Loop", ["once", "yes", "start"], ["end"], body=body)],
        "g",
        [helper.make_tensor_value_info("start", TensorProto.FLOAT, ["b", "n", WIDTH])],
        [helper.make_tensor_value_info("end", TensorProto.FLOAT, ["b", "n", WIDTH])],
        [*proto.graph.initializer, *once],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


@pytest.mark.parametrize("masked", [True, False])
def test_what_cannot_be_replayed_is_tried_from_outside(masked: bool, tmp_path: Path) -> None:
    report = checked(looped(masked), tmp_path)
    assert report.ok is masked
    assert not report.sites
    assert any("Loop" in n and "from outside only" in n for n in report.notes)
    assert {f.fault for f in report.findings} == (set() if masked else {"causal-leak"})
    assert all(f.proof == "suspected" for f in report.findings)


def test_a_replay_that_differs_is_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(operators._TABLE, "Add", lambda a, left, right: left - right)
    report = checked(by_nodes(), tmp_path)
    assert not report.sites
    assert any("replayed in torch differs by" in n for n in report.notes)


class Attention(nn.Module):
    def __init__(self, causal: bool):
        super().__init__()
        self.causal, self.packed, self.out = causal, nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, 3, -1).transpose(1, 2) for t in self.packed(x).chunk(3, -1))
        logits = q @ k.transpose(-2, -1) / math.sqrt(8)
        if self.causal:
            logits = logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
        logits = logits.masked_fill(mask[:, None, None, :] == 0, -1e9)
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1))


class Decoder(nn.Module):
    def __init__(self, leaking: int | None):
        super().__init__()
        self.embed, self.head = nn.Embedding(29, 24), nn.Linear(24, 29)
        self.layers = nn.ModuleList(Attention(i != leaking) for i in range(2))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x, attention_mask)
        return self.head(x)


def exported(leaking: int | None, path: Path) -> Path:
    torch.manual_seed(0)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    free = {0: batch, 1: length}
    inputs = (torch.randint(29, (2, 9)), torch.ones(2, 9, dtype=torch.long))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Decoder(leaking).eval(), inputs, path, dynamo=True, verbose=False, external_data=False,
            dynamic_shapes={"input_ids": free, "attention_mask": free},
        )  # fmt: skip
    return path


@pytest.mark.parametrize("leaking", [None, 1])
def test_an_exported_decoder(leaking: int | None, tmp_path: Path) -> None:
    target = load(str(exported(leaking, tmp_path / "decoder.onnx")), intent="causal")
    assert target.main.vocab == 29
    assert target.main.padding is not None and target.main.padding.argument == "attention_mask"
    report = intently.check(target)
    wanted = [] if leaking is None else [("causal-leak", "layers.1/node_softmax_1", "proven")]
    assert told(report) == wanted
    assert {c.verdict for c in report.grid if c.promise == "padding-inert"} == {"kept"}
    assert all(s.source is not None and s.source.file == __file__ for s in report.sites)


@pytest.mark.parametrize(
    "content, said",
    [(b"not a model", "not an ONNX model"), (b"", "not an ONNX model"), (None, "there is no file")],
)
def test_bad_files_are_one_sentence(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CannotCheck, match=said):
        load(str(path))


def test_unclear_inputs_are_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.onnx"
    onnx.save(model("g (float[b, n] x) => (float[b, n] y) { y = Softmax(x) }", 17), path)
    with pytest.raises(CannotCheck, match=r"x float32\[b, n\]"):
        load(str(path))


def test_another_precision_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(by_nodes(), path)
    with pytest.raises(CannotCheck, match="computes in float32, not in float64"):
        intently.check(load(str(path), intent="causal"), dtype="float64")


def test_without_onnxruntime_the_extra_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(by_nodes(), path)
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from intently.targets import load\n"
        "from intently.errors import CannotCheck\n"
        f"try: load({str(path)!r})\nexcept CannotCheck as e: print(e)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'intently[onnx]'" in said
