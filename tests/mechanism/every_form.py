"""One form, every check: a form of attention is described once and run through the same checks as all the others.

    test_additive = every_check(Form("additive", additive_attention, oracle, tensors, wrong={...}, options=...))

gives one test per check. The oracle is written in plain numpy or loops and knows nothing of our code; `wrong` holds
variants with one slip each, which the same comparison has to catch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import isfunction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from intently import Mask

Tensors = dict[str, Tensor]
Options = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Lengths of the axes, pairwise different where a form allows it, so that a swapped axis cannot pass unseen."""

    batch: int = 2
    heads: int = 6
    kv_heads: int = 3
    queries: int = 4
    keys: int = 5
    width: int = 8
    value_width: int = 7
    model: int = 10


@dataclass(frozen=True)
class Draw:
    """Random contents from one seed, in float64."""

    generator: torch.Generator

    @staticmethod
    def seeded(seed: int = 7) -> Draw:
        return Draw(torch.Generator().manual_seed(seed))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def seen(self, *shape: int) -> Tensor:
        """A bool mask with about six in ten True."""
        return torch.rand(*shape, generator=self.generator) > 0.4

    def blind(self, queries: int, keys: int) -> Tensor:
        """A bool mask `[query, key]` whose last query sees nothing."""
        mask = self.seen(queries, keys)
        mask[-1] = False
        return mask


def only_plain(draw: Draw, sizes: Sizes) -> dict[str, Options]:
    return {"plain": {}}


@dataclass(frozen=True, eq=False)
class Form:
    """A form of attention and what its checks need to know.

    Attributes:
        call: `call(**tensors, **options) -> Tensor`.
        oracle: the same arguments as float64 arrays (a `Mask` or callable bias as the matrix it means) -> array.
        tensors: the float tensors of a call; sizes 1 and batch 0 are asked for too.
        wrong: by name, variants of `call` with one slip each; at least one.
        options: by name, sets of keyword arguments (masks, biases, scales). The first stands for all where one is enough.
        gradients: names of the tensors whose gradients are checked; all of them when left out.
        stages: the same as `call`, spelled with our own five stages, where they can express it.
        sizes: of the ordinary case. Where queries equals keys the two stay equal in every case.
        impossible: edge cases that the form excludes, each with the reason ("width 1": "rotates pairs").
        blind: the options whose last query sees nothing; its output must be 0 (None: the form knows no such row).
        projects: whether the form multiplies by matrices of its own, which `torch.autocast` may round; else it changes nothing.
    """

    name: str
    call: Callable[..., Tensor]
    oracle: Callable[..., np.ndarray]
    tensors: Callable[[Draw, Sizes], Tensors]
    wrong: dict[str, Callable[..., Tensor]]
    options: Callable[[Draw, Sizes], dict[str, Options]] = only_plain
    gradients: tuple[str, ...] | None = None
    stages: Callable[..., Tensor] | None = None
    sizes: Sizes = field(default_factory=Sizes)
    impossible: dict[str, str] = field(default_factory=dict)
    blind: str | None = None
    projects: bool = False

    @property
    def square(self) -> bool:
        return self.sizes.queries == self.sizes.keys

    def cases(self, sizes: Sizes | None = None, dtype: torch.dtype = torch.float64) -> Iterator[Case]:
        """Every set of options on tensors of these sizes."""
        sizes = sizes or self.sizes
        draw = Draw.seeded()
        tensors = {name: tensor.to(dtype) for name, tensor in self.tensors(draw, sizes).items()}
        for name, options in self.options(draw, sizes).items():
            yield Case(name, tensors, {key: _in_dtype(each, dtype) for key, each in options.items()}, sizes)

    def first(self, dtype: torch.dtype = torch.float64) -> Case:
        return next(self.cases(dtype=dtype))

    def truth(self, case: Case) -> Tensor:
        arrays = {name: _as_array(name, each, case.sizes) for name, each in {**case.tensors, **case.options}.items()}
        return torch.from_numpy(np.array(self.oracle(**arrays), dtype=np.float64))


@dataclass(frozen=True, eq=False)
class Case:
    """One call of a form."""

    name: str
    tensors: Tensors
    options: Options
    sizes: Sizes

    def __call__(self, call: Callable[..., Tensor]) -> Tensor:
        return call(**self.tensors, **self.options)


def every_check(*forms: Form) -> Callable[[Form, Callable[[Form], None]], None]:
    """A pytest function that runs every check on every form."""

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    @pytest.mark.parametrize("form", forms, ids=lambda form: form.name)
    def test(form: Form, check: Callable[[Form], None]) -> None:
        check(form)

    return test


# --------------------------------------------------------------------------------------------------- the checks


def equals_the_oracle(form: Form) -> None:
    for case in form.cases():
        _assert_close(case(form.call), form.truth(case), 1e-9, case.name)


def wrong_variants_are_caught(form: Form) -> None:
    """The negative control: a slip that the comparison does not notice means that the comparison is blind to it."""
    assert form.wrong, "a form needs at least one wrong variant"
    for name, slip in form.wrong.items():
        assert any(_differs(case(slip), form.truth(case), 1e-4) for case in form.cases()), f"{name} went unnoticed"


def equals_our_stages(form: Form) -> None:
    if form.stages is None:
        pytest.skip("the five stages cannot express this form")
    for case in form.cases():
        _assert_close(case(form.call), case(form.stages), 1e-9, case.name)


def float32_keeps_the_values(form: Form) -> None:
    _keeps_the_values(form, torch.float32)


def bfloat16_keeps_the_values(form: Form) -> None:
    _keeps_the_values(form, torch.bfloat16)


def float16_keeps_the_values(form: Form) -> None:
    _keeps_the_values(form, torch.float16)


def autocast_keeps_the_values(form: Form) -> None:
    """Scores, softmax and mixture are computed as precisely as without it; just a form's own matrices may be rounded."""
    bound = 4 * torch.finfo(torch.bfloat16).eps if form.projects else _bound(torch.float32)
    worst = 0.0
    for case in form.cases(dtype=torch.float32):
        with torch.autocast("cpu", torch.bfloat16):
            output = case(form.call)
        _assert_close(output.double(), form.truth(case), bound, case.name)
        worst = max(worst, _error(output.double(), form.truth(case)))
    assert not form.projects or worst > _bound(torch.float32), "nothing was rounded: the form projects nothing"


def edges_equal_the_oracle(form: Form) -> None:
    """One query, one key, width 1, no sample at all."""
    for edge, sizes in _edges(form).items():
        if edge not in form.impossible:
            for case in form.cases(sizes):
                _assert_close(case(form.call), form.truth(case), 1e-9, f"{edge}, {case.name}")


def annotations_hold(form: Form) -> None:
    """The shapes in the signature are those that come and go, and an axis of one name has one length."""
    beartype, jaxtyping = pytest.importorskip("beartype"), pytest.importorskip("jaxtyping")
    call, fixed = (form.call.func, form.call.keywords) if isinstance(form.call, partial) else (form.call, {})
    if not isfunction(call):
        pytest.skip("not a plain function")
    checked = jaxtyping.jaxtyped(call, typechecker=beartype.beartype)
    for case in form.cases():
        case(partial(checked, **fixed))


def blind_rows_are_zero(form: Form) -> None:
    if form.blind is None:
        pytest.skip("no mask that could hide every key from a query")
    case = next(each for each in form.cases() if each.name == form.blind)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in case.tensors.items()}
    blind = form.call(**leaves, **case.options)[..., -1, :]
    assert (blind == 0).all()
    gradients = torch.autograd.grad(blind.sum(), list(leaves.values()), allow_unused=True)
    assert all(gradient is None or (gradient == 0).all() for gradient in gradients)


def gradients_are_right(form: Form) -> None:
    """Against numerical differences, in float64, for every set of options."""
    for case in form.cases():
        names = form.gradients or tuple(case.tensors)
        leaves = tuple(case.tensors[name].clone().requires_grad_() for name in names)

        def call(*leaves: Tensor, names=names, case=case) -> Tensor:
            return form.call(**{**case.tensors, **dict(zip(names, leaves, strict=True))}, **case.options)

        assert torch.autograd.gradcheck(call, leaves, fast_mode=True), case.name


def strides_do_not_matter(form: Form) -> None:
    """Tensors that are not contiguous, and tensors that repeat one row by a stride of 0."""
    for case in form.cases():
        transposed = {name: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for name, tensor in _items(case)}
        _assert_close(form.call(**transposed, **case.options), case(form.call), 1e-9, f"not contiguous, {case.name}")
        expanded = {name: tensor[:1].expand_as(tensor) for name, tensor in _items(case)}
        copied = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in expanded.items()}
        once = form.call(**copied, **case.options)
        _assert_close(form.call(**expanded, **case.options), once, 1e-9, f"expanded, {case.name}")


def vmap_equals_a_loop(form: Form) -> None:
    for case in form.cases():
        stacked = {name: torch.stack([tensor, 0.5 * tensor]) for name, tensor in _items(case)}

        def call(tensors: Tensors, case=case) -> Tensor:
            return form.call(**tensors, **case.options)

        looped = torch.stack([call({name: both[i] for name, both in stacked.items()}) for i in range(2)])
        with warnings.catch_warnings():
            # torch's kernel for the CPU has no batching rule and is run once per sample: slower, and right.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            mapped = torch.vmap(call)(stacked)
        _assert_close(mapped, looped, 1e-9, f"vmap, {case.name}")


def compiles_in_one_graph(form: Form) -> None:
    """`torch.compile(fullgraph=True)`, output and gradients; the graph is the point, so it is not lowered any further."""
    case = form.first()
    names = form.gradients or tuple(case.tensors)

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        tensors = {name: tensor.clone().requires_grad_(name in names) for name, tensor in _items(case)}
        output = call(**tensors, **case.options)
        return [output, *torch.autograd.grad(output.square().sum(), [tensors[name] for name in names])]

    torch.compiler.reset()
    compiled = torch.compile(form.call, fullgraph=True, backend="eager")
    for ours, eager in zip(run(compiled), run(form.call), strict=True):
        _assert_close(ours, eager, 1e-9, "compiled")


CHECKS: tuple[Callable[[Form], None], ...] = (
    equals_the_oracle,
    wrong_variants_are_caught,
    equals_our_stages,
    float32_keeps_the_values,
    bfloat16_keeps_the_values,
    float16_keeps_the_values,
    autocast_keeps_the_values,
    edges_equal_the_oracle,
    annotations_hold,
    blind_rows_are_zero,
    gradients_are_right,
    strides_do_not_matter,
    vmap_equals_a_loop,
    compiles_in_one_graph,
)


# ------------------------------------------------------------------------------------------------------ helpers


ULPS = {torch.float32: 8.0, torch.bfloat16: 2.0, torch.float16: 2.0}
"""Errors allowed, in units of eps of the largest entry of the truth: half precision is computed in float32 and rounded at the end."""


def _bound(dtype: torch.dtype) -> float:
    return ULPS[dtype] * torch.finfo(dtype).eps


def _keeps_the_values(form: Form, dtype: torch.dtype) -> None:
    """Against the truth of the same, already rounded tensors."""
    for case in form.cases(dtype=dtype):
        output = case(form.call)
        assert output.dtype == dtype, case.name
        _assert_close(output.double(), form.truth(case), _bound(dtype), case.name)
        if dtype != torch.float32 and (lifted := _lifted(case)) is not None:
            _assert_close(lifted(form.call).double(), form.truth(lifted), _bound(dtype), f"lifted, {case.name}")


def _lifted(case: Case) -> Case | None:
    """The case with a large part common to all queries and keys; None where it has no such tensors.

    It adds the same to every logit of a row, so it cancels in the softmax; scores kept in half precision lose, beside it,
    what tells the keys apart, which random tensors of unit size do not show.
    """
    if any(name not in case.tensors or case.tensors[name].dim() < 3 for name in ("query", "key")):
        return None
    moved = {}
    for name in ("query", "key"):
        moved[name] = case.tensors[name].clone()
        moved[name][..., 0] += 12
    return replace(case, tensors={**case.tensors, **moved})


def _edges(form: Form) -> dict[str, Sizes]:
    ordinary = form.sizes
    one_query = replace(ordinary, queries=1, keys=1 if form.square else ordinary.keys)
    one_key = replace(ordinary, keys=1, queries=1 if form.square else ordinary.queries)
    return {
        "one query": one_query,
        "one key": one_key,
        "width 1": replace(ordinary, width=1, value_width=1),
        "batch 0": replace(ordinary, batch=0),
    }


def _items(case: Case):
    return case.tensors.items()


def _in_dtype(option: Any, dtype: torch.dtype) -> Any:
    return option.to(dtype) if isinstance(option, Tensor) and option.is_floating_point() else option


def _as_array(name: str, value: Any, sizes: Sizes) -> Any:
    if isinstance(value, Mask):
        value = value.matrix(sizes.queries, sizes.keys)
    elif name == "bias" and callable(value):
        value = value(torch.arange(sizes.queries)[:, None], torch.arange(sizes.keys))
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.double() if value.is_floating_point() else value).numpy()
    return value


def _error(output: Tensor, truth: Tensor) -> float:
    """The largest deviation, relative to the largest entry of the truth or 1; infinite where shapes or NaNs differ."""
    if output.shape != truth.shape:
        return float("inf")
    if output.numel() == 0:
        return 0.0
    error = (output.detach().double() - truth.detach().double()).abs().max().item()
    return error / max(1.0, truth.abs().max().item()) if error == error else float("inf")


def _differs(output: Tensor, truth: Tensor, bound: float) -> bool:
    return _error(output, truth) > bound


def _assert_close(output: Tensor, truth: Tensor, bound: float, what: str) -> None:
    error = _error(output, truth)
    assert error <= bound, (
        f"{what}: error {error:.3g} above {bound:.3g}; got {list(output.shape)}, truth {list(truth.shape)}"
    )
