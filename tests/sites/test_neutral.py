"""Tracing leaves no trace: outputs, random states, parameters and torch are as they were, and nothing is kept alive."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tests.sites import spellings as s
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from intently.sites import Settings, Sizes, find, tracing

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*without torch.compile.*:UserWarning"),
]

SPELLINGS = (
    *s.PRODUCTS, *s.SOFTMAXES, *s.FACTORS, *s.MASKS, s.heads_stacked, s.scores_stacked, s.heads_one_by_one,
    s.dropped, s.capped, s.biased, s.fused, s.fused_causal, s.fused_bool, s.fused_float, s.fused_dropout,
)  # fmt: skip


class Flex(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return flex_attention(q, k, v, score_mod=lambda score, b, h, q, k: score - (q - k).abs())


def pads() -> torch.Tensor:
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[0, 3:] = True
    return hidden


def layers():
    """Names, layers with dropout, and their arguments."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 12)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 20, dropout=0.2, batch_first=True), 2)
    yield "attention", nn.MultiheadAttention(12, 4, dropout=0.2, batch_first=True), (x, x, x), {}
    yield "no weights", nn.MultiheadAttention(12, 4, 0.2, batch_first=True), (x, x, x), {"need_weights": False}
    yield "attention, pads", nn.MultiheadAttention(12, 4, batch_first=True), (x, x, x), {"key_padding_mask": pads()}
    yield "attention, sequence first", nn.MultiheadAttention(12, 4), (x, x, x), {}
    yield "encoder", encoder, (x,), {}
    yield "encoder, pads", encoder, (x,), {"src_key_padding_mask": pads()}
    yield "encoder layer", nn.TransformerEncoderLayer(12, 4, 20, batch_first=True), (x,), {}
    yield "norm first", nn.TransformerEncoderLayer(12, 4, 20, batch_first=True, norm_first=True), (x,), {}
    yield "decoder layer", nn.TransformerDecoderLayer(12, 4, 20, batch_first=True), (x, x), {}
    yield "transformer", nn.Transformer(12, 4, 1, 1, 20, batch_first=True), (x, x), {}
    yield "flex", Flex(), (x,), {}


LAYERS = {name: rest for name, *rest in layers()}


def tensors(output):
    return [t for t in (output if isinstance(output, tuple) else (output,)) if t is not None]


def run(model, args, kwargs, *, traced: bool, keep: bool = True):
    torch.manual_seed(5)
    if not traced:
        return tensors(model(*args, **kwargs)), torch.get_rng_state()
    with tracing(model, {"x": args[0]}, Settings(keep=keep, sizes=Sizes(2, frozenset({5})))):
        output = model(*args, **kwargs)
    return tensors(output), torch.get_rng_state()


def same(model, args, kwargs):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plain, state = run(model, args, kwargs, traced=False)
    for keep in (True, False):
        traced, after = run(model, args, kwargs, traced=True, keep=keep)
        assert len(plain) == len(traced)
        for one, two in zip(plain, traced, strict=True):
            assert type(one) is type(two) and one.shape == two.shape and one.dtype == two.dtype
            assert torch.equal(one, two)
        assert torch.equal(state, after), "the random state differs"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("mix", SPELLINGS, ids=lambda m: m.__name__)
def test_written_out(mix):
    model = s.Model(mix).eval()
    with torch.no_grad():
        same(model, (s.content(),), {})


@pytest.mark.parametrize("mode", ["train", "eval", "eval with gradients"])
@pytest.mark.parametrize("name", LAYERS)
def test_torch_layers(name, mode):
    model, args, kwargs = LAYERS[name]
    if name == "flex" and mode != "eval":
        pytest.skip("torch has no backward of flex_attention on the CPU")
    model.train(mode == "train")
    with torch.set_grad_enabled(mode != "eval"):
        same(model, args, kwargs)


def test_gradients_pass_unchanged():
    model, x = s.Model(s.dropped).train(), s.content()
    grads = []
    for traced in (False, True):
        model.zero_grad()
        (output,), _ = run(model, (x,), {}, traced=traced)
        output.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def marks():
    """Everything of torch that tracing stands in for."""
    forwards = [c.forward for c in (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)]
    code = flex_attention.__code__, flex_attention.__defaults__, flex_attention.__kwdefaults__
    functions = F.scaled_dot_product_attention, F.softmax, torch.Tensor.softmax
    return (*forwards, *code, *functions, sorted(flex_attention.__globals__))


def test_torch_is_restored():
    before = marks()
    model, x = s.Model(s.by_operator).eval(), s.content()
    with tracing(model, {"x": x}):
        assert marks() != before  # the harness sees what tracing changes
        model(x)
    assert marks() == before
    assert model.__dict__.keys() == s.Model(s.by_operator).__dict__.keys()
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


def test_torch_is_restored_after_an_exception():
    class Raises(nn.Module):
        def forward(self, x):
            raise LookupError("inside")

    before = marks()
    with pytest.raises(LookupError, match="inside"):
        find(Raises(), s.content())
    assert marks() == before
    assert len(find(s.Model(s.by_operator).eval(), s.content())) == 1


def test_used_twice_and_one_inside_the_other():
    model, x = s.Model(s.by_operator).eval(), s.content()
    layer = nn.MultiheadAttention(12, 4, batch_first=True).eval()
    y = torch.randn(2, 5, 12)
    before = marks()
    assert len(find(model, x)) == len(find(model, x)) == 1
    with torch.no_grad(), tracing(model, {"x": x}, Settings(sizes=Sizes(2, frozenset({5})))) as outer:
        model(x)
        with tracing(layer, {"query": y}, Settings(sizes=Sizes(2, frozenset({5})))) as inner:
            layer(y, y, y)
            flex_attention(*(torch.randn(2, 4, 5, 3) for _ in "qkv"))
        model(x)
    assert [c.path for c in inner.sites()][:1] == ["(root)"]
    assert [c.path for c in outer.sites() if c.path.startswith("inner")] == ["inner#0", "inner#1"]
    assert marks() == before


# -- memory ---------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                self.entries = max(self.entries, t.untyped_storage().nbytes() // t.element_size())
        return result


def largest(mix, length: int, *, traced: bool) -> int:
    model, x = s.Model(mix).eval(), s.content(1, length)
    settings = Settings(keep=False, sizes=Sizes(1, frozenset({length})))
    with torch.no_grad(), Largest() as seen, tracing(model, {"x": x}, settings) if traced else nullcontext() as tracer:
        model(x)
    assert tracer is None or len(tracer.sites()) == 1
    return seen.entries


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_a_fused_call_stays_without_a_map(options):
    def mix(q, k, v):
        narrow = F.scaled_dot_product_attention(q, k, v[..., : s.WIDTH], **options)  # equal widths: the flash kernel
        return F.pad(narrow, (0, s.VALUE - s.WIDTH))

    length = 2048
    widest = length * s.HEADS * s.VALUE  # the projections
    assert largest(mix, length, traced=False) <= widest
    assert largest(mix, length, traced=True) <= widest


def test_the_harness_sees_a_map():
    assert largest(s.by_operator, 256, traced=False) >= 256 * 256 * s.HEADS
    assert largest(s.fused, 256, traced=True) >= 256 * 256 * s.HEADS  # a short map is laid out to be described


def test_operands_are_let_go():
    held = []

    def mix(q, k, v):
        held.extend(weakref.ref(t) for t in (q, k, v))
        return s.by_operator(q, k, v)

    model, x = s.Model(mix).eval(), s.content()
    with torch.no_grad(), tracing(model, {"x": x}, Settings(sizes=Sizes(2, frozenset({5})))) as tracer:
        model(x)
    sites = tracer.sites()
    del tracer
    gc.collect()
    assert [h() for h in held] == [None] * 3
    assert sites[0].tensors is None


def test_kept_operands_live_as_long_as_their_site():
    held = []

    def mix(q, k, v):
        held.append(weakref.ref(v))
        return s.by_operator(q, k, v)

    model, x = s.Model(mix).eval(), s.content()
    with torch.no_grad(), tracing(model, {"x": x}, Settings(keep=True, sizes=Sizes(2, frozenset({5})))) as tracer:
        model(x)
    sites = tracer.sites()
    del tracer
    gc.collect()
    assert held[0]() is not None
    assert torch.equal(sites[0].tensors.value, held[0]())
    del sites
    gc.collect()
    assert held[0]() is None
