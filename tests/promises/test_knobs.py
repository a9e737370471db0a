"""The promise `knobs-live`: settings that shape attention, kept apart from tensors that are without effect by nature."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import intently
from intently import Intent, Mask, Report, Target
from intently.edits import softcapped, with_sink
from intently.promises.knobs import knobs_of
from intently.sites import Settings, Sizes, find, tracing

HEADS, D = 3, 8
WIDTH = HEADS * D


class Layer(nn.Module):
    """Attention that adds nothing; each subclass holds one setting."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def weights(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out((self.weights(q @ k.mT / D**0.5) @ v).transpose(1, 2).flatten(2))


class Cap(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.softcap = 2.0

    def weights(self, logits: Tensor) -> Tensor:
        return (self.softcap * torch.tanh(logits / self.softcap)).softmax(-1)


class Sink(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def weights(self, logits: Tensor) -> Tensor:
        sink = self.sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


class Flagged(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.use_alibi = True

    def weights(self, logits: Tensor) -> Tensor:
        step = torch.arange(logits.shape[-1])
        return (logits - (step - step[:, None]).abs() / 4 if self.use_alibi else logits).softmax(-1)


def deaf(kind: type[Layer]) -> type[Layer]:
    """The same with its setting unused."""
    return type(f"Deaf{kind.__name__}", (kind,), {"weights": Layer.weights})


class Stack(nn.Module):
    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(k() for k in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def checked(model: nn.Module) -> Report:
    target = Target(model.eval(), Intent(Mask.full()), features=WIDTH)
    return intently.check(target, select=["knobs-live"])


def told(report: Report) -> list[tuple[str, str, str, str]]:
    return [(f.fault, f.severity, f.site, f.proof) for f in report.findings]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", [Cap, Sink, Flagged])
def test_what_is_applied_is_silent_and_what_is_not_is_proven(kind: type[Layer]) -> None:
    assert told(checked(Stack(kind, kind))) == []
    assert told(checked(Stack(kind, deaf(kind)))) == [("bias-ignored", "error", "layers.1", "proven")]


class Uneven:
    """A configuration of layers that differ: it says how attention is capped, and for the whole model not how wide heads are."""

    def __init__(self) -> None:
        self.softcap, self.head_dim, self.query_pre_attn_scalar = 2.0, D, D

    def __getattribute__(self, name: str) -> object:
        if name in ("head_dim", "query_pre_attn_scalar"):
            raise RuntimeError(f"{name} varies by layer")
        return super().__getattribute__(name)


class Configured(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.config = Uneven()

    def weights(self, logits: Tensor) -> Tensor:
        return (self.config.softcap * torch.tanh(logits / self.config.softcap)).softmax(-1)


@pytest.mark.parametrize(("kind", "faults"), [(Configured, set()), (deaf(Configured), {"bias-ignored"})])
def test_a_field_that_cannot_be_read_is_passed_over_and_the_others_are_tried(
    kind: type[Layer], faults: set[str]
) -> None:
    target = Target(Stack(kind, kind).eval(), Intent(Mask.full()), features=WIDTH)
    report = intently.check(target, select=["knobs-live", "scaled"])
    assert {f.fault for f in report.findings} == faults


def test_the_same_bias_for_all_layers_and_one_layer_without_it() -> None:
    class Shared(Layer):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            self.bias = bias
            return super().forward(x)

        def weights(self, logits: Tensor) -> Tensor:
            return (logits if self.bias is None else logits + self.bias).softmax(-1)

    class Model(nn.Module):
        def __init__(self, forgotten: int) -> None:
            super().__init__()
            self.layers, self.forgotten = nn.ModuleList(Shared() for _ in range(3)), forgotten
            self.rel_bias = nn.Parameter(torch.randn(HEADS, 129))

        def forward(self, x: Tensor) -> Tensor:
            step = torch.arange(x.shape[1])
            bias = self.rel_bias[:, step - step[:, None] + 64]
            for number, layer in enumerate(self.layers):
                x = layer(x, None if number == self.forgotten else bias)
            return x

    assert told(checked(Model(-1))) == []
    assert told(checked(Model(1))) == [("bias-ignored", "error", "layers.1", "proven")]


def test_a_key_bias_a_closed_gate_and_a_module_that_does_not_run_are_no_faults() -> None:
    class Traps(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.k_bias, self.gate = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            mixed = (q @ (k + self.k_bias).mT / WIDTH**0.5).softmax(-1) @ v
            return x + self.gate.tanh() * self.out(mixed)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.other = nn.ModuleList([Layer(), Traps()]), Sink()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    assert told(checked(Model())) == []


def test_a_parameter_of_no_telling_name_without_any_effect_is_a_warning() -> None:
    class Spare(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.randn(4))

    report = checked(Stack(Layer, Spare))
    assert told(report) == [("bias-ignored", "warning", "layers.1", "suspected")]
    assert report.ok


def test_knobs_are_set_back() -> None:
    model = Stack(Cap, Sink).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for knob in knobs_of(model, find(model, torch.randn(2, 5, WIDTH))):
            with knob.turned():
                pass
    assert model.layers[0].softcap == 2.0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "repair"),
    [(Cap, softcapped(lambda: 2.0)), (Sink, with_sink(lambda: torch.tensor([0.5, -1.0, 0.0])))],
    ids=["cap", "sink"],
)
def test_a_repair_gives_what_the_right_layer_gives(kind: type[Layer], repair) -> None:
    right, wrong = kind().double().eval(), deaf(kind)().double().eval()
    if isinstance(right, Sink):
        right.sinks.data = torch.tensor([0.5, -1.0, 0.0], dtype=torch.float64)
    wrong.load_state_dict(right.state_dict())
    x = 3 * torch.randn(2, 5, WIDTH, dtype=torch.float64)
    settings = Settings(keep=True, sizes=Sizes(2, frozenset({5})), edits={"(root)#0": repair})
    with torch.no_grad():
        meant, before = right(x), wrong(x)
        with tracing(wrong, {"x": x}, settings):
            after = wrong(x)
    assert (meant - before).abs().max() > 1e-3
    torch.testing.assert_close(after, meant, rtol=1e-9, atol=1e-9)
