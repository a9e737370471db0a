"""Every backend and both oracles against attention written out in loops, on every form; wrong variants are caught."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from intently import Mask
from intently.mechanism import attention, choose_backend, explain_backends, reference, stages, torch_math
from intently.mechanism.backends import blocked

# Pairwise different sizes, so that a swapped axis cannot pass unseen.
BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH, VALUE_WIDTH = 2, 6, 3, 4, 5, 8, 7


@dataclass(frozen=True)
class Form:
    """One call: the tensors and the keyword arguments."""

    name: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    def fuses(self) -> bool:
        return not {"softcap", "sink"} & set(self.options)


def _forms() -> list[Form]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def seen(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) > 0.4

    def form(
        name: str,
        *,
        batch: tuple[int, ...] = (BATCH,),
        kv_heads: int = KV_HEADS,
        keys: int = KEYS,
        value_width: int = VALUE_WIDTH,
        **options: Any,
    ) -> Form:
        return Form(
            name,
            normal(*batch, HEADS, QUERIES, WIDTH),
            normal(*batch, kv_heads, keys, WIDTH),
            normal(*batch, kv_heads, keys, value_width),
            options,
        )

    blind = seen(BATCH, 1, QUERIES, KEYS)
    blind[0, :, 1] = False
    blind[1, :, 3] = False
    slopes = torch.tensor([2.0**-head for head in range(HEADS)], dtype=torch.float64)[:, None, None]

    def distance(query_index: torch.Tensor, key_index: torch.Tensor) -> torch.Tensor:
        return -slopes * (query_index - key_index).abs()

    hiding = torch.where(blind, normal(BATCH, 1, QUERIES, KEYS), -math.inf)
    return [
        form("plain"),
        form("one kv head", kv_heads=1),
        form("no groups", kv_heads=HEADS),
        form("mask [query, key]", mask=seen(QUERIES, KEYS)),
        form("mask [key]", mask=seen(KEYS)),
        form("mask [heads, query, key]", mask=seen(HEADS, QUERIES, KEYS)),
        form("mask per sample and key", mask=seen(BATCH, 1, 1, KEYS)),
        form("mask per query", mask=seen(BATCH, 1, QUERIES, 1)),
        form("mask full", mask=seen(BATCH, HEADS, QUERIES, KEYS)),
        form("rows that see nothing", mask=blind),
        form("nothing seen at all", mask=torch.zeros(1, 1, dtype=torch.bool)),
        form("bias", bias=normal(HEADS, QUERIES, KEYS)),
        form("bias and mask", bias=normal(1, HEADS, 1, KEYS), mask=blind),
        form("bias hides", bias=hiding),
        form("bias hides and mask hides", bias=hiding, mask=seen(BATCH, 1, 1, KEYS)),
        form("scale", scale=0.3),
        form("scale 0", scale=0.0, mask=blind),
        form("scale below 0", scale=-0.7),
        form("softcap", softcap=0.8),
        form("sink", sink=normal(HEADS)),
        form("sink where nothing is seen", sink=normal(HEADS), mask=blind),
        form("all at once", scale=0.5, softcap=1.3, bias=normal(HEADS, QUERIES, KEYS), mask=blind, sink=normal(HEADS)),
        form("two batch axes", batch=(2, 3), mask=seen(2, 1, 1, QUERIES, KEYS)),
        form(
            "two batch axes, mask per head", batch=(2, 3), mask=seen(HEADS, QUERIES, KEYS), bias=normal(QUERIES, KEYS)
        ),
        Form("no head axis", normal(3, QUERIES, WIDTH), normal(3, KEYS, WIDTH), normal(3, KEYS, 2)),
        Form(
            "no head axis, mask per sample",
            normal(3, QUERIES, WIDTH),
            normal(3, KEYS, WIDTH),
            normal(3, KEYS, 2),
            {"mask": seen(3, QUERIES, KEYS), "bias": normal(3, 1, KEYS), "sink": normal(1)},
        ),
        Form(
            "no batch axis", normal(QUERIES, WIDTH), normal(KEYS, WIDTH), normal(KEYS, 2), {"mask": seen(QUERIES, KEYS)}
        ),
        form("causal", mask=Mask.causal()),
        form("causal and bias", mask=Mask.causal(), bias=normal(HEADS, QUERIES, KEYS)),
        form("causal, bottom-right", mask=Mask.causal(align="bottom-right")),
        form("causal, bottom-right, more queries than keys", keys=2, mask=Mask.causal(align="bottom-right")),
        form("causal, bottom-right, square", keys=QUERIES, mask=Mask.causal(align="bottom-right")),
        # On a CPU torch's flash kernel runs only where the value is as wide as the query.
        form("equal widths", value_width=WIDTH),
        form("equal widths, causal", value_width=WIDTH, mask=Mask.causal()),
        form("equal widths, one head per kv head", value_width=WIDTH, kv_heads=HEADS, mask=Mask.causal()),
        form("equal widths, rows that see nothing", value_width=WIDTH, mask=blind),
        form("equal widths, bias hides", value_width=WIDTH, bias=hiding),
        form("bias by rule", bias=distance),
        form("bias by rule and all at once", softcap=1.3, bias=distance, mask=Mask.window(2), sink=normal(HEADS)),
        form("window", mask=Mask.causal() & Mask.window(2)),
        form("documents", kv_heads=HEADS, keys=QUERIES, value_width=WIDTH, mask=Mask.documents(1, 3)),
        form("value wider", value_width=WIDTH + 3, mask=Mask.prefix(2)),
        form("padding", mask=Mask.causal() & Mask.padding([3, 5], side="left")),
    ]


FORMS = _forms()
EVERY_FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


def in_loops(form: Form) -> torch.Tensor:
    """Attention of one form in Python floats, one query at a time."""
    query, key, value = form.tensors
    lead = query.shape[:-2]
    headless = query.dim() < 4
    options = form.options
    mask = options.get("mask")
    if isinstance(mask, Mask):
        mask = mask.matrix(query.shape[-2], key.shape[-2])
    full = (*lead, query.shape[-2], key.shape[-2])
    may_see = torch.ones(full).bool() if mask is None else mask.expand(full)
    bias = options.get("bias", torch.zeros(1, 1, dtype=torch.float64))
    if callable(bias):
        bias = bias(torch.arange(query.shape[-2])[:, None], torch.arange(key.shape[-2]))
    bias = bias.expand(full)
    scale = options.get("scale", 1 / math.sqrt(query.shape[-1]))
    group = 1 if headless else query.shape[-3] // key.shape[-3]

    output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float64)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in (*lead, 1))).reshape(-1, len(lead) + 1).tolist():
        at = tuple(index[:-1])
        kv_at = at if headless else (*at[:-1], at[-1] // group)
        for i in range(query.shape[-2]):
            shares: list[float] = []
            for j in range(key.shape[-2]):
                logit = scale * sum(query[at][i][w].item() * key[kv_at][j][w].item() for w in range(query.shape[-1]))
                if "softcap" in options:
                    logit = options["softcap"] * math.tanh(logit / options["softcap"])
                logit += bias[at][i][j].item()
                shares.append(math.exp(logit) if may_see[at][i][j] else 0.0)
            total = sum(shares)
            if "sink" in options:
                total += math.exp(options["sink"][0 if headless else at[-1]].item())
            for j, share in enumerate(shares):
                if share:
                    output[at][i] += share / total * value[kv_at][j]
    return output


TRUTHS = {form.name: in_loops(form) for form in FORMS}


def failures(candidate: Callable[..., torch.Tensor]) -> list[str]:
    """The forms on which a candidate differs from the loops; also where it raises, for then it gives no answer."""
    failed = []
    for form in FORMS:
        try:
            close = torch.allclose(candidate(*form.tensors, **form.options), TRUTHS[form.name], rtol=1e-9, atol=1e-12)
        except (RuntimeError, ValueError, TypeError):
            close = False
        if not close:
            failed.append(form.name)
    return failed


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of at most two queries, so that even four of them make several."""
    monkeypatch.setattr(blocked, "BLOCK", 2)


def fused_where_it_can(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    able = not {"softcap", "sink"} & set(options)
    return attention(*tensors, **options, backend="fused" if able else "stages")


def by(backend: str) -> Callable[..., torch.Tensor]:
    def candidate(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return attention(*tensors, **options, backend=backend)

    candidate.__name__ = backend
    return candidate


def of_reference(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    return reference(*tensors, **options).output


CANDIDATES = [
    attention,
    fused_where_it_can,
    torch_math,
    of_reference,
    *map(by, ("stages", "blocked", "math", "oracle")),
]


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.__name__)
def test_equals_the_loops_on_every_form(candidate):
    assert failures(candidate) == []


@pytest.mark.usefixtures("tiny")
def test_several_blocks_equal_the_loops_on_every_form():
    assert failures(by("blocked")) == []


def test_the_budget_makes_blocks_smaller_and_nothing_else(monkeypatch):
    monkeypatch.setattr(blocked, "BUDGET", 1)
    assert failures(by("blocked")) == []


def test_negative_control_a_block_that_loses_a_key(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 2)
    true = blocked.reach
    monkeypatch.setattr(blocked, "reach", lambda inputs, rows: true(inputs, rows)[:-1])
    assert {"plain", "causal", "window", "documents", "padding"} <= set(failures(by("blocked")))


def _core(query, key, value, *, repeat=None, dim=-1, scale=None, mask=None, invert=False, blind_to_zero=True):
    """Attention as people write it by hand, with one slip at a time to choose from."""
    repeat = repeat or (lambda t: t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3))
    if query.dim() >= 4:
        key, value = repeat(key), repeat(value)
    logits = query @ key.mT * (scale if scale is not None else query.shape[-1] ** -0.5)
    if isinstance(mask, Mask):
        mask = mask.matrix(query.shape[-2], key.shape[-2])
    if mask is not None:
        logits = logits.masked_fill(mask if invert else ~mask, -math.inf)
    weights = logits.softmax(dim)
    return (weights.nan_to_num(0.0) if blind_to_zero else weights) @ value


PLAIN_FORMS = {form.name for form in FORMS if set(form.options) <= {"mask", "scale"}}
MASKED_FORMS = {form.name for form in FORMS if set(form.options) == {"mask"}}
GROUPED_FORMS = {form.name for form in FORMS if form.query.dim() >= 4 and form.key.shape[-3] not in (1, HEADS)}
BLIND_FORMS = {
    "rows that see nothing",
    "nothing seen at all",
    "scale 0",
    "padding",
    "equal widths, rows that see nothing",
}


@pytest.mark.parametrize(
    ("slip", "caught"),
    [
        ({}, set()),
        ({"scale": 1.0}, PLAIN_FORMS - {"nothing seen at all"}),
        (
            {"repeat": lambda t: t.repeat(*([1] * (t.dim() - 3)), HEADS // t.shape[-3], 1, 1)},
            GROUPED_FORMS - {"nothing seen at all"},
        ),
        ({"dim": -2}, {"plain", "no groups", "one kv head", "mask [key]"}),
        ({"invert": True}, MASKED_FORMS),
        ({"blind_to_zero": False}, BLIND_FORMS),
    ],
    ids=["no slip", "no scale", "tiled kv heads", "softmax over queries", "mask inverted", "NaN rows"],
)
def test_negative_control(slip, caught):
    def candidate(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return _core(*tensors, **{**options, **slip})

    failed = set(failures(candidate)) & PLAIN_FORMS
    assert caught & PLAIN_FORMS <= failed
    if not slip:
        assert not failed


def _gradients(candidate: Callable[..., torch.Tensor], form: Form) -> dict[str, torch.Tensor]:
    leaves = {"query": form.query, "key": form.key, "value": form.value}
    leaves |= {
        name: form.options[name] for name in ("bias", "sink") if isinstance(form.options.get(name), torch.Tensor)
    }
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in leaves.items()}
    options = {**form.options, **{name: leaves[name] for name in ("bias", "sink") if name in leaves}}
    output = candidate(leaves["query"], leaves["key"], leaves["value"], **options)
    torch.manual_seed(3)
    (output * torch.randn(output.shape, dtype=output.dtype)).sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@EVERY_FORM
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("backend", ["stages", "fused", "blocked", "math", "oracle"])
def test_gradients_equal_the_reference(form, backend):
    if backend == "fused" and not form.fuses():
        pytest.skip("torch's call lacks softcap and sink; the refusal has its own test")
    ours = _gradients(lambda *tensors, **options: attention(*tensors, **options, backend=backend), form)
    truth = _gradients(lambda *tensors, **options: reference(*tensors, **options).output, form)
    assert ours.keys() == truth.keys()
    for name, gradient in ours.items():
        assert gradient.isfinite().all()
        torch.testing.assert_close(gradient, truth[name], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("name", ["rows that see nothing", "all at once", "sink where nothing is seen", "bias hides"])
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("of", ["stages", "fused", "blocked", "reference"])
def test_gradcheck(name, of):
    form = next(form for form in FORMS if form.name == name)
    if of == "fused" and not form.fuses():
        pytest.skip("torch's call lacks softcap and sink")

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        if of == "reference":
            return reference(*tensors, **form.options).output
        return attention(*tensors, **form.options, backend=of)

    # One sample and two query heads per kv head are enough, and numerical differences are slow.
    small = [tensor.clone().requires_grad_() for tensor in form.tensors]
    assert torch.autograd.gradcheck(call, small, fast_mode=True)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("backend", ["stages", "fused", "blocked", "math", "oracle"])
def test_a_row_that_sees_nothing_is_zero_and_passes_no_gradient(backend):
    form = next(form for form in FORMS if form.name == "rows that see nothing")
    query, key, value = (tensor.clone().requires_grad_() for tensor in form.tensors)
    output = attention(query, key, value, **form.options, backend=backend)
    assert (output[0, :, 1] == 0).all() and (output[1, :, 3] == 0).all()
    output[0, :, 1].sum().backward()
    for tensor in (query, key, value):
        assert (tensor.grad == 0).all()


@EVERY_FORM
def test_stages_end_in_the_same_bits_as_attention(form):
    seen = stages(*form.tensors, **form.options)
    assert torch.equal(seen.output, attention(*form.tensors, **form.options, backend="stages"))
    for ours, truth in zip(seen, reference(*form.tensors, **form.options), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("backend", ["stages", "fused", "blocked", "math", "oracle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reduced_precision_keeps_masked_rows_safe(dtype, backend):
    # Error against float64 on the same rounded inputs, in units of the largest result.
    bound = (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
    for form in FORMS:
        if backend == "fused" and not form.fuses():
            continue
        rules = {k: (lambda i, j, rule=v: rule(i, j).to(dtype)) for k, v in form.options.items() if callable(v)}
        options = {k: v.to(dtype) if k == "bias" and k not in rules else v for k, v in form.options.items()} | rules
        tensors = [tensor.to(dtype) for tensor in form.tensors]
        for given in (tensors, *([lifted(*tensors)] if dtype != torch.float32 else [])):
            output = attention(*given, **options, backend=backend)
            assert output.dtype == dtype
            truth = reference(*given, **options).output
            error = (output.double() - truth).abs().max() / truth.abs().max().clamp_min(1.0)
            assert error < bound, (form.name, error.item(), bound)


def lifted(query, key, value):
    """A part common to all queries and keys, which cancels in the softmax; scores in half precision drown in it."""
    return *((each + 12 * (torch.arange(each.shape[-1]) == 0)).to(each.dtype) for each in (query, key)), value


def test_grouped_heads_equal_repeated_ones():
    form = FORMS[0]
    group = HEADS // KV_HEADS
    repeated = (form.key.repeat_interleave(group, dim=1), form.value.repeat_interleave(group, dim=1))
    for backend in ("stages", "fused"):
        torch.testing.assert_close(
            attention(*form.tensors, backend=backend), attention(form.query, *repeated, backend=backend)
        )


@pytest.mark.parametrize("backend", ["stages", "fused", "blocked", "math", "oracle"])
def test_empty_axes(backend):
    query, none = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 0, 8)
    chosen = "auto" if backend == "fused" else backend
    assert attention(query, none, none, backend=chosen).eq(0).all()
    assert reference(query, none, none).output.eq(0).all() and torch_math(query, none, none).eq(0).all()
    assert attention(none, query, query, backend=chosen).shape == (2, 3, 0, 8)


def test_dropout_is_applied_in_both_backends_and_follows_the_seed():
    form = FORMS[0]
    for backend in ("stages", "fused"):
        torch.manual_seed(0)
        first = attention(*form.tensors, dropout=0.5, backend=backend)
        torch.manual_seed(0)
        again = attention(*form.tensors, dropout=0.5, backend=backend)
        assert torch.equal(first, again)
        assert not torch.allclose(first, attention(*form.tensors, backend=backend))
    torch.manual_seed(0)
    dropped = attention(*form.tensors, dropout=0.5, backend="stages")
    torch.manual_seed(0)
    assert torch.equal(dropped, stages(*form.tensors, dropout=0.5).output)


def test_choice_says_why():
    query, key, value = FORMS[0].tensors
    fuses = "torch's fused call expresses all that is asked"
    assert choose_backend(query, key, key) == ("fused", fuses)
    padded = choose_backend(query, key, value)
    assert padded.name == "fused" and "the value is padded from 7 to 8" in padded.reason
    assert choose_backend(query, key, value, backend="stages") == ("stages", "asked for")
    assert choose_backend(query, key, value, sink=0.0) == ("stages", "torch's fused call has no sink")
    half = [tensor.half() for tensor in (query, key, value)]
    low = torch.full((QUERIES, KEYS), -1e9)  # finite in float32, -inf in float16
    choice = choose_backend(*half, bias=low)
    assert choice.name == "stages" and "float32[4, 5]" in choice.reason
    torch.testing.assert_close(attention(*half, bias=low), attention(*half, scale=0.0), rtol=2e-3, atol=2e-3)


def test_choice_counts_pairs_and_bytes():
    def choice(queries: int, width: int = 4, **options: Any) -> tuple[str, str]:
        states = torch.zeros(1, 1, 1, width).expand(1, 8, queries, width)
        return choose_backend(states, states, states, **options)

    narrow = Mask.causal() & Mask.window(256)
    assert choice(512, mask=narrow)[0] == "fused"  # short: cutting costs more than it saves
    assert choice(4096, mask=Mask.causal())[0] == "fused"  # torch knows the triangle by name
    assert choice(4096, mask=narrow) == ("blocked", "the mask leaves 9% of 4096 × 4096 pairs within reach")
    assert choice(4096, mask=~narrow)[0] == "fused"  # a complement's reach is not known
    assert choice(16384, mask=~narrow) == ("blocked", "torch's fused call would need 1 GiB for mask and bias")
    assert choice(2048, softcap=2.0)[0] == "stages"
    name, reason = choice(4096, softcap=2.0)  # 8 heads × 4096² × 4 bytes = 512 MiB
    assert name == "blocked" and "no softcap" in reason and "512 MiB a plane of scores" in reason


def test_every_backend_answers():
    query, key, value = FORMS[0].tensors
    answers = {name: (can, reason) for name, can, reason in explain_backends(query, key, value, dropout=0.1)}
    assert list(answers) == ["stages", "fused", "blocked", "flex", "math", "oracle"]
    assert [name for name, (can, _) in answers.items() if not can] == ["flex", "oracle"]
    assert "float64[2, 6, 4, 8]" in answers["flex"][1] and "dropout is 0.1" in answers["oracle"][1]
    for name, (can, _) in answers.items():
        if not can:
            with pytest.raises(ValueError, match=f'backend="{name}" cannot compute this'):
                attention(query, key, value, dropout=0.1, backend=name)


@pytest.mark.parametrize("knob", [{"softcap": 2.0}, {"sink": 0.0}], ids=["softcap", "sink"])
def test_fused_refuses_what_it_cannot_express(knob):
    with pytest.raises(ValueError, match=f'backend="fused" cannot compute this: .* no {next(iter(knob))}'):
        attention(*FORMS[0].tensors, **knob, backend="fused")


@pytest.mark.parametrize("call", [attention, stages, reference, torch_math])
def test_shapes_are_those_of_the_annotations(call):
    beartype, jaxtyping = pytest.importorskip("beartype"), pytest.importorskip("jaxtyping")
    checked = jaxtyping.jaxtyped(call, typechecker=beartype.beartype)
    for form in FORMS:
        checked(*form.tensors, **form.options)
    query, key, value = FORMS[0].tensors
    with pytest.raises(jaxtyping.TypeCheckError):  # the key is wider: the annotation objects before the door does
        checked(query, torch.cat([key, key], dim=-1), value)
