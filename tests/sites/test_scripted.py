"""Functions scripted by torch.jit: their calls are seen in the Python they were made from, and their outputs stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intently import Intent, Mask, Target, check
from intently.sites import Replacement, Settings, Site, Sizes, tracing

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*not supported:DeprecationWarning"),
]

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 5, 8
ANGLES = torch.arange(LENGTH, dtype=torch.float64)[:, None] / 10 ** (torch.arange(4, dtype=torch.float64) / 4)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    table = torch.cat([angles, angles], -1)
    a, b = x.chunk(2, -1)
    return x * table.cos() + torch.cat([-b, a], -1) * table.sin()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v


def same(x: Tensor) -> Tensor:
    return x


def written_into(x: Tensor) -> Tensor:
    x.mul_(2.0)
    return x


def asked(x: Tensor) -> Tensor:
    if torch.jit.is_scripting():  # pyright: ignore
        return x * 3.0
    return x.flip(1)


def raising(x: Tensor) -> Tensor:
    if not torch.jit.is_scripting():  # pyright: ignore
        raise LookupError("not Python")
    return x * 3.0


def dropped(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, True)


class Attention(nn.Module):
    """One call in double precision: rotated queries and keys, values changed by `change`, mixed by `mix`."""

    def __init__(self, change: Callable[[Tensor], Tensor] = same, mix: Callable[..., Tensor] = attend) -> None:
        super().__init__()
        self.change, self.mix = change, mix
        self.turn = torch.jit.script(turn)
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = self.mix(self.turn(q, ANGLES), self.turn(k, ANGLES), self.change(v))
        return mixed.transpose(1, 2).flatten(2)


def content() -> Tensor:
    return torch.randn(BATCH, LENGTH, HEADS * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def run(model: nn.Module, **settings: object) -> tuple[Tensor, tuple[Site, ...], bool]:
    """The traced output, its sites, and whether something was hidden."""
    torch.manual_seed(5)
    x = content()
    given = Settings(keep=True, sizes=Sizes(BATCH, frozenset({LENGTH})), **settings)  # type: ignore[arg-type]
    with torch.no_grad(), tracing(model, {"x": x}, given) as tracer:
        output = model(x)
        tracer.known.of(output)
    return output, tracer.sites(), tracer.opaque()


def test_a_rotation_in_a_scripted_function_is_measured() -> None:
    _, (site,), hidden = run(Attention())
    rotation = site.rotation("query")
    assert not hidden
    assert rotation is not None
    expected = torch.zeros(LENGTH, WIDTH, WIDTH, dtype=torch.float64)
    for pair in range(4):
        expected[:, pair, pair] = expected[:, pair + 4, pair + 4] = ANGLES[:, pair].cos()
        expected[:, pair + 4, pair] = ANGLES[:, pair].sin()
        expected[:, pair, pair + 4] = -ANGLES[:, pair].sin()
    assert torch.allclose(rotation.maps, expected.expand_as(rotation.maps), atol=1e-12)


def test_attention_in_a_scripted_function_is_found_at_its_line_and_can_be_edited() -> None:
    model = Attention(mix=torch.jit.script(attend))
    plain, (site,), hidden = run(model)
    assert not hidden
    assert site.path == "(root)"
    assert site.scale is not None
    assert site.scale.factors == (0.5,) * HEADS
    assert site.source is not None
    assert site.source.line == attend.__code__.co_firstlineno + 1
    changed, _, _ = run(model, edits={site.key_name: lambda s: Replacement(weights=s.tensors.weights * 0)})
    assert bool((changed == 0).all())
    assert bool((plain != 0).any())


@pytest.mark.parametrize("change", [same, written_into, asked, raising, dropped], ids=lambda f: f.__name__)
def test_the_output_and_the_random_state_are_those_of_the_scripted_function(change) -> None:
    torch.manual_seed(0)
    model = Attention(torch.jit.script(change))
    torch.manual_seed(5)
    with torch.no_grad():
        plain = model(content())
    state = torch.get_rng_state()
    traced, sites, hidden = run(model)
    assert torch.equal(plain, traced)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(sites) == 1
    # What the Python run does not show stays hidden, and is not made up.
    assert hidden == (change in (asked, raising))


def test_a_recorded_function_whose_python_says_something_else_stays_hidden() -> None:
    def grows(x: Tensor) -> Tensor:
        return x * float(calls.pop())

    calls = [5, 2, 2]
    recorded: Any = torch.jit.trace(grows, torch.ones(1, 1, 1, 1, dtype=torch.float64), check_trace=False)
    assert calls == [5, 2]
    assert run(Attention(recorded))[2] is False
    assert run(Attention(recorded))[2] is True


@pytest.fixture
def call_of_scripts() -> Iterator[object]:
    before = vars(torch.jit.ScriptFunction)["__call__"]
    yield before
    assert vars(torch.jit.ScriptFunction)["__call__"] is before


def test_torch_is_restored(call_of_scripts: object) -> None:
    model = Attention()
    with tracing(model, {"x": content()}):
        assert vars(torch.jit.ScriptFunction)["__call__"] is not call_of_scripts
        model(content())
    with pytest.raises(LookupError), tracing(model, {"x": content()}):
        raise LookupError


class Decoder(nn.Module):
    """Rotary positions by a scripted function, along the axis of heads or of positions."""

    def __init__(self, *, heads: bool) -> None:
        super().__init__()
        self.heads, self.turn = heads, torch.jit.script(turn)
        self.embed, self.qkv = nn.Embedding(23, 24), nn.Linear(24, 72)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, 8)) for t in self.qkv(self.embed(ids)).chunk(3, -1))
        q, k, v = (t if self.heads else t.transpose(1, 2) for t in (q, k, v))
        angles = torch.arange(q.shape[-2])[:, None] / 100 ** (torch.arange(4) / 4)
        q, k = self.turn(q, angles), self.turn(k, angles)
        q, k, v = (t.transpose(1, 2) if self.heads else t for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("heads", [True, False])
def test_a_fault_in_a_scripted_function_is_named_and_proven(heads: bool) -> None:
    torch.manual_seed(0)
    report = check(Target(Decoder(heads=heads), Intent(Mask.causal()), tokens=23))
    told = {(f.fault, f.proof) for f in report.findings if f.severity == "error"}
    assert told == ({("rope-wrong-axis", "proven")} if heads else set())
