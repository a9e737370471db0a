"""The knobs of attention that a model holds: a cap, sinks, slopes, tables of bias; how to turn one, and what sites show of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from intently.edits import Repair, biased, multiplied, softcapped, with_sink
from intently.promises.scaled import configurations
from intently.promises.trial import Trial
from intently.sites import Site
from intently.sites.measure import HIDDEN_NATS
from intently.targets.field import field_of

Kind = Literal["softcap", "sink", "bias", "scale", "norm", "parameter"]
MOST_TURNED = 12  # knobs turned one by one; of more than that, the first ones

_SINK = re.compile(r"(^|[._])sinks?($|[._])", re.I)
_BIAS = re.compile(
    r"alibi|slopes?($|[._])|rel(ative)?_?(pos|attention_bias|attn_bias|bias|emb|height|width|[hw]$)|pos(ition(al)?)?_?bias|"
    r"(attn|attention|score|logits?)_bias($|[._])",
    re.I,
)
_SCALE = re.compile(r"(logits?|attn|attention|score|qk)_?scale|(^|[._])(temperature|tau)($|[._])", re.I)
_NORM = re.compile(r"(^|[._])(qk?|k|query|key)_?(layer_?)?norm", re.I)
_CAP = re.compile(r"soft_?cap|logits?_?cap($|_)|attn_?cap|tanh_?clip", re.I)
_NOT_ATTENTION = re.compile(r"final|output|lm_?head|router|vocab", re.I)
_FLAG = re.compile(r"^(use_|with_|has_)?(alibi|rel(ative)?_pos(ition)?(al)?_bias|(t5|relative)_bias)$", re.I)


@dataclass(frozen=True)
class Knob:
    """One setting of attention: a tensor of the model, or a field of a module or of its configuration.

    `place` is the path of the module that holds it; `named` says that its name tells what it is for.
    """

    name: str
    kind: Kind
    place: str
    tensors: tuple[Tensor, ...] = ()
    fields: tuple[tuple[Any, str], ...] = ()
    named: bool = True

    @property
    def value(self) -> Any:
        """What it is set to now."""
        if self.tensors:
            return self.tensors[0]
        holder, field = self.fields[0]
        return holder[field] if isinstance(holder, dict) else getattr(holder, field)

    def concerns(self, site: Site) -> bool:
        """Whether a call runs in the module that holds it, or in one beneath."""
        path = site.path.split("#")[0]
        return self.place == "(root)" or path == self.place or path.startswith(self.place + ".")

    @contextlib.contextmanager
    def turned(self) -> Iterator[None]:
        """The model with the knob set otherwise."""
        before = [t.detach().clone() for t in self.tensors]
        values = [(h, f, h[f] if isinstance(h, dict) else getattr(h, f)) for h, f in self.fields]
        generator = torch.Generator().manual_seed(5)
        try:
            with torch.no_grad():
                for tensor, old in zip(self.tensors, before, strict=True):
                    step = torch.randn(old.shape, generator=generator, dtype=torch.float64).to(old)
                    tensor.copy_(old + step * (1 + float(old.abs().nan_to_num(posinf=0.0, neginf=0.0).mean())))
            for holder, field, old in values:
                _put(holder, field, (not old) if isinstance(old, bool) else old * 1e-3)
            yield
        finally:
            with torch.no_grad():
                for tensor, old in zip(self.tensors, before, strict=True):
                    tensor.copy_(old)
            for holder, field, old in values:
                _put(holder, field, old)


def _put(holder: Any, field: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[field] = value
    else:
        setattr(holder, field, value)


def knobs_of(model: Any, sites: Sequence[Site]) -> tuple[Knob, ...]:
    """The knobs that modules hold in which attention ran, their direct parts included; nothing of a module that did not run."""
    if not isinstance(model, nn.Module):
        return ()
    attending = {s.path.split("#")[0] for s in sites}
    above = {".".join(p.split(".")[:n]) or "(root)" for p in attending for n in range(p.count(".") + 1)} | {"(root)"}
    tensors: dict[int, Knob] = {}
    fields: dict[tuple[str, Any], Knob] = {}
    for path, module in model.named_modules():
        path = path or "(root)"
        if path not in attending and path not in above:
            continue
        for name, tensor, parameter in _held(module, path, attending | above):
            kind = kind_of(name)
            if kind is None and not (parameter and path in attending):
                continue
            if id(tensor) not in tensors:
                whole = name if path == "(root)" else f"{path}.{name}"
                tensors[id(tensor)] = Knob(whole, kind or "parameter", path, (tensor,), named=kind is not None)
        for holder, field, place in _fields(module, path):
            kind = _kind_of_field(field, field_of(holder, field))
            if kind is None:
                continue
            known = fields.get((field, place))
            holders = (*(known.fields if known else ()), (holder, field))
            if known is None or all(h is not holder for h, _ in known.fields):
                fields[(field, place)] = Knob(_spelled(place, field), kind, place or "(root)", (), holders)
    return (*tensors.values(), *fields.values())


def _spelled(place: str, field: str) -> str:
    if not place:
        return f"the configuration's {field}"
    return field if place == "(root)" else f"{place}.{field}"


def kind_of(name: str) -> Kind | None:
    """What a tensor is for, by its name; None where that tells nothing."""
    if _SINK.search(name):
        return "sink"
    if _BIAS.search(name):
        return "bias"
    if _SCALE.search(name):
        return "scale"
    return "norm" if _NORM.search(name) and name.endswith("weight") else None


def _kind_of_field(field: str, value: Any) -> Kind | None:
    if isinstance(value, bool):
        return "bias" if value and _FLAG.match(field) else None
    number = isinstance(value, (int, float)) and value > 0
    return "softcap" if number and _CAP.search(field) and not _NOT_ATTENTION.search(field) else None


def _held(module: nn.Module, path: str, others: set[str]) -> Iterator[tuple[str, Tensor, bool]]:
    """Floating tensors of a module and of its parts that hold no other module: name, tensor, whether it is a parameter."""
    for name, part in [("", module), *module.named_children()]:
        whole = name if path == "(root)" else f"{path}.{name}"
        if name and (whole in others or next(part.children(), None) is not None):
            continue
        lead = f"{name}." if name else ""
        for own, tensor in part.named_parameters(recurse=False):
            if not _blind(lead + own, part):
                yield lead + own, tensor, True
        plain = {k: v for k, v in vars(part).items() if isinstance(v, Tensor) and not k.startswith("_")}
        for own, tensor in {**dict(part.named_buffers(recurse=False)), **plain}.items():
            if tensor.is_floating_point():
                yield lead + own, tensor, False


def _blind(name: str, part: nn.Module) -> bool:
    """Whether a tensor may be without effect by nature: what is added to all keys alike moves no softmax."""
    if name.endswith("bias") and isinstance(part, (nn.Linear, nn.LayerNorm, nn.modules.conv._ConvNd)):
        return True
    return bool(re.search(r"(^|[._])(k|key|in_proj|qkv)_?(proj_?)?bias$", name))


def _fields(module: nn.Module, path: str) -> Iterator[tuple[Any, str, str]]:
    """Plain fields of a module, and of the configurations that it holds, which speak for the whole model."""
    for field in list(vars(module)):
        if not field.startswith("_"):
            yield module.__dict__, field, path
    for held in configurations(module):
        names = held if isinstance(held, dict) else vars(held) if hasattr(held, "__dict__") else ()
        for field in list(names):
            yield held, str(field), ""


# -- what is dead -------------------------------------------------------------------------------------------------------


def asleep(trial: Trial, condition: Any, knobs: Sequence[Knob]) -> tuple[Knob, ...]:
    """The knobs among some that move no output when turned.

    One backward pass tells most that are alive; only the others are turned, while parameters that are all zero (closed
    gates) hold something else.
    """
    model, held = trial.runner.model, [k for k in knobs if k.tensors]
    with _awake(model if isinstance(model, nn.Module) else None) as woken:
        suspected = [k for k in knobs if not k.tensors] + _without_gradient(trial, condition, held)
        if not suspected:
            return ()
        base = trial.run(trial.batch(condition.layout), condition.switch) if woken else trial.output(condition)
        noise = trial.threshold(base)
        return tuple(k for k in suspected[:MOST_TURNED] if movement(trial, condition, k, base) <= noise)


def movement(trial: Trial, condition: Any, knob: Knob, base: Tensor | None = None) -> float:
    """How far turning a knob moves an output; inf where the model then raises: what reads it is alive."""
    base = trial.output(condition) if base is None else base
    try:
        with knob.turned():
            other = trial.run(trial.batch(condition.layout), condition.switch)
    except Exception:
        return float("inf")
    if other.shape != base.shape:
        return float("inf")
    rows = trial.real_rows(condition, base.shape[1])
    gap = torch.nan_to_num((other - base).abs(), nan=float("inf"))
    return float(gap[rows].amax())


def _without_gradient(trial: Trial, condition: Any, knobs: Sequence[Knob]) -> list[Knob]:
    """Knobs on which no output depends: those by name with a gradient of 0 or of rounding, others that take no part at all."""
    if not knobs:
        return []
    try:
        found = trial.runner.gradients(trial.batch(condition.layout), [k.value for k in knobs], condition.switch)
    except Exception:
        return [k for k in knobs if k.named]  # a model that cannot run with gradients
    sizes = [None if g is None else float(g.abs().nan_to_num(nan=1.0).amax()) for g in found]
    if all(s is None for s in sizes):
        return [k for k in knobs if k.named]
    largest = max(s for s in sizes if s is not None)
    pairs = zip(knobs, sizes, strict=True)
    return [k for k, s in pairs if s is None or (k.named and s <= 1e-11 * max(largest, 1e-30))]


@contextlib.contextmanager
def _awake(model: nn.Module | None) -> Iterator[bool]:
    """Parameters that hold nothing but zeros hold small numbers meanwhile."""
    zero = [p for p in model.parameters() if p.is_floating_point() and not bool(p.any())] if model is not None else []
    generator = torch.Generator().manual_seed(3)
    try:
        with torch.no_grad():
            for p in zero:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p))
        yield bool(zero)
    finally:
        with torch.no_grad():
            for p in zero:
                p.zero_()


# -- what would apply it ------------------------------------------------------------------------------------------------


def applied(knob: Knob, site: Site) -> Repair | None:
    """The repair that puts a knob's present value to work at a call; None where its shape does not tell how it is meant."""
    if knob.kind == "softcap":
        return softcapped(lambda: float(knob.value))
    if knob.kind == "sink" and knob.value.numel() in (1, site.heads):
        return with_sink(lambda: knob.value)
    if knob.kind == "scale" and knob.value.numel() in (1, site.heads):
        return multiplied(lambda: knob.value)
    if knob.kind == "bias" and _spread(knob, site) is not None:
        return biased(lambda s: _spread(knob, s))
    return None


def _spread(knob: Knob, site: Site) -> Tensor | None:
    """A knob's value as a bias `[heads or 1, query, key]`, read by its shape and, for slopes, by its name."""
    heads, queries, keys = site.heads, site.queries, site.keys
    ahead = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]  # [query, key]: key after query
    if isinstance(knob.value, bool):
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads) * float(knob.value)
        return -slopes[:, None, None] * ahead.abs() if "alibi" in knob.name else None
    table = knob.value.detach().double()
    if "slope" in knob.name or ("alibi" in knob.name and table.numel() == heads):
        return -table.reshape(-1, 1, 1) * ahead.abs() if table.numel() in (1, heads) else None
    shape = [n for n in table.shape if n > 1]
    table = table.reshape(shape)
    if len(shape) >= 2 and shape[-2] >= queries and shape[-1] >= keys and shape[:-2] in ([], [heads]):
        return table[..., :queries, :keys].reshape(-1, queries, keys)
    if len(shape) == 2 and heads in shape:
        table = table if shape[0] == heads else table.T
    elif len(shape) == 1 and shape != [heads]:
        table = table[None]
    else:
        return None
    return table[:, (ahead + table.shape[1] // 2).clamp(0, table.shape[1] - 1)]


# -- what sites show ----------------------------------------------------------------------------------------------------


def shown(site: Site) -> dict[str, float] | None:
    """What a call adds to scaled q·k: the size of its bias, its cap, its sink; None where that cannot be read."""
    tensors = site.tensors
    if (
        tensors is None
        or tensors.scores is None
        or tensors.logits is None
        or site.scale is None
        or site.visible is None
    ):
        return None
    if (
        site.kind == "flex"
        or site.partial
        or not site.rows.are_tokens
        or not bool(torch.isfinite(tensors.scores).all())
    ):
        return None
    short = site.repaired and site.row_sum is not None and bool(((site.row_sum > 0) & (site.row_sum < 1 - 1e-9)).any())
    traits = {"softcap": float(site.scale.softcap or 0.0), "sink": float(site.sink or short), "bias": 0.0}
    if site.scale.softcap:
        return traits
    added = tensors.fit.added
    seen = site.visible & (added > -HIDDEN_NATS)
    size = float(tensors.logits.double().masked_fill(~seen, 0.0).abs().amax())
    added = torch.where(seen, added, torch.full_like(added, float("nan")))
    added = (added - added.nanmedian(-1, keepdim=True).values).nan_to_num()
    most = float(added.abs().amax())
    traits["bias"] = most if most > 1e-6 * max(size, 1e-9) else 0.0
    return traits
