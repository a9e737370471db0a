"""The ways in which a model can be fed in pieces, found by trying: which argument takes the cache, where the new one comes out."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from intently.targets.feeding import Feed, StartForm, Way
from intently.targets.field import field_of
from intently.targets.generating import generation
from intently.targets.running import Fed, Runner
from intently.targets.signature import CACHE, POSITIONS, START, lengths_for, plain_names, signature
from intently.targets.stream import Batch
from intently.targets.target import Target

_FLAG = re.compile(r"^((use|with|return|output)_(kv_?)?(cache|caches|past|mems|state|states|kv|present)|incremental)$")
_MAKER = re.compile(r"^(make|init|new|create|empty|allocate|get|alloc)_(empty_|kv_?)?(caches?|states?|past)$")
_SETUP = re.compile(r"^(setup|reset|clear|init|enable|start|empty)_(kv_?)?(caches?|states?|memory)$")
ONE_FOR_BOTH = "one cache for both, as generate makes it"  # self- and cross-attention
_SPLIT = (4, 3)  # the pieces of the trial
_MOST = 24  # ways tried


def ways_of(runner: Runner) -> tuple[Way, ...]:
    """How this model is handed what it saw before: the usual way first; empty where it has no cache.

    Of several ways that run, the first that gives what a whole forward gives; where none does, the first that runs. A
    model that takes no chunk of several tokens is tried token by token.
    """
    target = runner.target
    main = target.main
    free = main.length is None or main.length >= sum(_SPLIT)
    if main.part or main.heads is not None or main.kind not in ("tokens", "features") or not free:
        return ()
    if runner.replayed or any(s.follows == main.argument for s in target.streams):
        return ()
    trial = _Trial(runner)
    found = trial.best(_ways(runner))
    if not found:
        trial = _Trial(runner, by_token=True)
        found = trial.best(_ways(runner))
    if not found:
        return ()
    first = found[0]
    others = [way for make in _others(runner, first, trial.batch) for way in trial.best(iter([make]))]
    return (first, *others)


class _Trial:
    """Runs a short sequence whole and in two pieces, or the second token by token."""

    def __init__(self, runner: Runner, *, by_token: bool = False):
        self.runner, self.target = runner, runner.target
        lengths = {**lengths_for(self.target.streams), self.target.main.argument: sum(_SPLIT)}
        if self.target.main.length is not None:
            lengths[self.target.main.argument] = self.target.main.length
        later = lengths[self.target.main.argument] - _SPLIT[0]
        self.cuts = (_SPLIT[0], *((1,) * later if by_token else (later,)))
        self.batch = self.target.batch(2, lengths, dtype=runner.dtype)

    @cached_property
    def whole(self) -> Tensor:
        return self.runner.output(self.batch)

    def best(self, ways: Iterator[Way]) -> list[Way]:
        """The first way that equals the whole forward, else the first that runs; none where nothing runs."""
        running = []
        for way in itertools.islice(ways, _MOST):
            fed = self.run(way, self.batch)
            if fed is None or (way.inside and not self.remembers(way, fed)):
                continue
            whole = self.whole[..., fed.columns]
            if float((fed.output - whole).abs().amax()) <= 1e-5 * float(whole.abs().amax()):
                return [way]
            running.append(way)
        return running[:1]

    def run(self, way: Way, batch: Batch) -> Fed | None:
        try:
            fed = self.runner.fed(batch, Feed(way, "", self.cuts))
        except Exception:
            return None
        return fed if bool(torch.isfinite(fed.output).all()) else None

    def remembers(self, way: Way, fed: Fed) -> bool:
        """Whether another first piece moves the second."""
        main, changed = self.target.main, dict(self.batch.arguments)
        for position in range(self.cuts[0]):
            for sample in range(self.batch.samples):
                changed[main.argument] = main.change(changed[main.argument], sample, position, 1)
        other = self.run(way, dataclasses.replace(self.batch, arguments=changed))
        later = slice(self.cuts[0], None)
        return other is not None and not torch.equal(other.output[:, later], fed.output[:, later])


# -- candidates -----------------------------------------------------------------------------------------------------


def _ways(runner: Runner) -> Iterator[Way]:
    """What to try, the likeliest first."""
    target, model = runner.target, runner.model
    parameters = signature(model)
    names = plain_names(parameters)
    taken = {s.argument for s in target.streams} | {s.padding.argument for s in target.streams if s.padding}
    free = [n for n in names if n not in taken]
    flags = {n: True for n in free if _FLAG.match(n)}
    starts = [n for n in free if START.match(n)]
    caches = [n for n in free if CACHE.match(n) and not isinstance(parameters[n].default, bool)]
    flags.update({n: True for n in free if CACHE.match(n) and isinstance(parameters[n].default, bool)})
    positions = next((n for n in free if POSITIONS.match(n)), "")
    others = frozenset(s.argument for s in target.streams if s is not target.main)
    encode = _encoder_once(target)
    shapes: list[dict[str, Any]] = []
    for start, form in _starts(starts):
        for once in (frozenset(), others) if others and encode is None else (frozenset(),):
            shapes.append({"start": start, "start_form": form, "once": once, "positions": positions})
    if encode is not None:
        shapes = [{**s, "encode": encode} for s in shapes] + shapes
    for cache in caches:
        for shape, whole_mask in itertools.product(shapes, (True, False) if target.main.padding else (True,)):
            for arguments in [flags, {}] if flags else [{}]:
                base = Way(cache=cache, arguments=arguments, whole_mask=whole_mask, **shape)
                for empty in _empties(model, parameters[cache]):
                    yield from _with_reader(runner, dataclasses.replace(base, empty=empty))
    if isinstance(model, nn.Module) and (flags or starts):
        for shape, prepare in itertools.product(shapes, _preparations(model)):
            yield Way(arguments=flags, prepare=prepare, **shape)


def _starts(names: Sequence[str]) -> list[tuple[str, StartForm]]:
    forms: tuple[StartForm, ...] = ("number", "each", "tensor", "batch each")
    return [*((n, f) for n in names[:1] for f in forms), ("", "number")]


def _empties(model: Any, parameter: inspect.Parameter) -> Iterator[Callable[[Any, Batch], Any] | None]:
    """What may stand for an empty cache: nothing, what the model itself makes, a dict, a list."""
    if parameter.default is not inspect.Parameter.empty:
        yield None
    else:
        yield lambda model, batch: None
    for name in dir(model) if isinstance(model, nn.Module) else ():
        if _MAKER.match(name) and callable(getattr(type(model), name, None)):
            yield partial(_made, name)
    if not _is_pretrained(model):
        layers = max((len(m) for m in _lists(model)), default=1)
        yield lambda model, batch: {}
        yield lambda model, batch: []
        yield lambda model, batch: [None] * layers
        yield lambda model, batch: [{} for _ in range(layers)]


def _lists(model: Any) -> list[nn.ModuleList]:
    return [m for m in model.modules() if isinstance(m, nn.ModuleList)] if isinstance(model, nn.Module) else []


def _made(name: str, model: Any, batch: Batch) -> Any:
    return _called_with_sizes(getattr(model, name), batch)


def _called_with_sizes(method: Callable[..., Any], batch: Batch) -> Any:
    """A method called with what its parameters ask for: how many samples, how many positions."""
    length = 2 + max(batch.kept[s].shape[1] for s in batch.kept)
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        given[name] = batch.samples if re.search(r"batch|bsz|samples|^b$|^n$", name) else length
    return method(**given)


def _preparations(model: nn.Module) -> Iterator[Callable[[Any, Batch], None] | None]:
    """Nothing, or a method that sets up or resets the cache."""
    names = [n for n in dir(model) if _SETUP.match(n) and callable(getattr(type(model), n, None))]
    names.sort(key=lambda n: n.startswith(("reset", "clear", "empty")))
    for name in names:
        yield lambda model, batch, n=name: _called_with_sizes(getattr(model, n), batch)
    yield None


def _with_reader(runner: Runner, way: Way) -> Iterator[Way]:
    """The way with each place of the output from which the new cache may be read, or none where the one given changes."""
    parameters = runner.target
    lengths = lengths_for(parameters.streams)
    batch = parameters.batch(2, lengths, dtype=runner.dtype)
    try:
        held, output = runner.once(way, batch)
    except Exception:
        return
    places = list(_cache_places(output))
    for place in places:
        yield dataclasses.replace(way, returned=partial(_at, place))
    if way.empty is not None and _filled(way.empty(runner.model, batch), held):
        yield way


def _filled(before: Any, after: Any) -> bool:
    """Whether the object passed in holds more than it did."""
    return _weight(after) != _weight(before)


def _weight(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), float(torch.nan_to_num(value.detach().double()).abs().sum()))
    if isinstance(value, Mapping):
        return [(str(k), _weight(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [_weight(v) for v in value]
    if hasattr(value, "__dict__"):
        return _weight(vars(value))
    return value if isinstance(value, (int, float, str, bool)) else None


def _cache_places(output: Any) -> Iterator[str | int]:
    """Where in an output the new cache may stand."""
    if isinstance(output, Mapping):
        yield from (k for k, v in output.items() if CACHE.match(str(k)) and v is not None)
    elif isinstance(output, (tuple, list)):
        for index in range(len(output) - 1, 0, -1):
            if output[index] is not None:
                yield index
        names = getattr(output, "_fields", ())
        yield from (n for n in names if CACHE.match(n) and getattr(output, n) is not None)
    elif hasattr(output, "__dict__") and not isinstance(output, Tensor):
        yield from (k for k, v in vars(output).items() if CACHE.match(k) and v is not None)


def _at(place: str | int, output: Any) -> Any:
    return output[place] if isinstance(place, int) or isinstance(output, Mapping) else getattr(output, place)


# -- transformers ---------------------------------------------------------------------------------------------------


def _is_pretrained(model: Any) -> bool:
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def _encoder_once(target: Target) -> Callable[[Any, Batch], Mapping[str, Any]] | None:
    """For an encoder-decoder of transformers: its encoder run once, its input then left out."""
    if not _is_pretrained(target.model) or "encoder_outputs" not in signature(target.model):
        return None
    sources = [s for s in target.streams if s is not target.main]
    if len(sources) != 1:
        return None
    source = sources[0]

    def encode(model: Any, batch: Batch) -> Mapping[str, Any]:
        given = {source.argument: batch.arguments[source.argument]}
        if source.padding is not None and source.padding.argument in batch.arguments:
            given[source.padding.argument] = batch.arguments[source.padding.argument]
        return {"encoder_outputs": model.get_encoder()(**given, return_dict=True), source.argument: None}

    return encode


def _others(runner: Runner, way: Way, batch: Batch) -> Iterator[Way]:
    """Other caches of transformers: of fixed size where the model takes one, one that knows no window, and what generate makes."""
    model = runner.model
    if not _is_pretrained(model) or not way.cache or way.encode is not None:
        return
    from transformers import DynamicCache, StaticCache

    if getattr(model, "_can_compile_fullgraph", False):
        config = model.config.get_text_config(decoder=True)

        def fixed(model: Any, batch: Batch) -> Any:
            return StaticCache(config=config, max_cache_len=2 + max(k.shape[1] for k in batch.kept.values()))

        yield dataclasses.replace(way, name="static cache", empty=fixed)
        if field_of(config, "sliding_window"):
            yield dataclasses.replace(way, name="cache without a window", empty=lambda model, batch: DynamicCache())
    if generation(model, runner.target, way) is not None and not field_of(model.config, "is_encoder_decoder"):
        made = way.returned(runner.once(way, batch)[1]) if way.returned is not None else None
        if type(made).__name__ == "EncoderDecoderCache":  # generate makes such a one for encoder-decoders alone
            yield dataclasses.replace(way, name=ONE_FOR_BOTH, empty=lambda model, batch: DynamicCache())
