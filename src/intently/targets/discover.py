"""Finds out what a model eats: by its signature, by the sizes of its parameters, and by trying."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from intently.errors import CannotCheck
from intently.sites import sequence_first
from intently.targets.compiled import NOTE, is_compiled
from intently.targets.copying import copied
from intently.targets.key_masks import stream_of_mask, with_padding
from intently.targets.lookup_watch import LookupWatch
from intently.targets.packing import needed_tellings, stated_length, with_tellings
from intently.targets.signature import (
    CACHE,
    HIDE,
    KEEP,
    LENGTHS,
    SIDE,
    START,
    TARGET_SIDE,
    dtype_of,
    form_of_telling,
    is_mask,
    lengths_for,
    looks_like_qkv,
    plain_names,
    signature,
)
from intently.targets.stream import Padding, Stream
from intently.targets.switches import switches_of
from intently.targets.target import Target, call, tensors_of
from intently.targets.towers import with_towers

_STREAMLIKE = (
    "input_ids", "ids", "tokens", "token_ids", "idx", "x", "input", "inputs", "src", "source", "hidden_states", "features", "pixel_values",
    "images", "image", "inputs_embeds", "input_values", "input_features", "query", "q",
)  # fmt: skip
_LENGTH_TRIED = (7, 6, 8, 5, 9, 10, 12, 16)


def discover(target: Target) -> Target:
    """The target with its streams and switches; raises `CannotCheck` with what was tried when nothing runs."""
    target = _without_pipeline(target)
    model = target.model
    if type(model).__name__ == "ExportedProgram" and type(model).__module__.startswith("torch."):
        from intently.targets import exported

        return exported.discovered(target)
    if isinstance(model, nn.Module):
        _refuse_unusable(model)
    if _is_pretrained(target):
        from intently.targets import huggingface

        with contextlib.suppress(CannotCheck):  # someone's own class may read what only trying finds
            return huggingface.completed(target)
    # What is tried must not touch the user's model: statistics of a batch norm would move, in train mode.
    probe = dataclasses.replace(
        target, model=private(model), tellings=needed_tellings(target), length=target.length or stated_length(target)
    )
    found = with_padding(_from_example(probe) if target.inputs is not None else _by_trying(probe))
    found = with_tellings(with_towers(found))
    found = dataclasses.replace(found, model=model)
    notes = (*found.notes, NOTE) if is_compiled(model) else found.notes
    return dataclasses.replace(found, switches=(*found.switches, *switches_of(model, found)), notes=notes)


def _without_pipeline(target: Target) -> Target:
    """The model of a transformers pipeline, with a note about how its tokenizer pads; any other target as it is."""
    module = sys.modules.get("transformers.pipelines")
    if module is None or not isinstance(target.model, module.Pipeline):
        return target
    side = getattr(target.model.tokenizer, "padding_side", None)
    notes = (f"the model of a pipeline was checked; its tokenizer pads on the {side}",) if side else ()
    name = target.name or type(target.model.model).__name__
    return dataclasses.replace(target, model=target.model.model, name=name, notes=(*target.notes, *notes))


def private(model: Any) -> Any:
    """A copy of a module in eval mode on the CPU, where inputs are made; the thing itself where it cannot be copied."""
    if not isinstance(model, nn.Module):
        return model
    try:
        return copied(model).eval().cpu()
    except Exception:
        return model


def _is_pretrained(target: Target) -> bool:
    """Whether the model is one of transformers, about whose inputs nothing is said."""
    module = sys.modules.get("transformers.modeling_utils")
    said = (target.inputs, target.tokens, target.features, target.padding)
    return module is not None and isinstance(target.model, module.PreTrainedModel) and all(s is None for s in said)


def _refuse_unusable(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    meta = [n for n, t in tensors if t.device.type == "meta"]
    if meta:
        raise CannotCheck(
            f"the model's {len(meta)} parameters are on the meta device and hold no numbers ({meta[0]}, …)",
            hint="give it weights first: model.to_empty(device='cpu') and then its initialisation",
        )
    broken = [
        n
        for n, t in tensors
        if t.is_floating_point() and not bool(torch.isfinite(t).all()) and not bool(torch.isinf(t).all())
    ]
    broken = [n for n in broken if bool(torch.isnan(dict(tensors)[n]).any())]
    if broken:
        raise CannotCheck(
            f"{len(broken)} of the model's tensors hold NaN, the first is {broken[0]}",
            cause="every output would be NaN whatever the attention does",
            hint="load or initialise the weights before the check",
        )


def _stream_names(model: Any) -> list[str]:
    """The arguments that carry content: the required ones, or the first that sounds like content."""
    parameters = signature(model)
    names = plain_names(parameters)
    names = [n for n in names if form_of_telling(n) is None] or names
    required = [n for n in names if parameters[n].default is inspect.Parameter.empty and not is_mask(n)]
    if required:
        return required
    if not names:
        # forward(*args): one input by position
        star = [n for n, p in parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL]
        return star[:1] or ["input"]
    liked = [n for n in _STREAMLIKE if n in names]
    first = liked[0] if liked else next((n for n in names if not is_mask(n)), names[0])
    decoder = [n for n in ("decoder_input_ids", "tgt", "decoder_inputs") if n in names and n != first]
    return [first, *decoder[:1]]


def _beginnings(model: Any) -> dict[str, Any]:
    """What a model cannot do without and a first call gives: a beginning at 0, no cache yet."""
    parameters = signature(model)
    needed = [n for n in plain_names(parameters) if parameters[n].default is inspect.Parameter.empty]
    return {n: 0 if START.match(n) else None for n in needed[1:] if START.match(n) or CACHE.match(n)}


# -- by trying ------------------------------------------------------------------------------------------------------


def _by_trying(target: Target) -> Target:
    target = dataclasses.replace(target, constants={**_beginnings(target.model), **target.constants})
    names = [n for n in _stream_names(target.model) if n not in target.constants]
    if looks_like_qkv(names):
        return _function_of_qkv(target, names[:3])
    if len(names) > 3:
        raise CannotCheck(
            f"{target.label} needs {len(names)} arguments ({', '.join(names)}) and it is not clear what they hold",
            hint="give an example call: Target(model, inputs={'" + names[0] + "': …})",
        )
    first_error: Exception | None = None
    for chosen in _name_sets(target.model, names):
        for bare in itertools.islice(_candidates(target, chosen), 400):
            streams, error = _first_running(target, bare)
            if error is None:
                streams = tuple(_with_vocabulary(target, s, streams) for s in streams)
                found = dataclasses.replace(target, streams=streams, output=_output_stream(streams))
                return _with_optional_memory(found, names)
            first_error = _more_telling(first_error, error)
    raise _cannot_feed(target, names, first_error)


_MEMORY = re.compile(
    r"^(memory|context|cond|condition|conditioning|encoder_(hidden_states|output|out|states)|enc_out)$"
)
_MOST_WIDTHS = 8


def _with_optional_memory(target: Target, needed: Sequence[str]) -> Target:
    """The target without optional streams that move nothing, and with an optional memory that is read when it is given."""
    streams = target.streams
    for stream in streams if len(streams) > 1 else ():
        fewer = tuple(s for s in target.streams if s is not stream)
        without = dataclasses.replace(target, streams=fewer, output=_output_stream(fewer)) if fewer else target
        if stream.argument not in needed and not moves(target, stream.argument) and attempt(without, fewer) is None:
            target = without
    taken = {s.argument for s in target.streams}
    parameters = signature(target.model)
    names = [n for n in plain_names(parameters) if _MEMORY.match(n) and n not in taken and n not in target.constants]
    widths = [target.features] if target.features else _widths_in(target.model)[:_MOST_WIDTHS]
    for name in names if not any(SIDE.search(t) for t in taken) else ():
        for width in widths:
            memory = Stream(name, "features", width=width, sequence_first=sequence_first(target.model))
            wider = dataclasses.replace(target, streams=(*target.streams, memory), output=target.main.argument)
            if attempt(wider, wider.streams) is None:
                target = wider if moves(wider, name) else target
                break
    return target


def _first_running(target: Target, bare: tuple[Stream, ...]) -> tuple[tuple[Stream, ...], Exception | None]:
    """The streams with the masks that the model cannot do without, in the first form that runs."""
    parameters = signature(target.model)
    needed = [
        n
        for n in plain_names(parameters)
        if parameters[n].default is inspect.Parameter.empty and is_mask(n) and form_of_telling(n) is None
    ]
    if not needed:
        return bare, attempt(target, bare)
    error: Exception | None = None
    for form, dtype in (
        ("batch key", torch.bool),
        ("batch key", torch.long),
        ("batch 1 1 key", torch.bool),
        ("batch 1 key", torch.bool),
    ):
        streams = list(bare)
        for name in needed:
            where = stream_of_mask(name, streams)
            if where is not None:
                lengths = bool(LENGTHS.match(name))
                keep = True if KEEP.match(name) else False if HIDE.match(name) else None
                given = Padding(name, keep, torch.long if lengths else dtype, "lengths" if lengths else form, False)  # type: ignore[arg-type]
                streams[where] = dataclasses.replace(streams[where], padding=given)
        new = attempt(target, streams)
        if new is None:
            return tuple(streams), None
        error = error or new
    return bare, error


def _name_sets(model: Any, names: Sequence[str]) -> Iterator[list[str]]:
    """The arguments to fill: the needed ones, then with an optional one that sounds like a second stream."""
    yield list(names)
    optional = [n for n in plain_names(signature(model)) if n not in names and not is_mask(n)]
    for name in optional:
        sounds = TARGET_SIDE.search(name) or SIDE.search(name)
        if len(names) < 3 and sounds and not re.search("past|position|outputs|embeds|cache", name):
            yield [*names, name]


def _more_telling(first: Exception | None, new: Exception) -> Exception:
    """An error of the model's own making says more than a shape that does not fit."""
    mismatched = (
        "mat1 and mat2",
        "expected",
        "normalized_shape",
        "must match",
        "embedding",
        "index",
        "not implemented for",
        "dtype",
        "same dtype",
    )
    if first is None or (any(m in str(first) for m in mismatched) and not any(m in str(new) for m in mismatched)):
        return new
    return first


def _cannot_feed(target: Target, names: Sequence[str], error: Exception | None) -> CannotCheck:
    said = (
        f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".strip(": ")
        if error
        else "nothing fitted"
    )
    return CannotCheck(
        f"{target.label} raised on every input tried for {', '.join(names)}",
        cause=said[:300],
        hint="say what it eats: --tokens VOCAB, --features WIDTH, --length N, or give inputs= an example call",
    )


def _candidates(target: Target, names: Sequence[str]) -> Iterator[tuple[Stream, ...]]:
    model = target.model
    lengths: list[int | None] = [target.length] if target.length else [None, *_lengths_in(model)]
    options = []
    for name in names:
        kinds: list[Stream] = []
        if target.features is None:
            kinds += [Stream(name, "tokens", vocab=target.tokens or 2)]
        if target.tokens is None:
            widths = [target.features] if target.features else _widths_in(model)
            kinds += [Stream(name, "features", width=w, sequence_first=sequence_first(model)) for w in widths]
            if target.features is None:
                kinds += list(_pictures(model, name))
        options.append(kinds)
    for length in lengths:
        for streams in _products(options):
            yield tuple(dataclasses.replace(s, length=length) for s in streams)


def _products(options: Sequence[Sequence[Stream]]) -> Iterator[tuple[Stream, ...]]:
    """Combinations of one option a stream, equal kinds first."""
    if len(options) == 1:
        for stream in options[0]:
            yield (stream,)
        return
    first, rest = options[0], options[1:]
    combined = [(s, *others) for s in first for others in _products(rest)]
    combined.sort(key=lambda streams: len({(s.kind, s.width) for s in streams}))
    yield from combined


def _widths_in(model: Any) -> list[int]:
    """Widths that an input may have, in the order in which the model's layers are made."""
    if not isinstance(model, nn.Module):
        return [16, 32, 64]
    widths: list[int] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            widths.append(module.in_features)
        elif isinstance(module, nn.LayerNorm):
            widths.append(int(module.normalized_shape[-1]))
        elif isinstance(module, nn.MultiheadAttention):
            widths.append(module.embed_dim)
        elif isinstance(module, (nn.RNNBase,)):
            widths.append(module.input_size)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            widths += [int(parameter.shape[-1]), int(parameter.shape[-2])]
        elif parameter.dim() == 1:
            widths.append(int(parameter.shape[0]))
    return list(dict.fromkeys(w for w in widths if w > 1))[:24]


def _lengths_in(model: Any) -> list[int]:
    """Lengths that may be fixed by a parameter or buffer (a learned position table, a stored triangle)."""
    lengths: list[int] = []
    for attribute in (
        "max_len",
        "seq_len",
        "block_size",
        "max_length",
        "n_ctx",
        "context_length",
        "num_tokens",
        "length",
    ):
        for module in model.modules() if isinstance(model, nn.Module) else []:
            value = getattr(module, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool) and 1 < value <= 512:
                lengths.append(value)
    if isinstance(model, nn.Module):
        for tensor in [*model.parameters(), *model.buffers()]:
            lengths += [int(n) + step for n in tensor.shape for step in (0, -1) if 2 < n + step <= 128]
    return list(dict.fromkeys([*lengths, *_LENGTH_TRIED]))[:24]


def _pictures(model: Any, name: str) -> Iterator[Stream]:
    if not isinstance(model, nn.Module):
        return
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            patch = module.stride[0] if module.stride[0] > 1 else 1
            sides: list[int] = [
                getattr(m, a)
                for m in model.modules()
                for a in ("image_size", "img_size")
                if isinstance(getattr(m, a, None), int)
            ]
            sides += [8] if patch == 1 else []  # large enough for a network that halves it twice
            sides += [4 * patch, 2 * patch, 8 * patch, 8, 16, 32, 224]
            for side in dict.fromkeys(sides):
                yield Stream(
                    name,
                    "pixels",
                    width=module.in_channels,
                    patch=max(patch, side // 8 if patch == 1 else 1),
                    side=(side, side),
                )
            return
        if isinstance(module, nn.Conv1d):
            yield Stream(name, "frames", width=module.in_channels, stride=module.stride[0])
            return


def attempt(
    target: Target, streams: Sequence[Stream], *, samples: int = 2, lengths: Mapping[str, int] | None = None
) -> Exception | None:
    """None when the model runs on random content for these streams, else what it raised."""
    trial = dataclasses.replace(target, streams=tuple(streams))
    dtype = dtype_of(target.model)
    try:
        batch = trial.batch(samples, lengths or lengths_for(streams), dtype=dtype)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(target.model, batch.arguments)
    except CannotCheck:
        raise
    except Exception as error:
        return error
    return None


def moves(target: Target, argument: str) -> bool:
    """Whether other content of a stream moves the output, everything else, chance included, being the same."""
    lengths, dtype = lengths_for(target.streams), dtype_of(target.model)
    batch = target.batch(2, lengths, dtype=dtype)
    other = target.batch(2, lengths, seed=1, dtype=dtype).arguments[argument]
    outputs = []
    for arguments in (batch.arguments, {**batch.arguments, argument: other}):
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            outputs.append(list(tensors_of(call(target.model, arguments))))
    return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*outputs, strict=False))


def _output_stream(streams: Sequence[Stream]) -> str:
    decoder = [s for s in streams if TARGET_SIDE.search(s.argument)]
    if decoder:
        return decoder[0].argument
    sources = [s for s in streams if SIDE.search(s.argument)]
    others = [s for s in streams if s not in sources]
    if sources and others:
        return others[0].argument
    # forward(source, target) is torch's order; forward(x, memory) names its memory
    return streams[-1].argument


def _with_vocabulary(target: Target, stream: Stream, streams: Sequence[Stream]) -> Stream:
    """Replace the cautious vocabulary of 2 by the size of the table that the ids really index."""
    if stream.kind != "tokens" or target.tokens is not None:
        return stream
    trial = dataclasses.replace(target, streams=tuple(streams))
    batch = trial.batch(2, lengths_for(streams), dtype=dtype_of(target.model))
    watch = LookupWatch(batch.arguments[stream.argument].reshape(-1))
    with torch.no_grad(), warnings.catch_warnings(), watch:
        warnings.simplefilter("ignore")
        call(target.model, batch.arguments)
    vocab = min(watch.rows, default=2)
    special = _special_ids(target.model)
    # Id 0 is the pad in many vocabularies; plain content does without it.
    return dataclasses.replace(stream, vocab=vocab, avoid=frozenset({0, *special}) if vocab > 4 else frozenset())


def _special_ids(model: Any) -> set[int]:
    found: set[int] = set()
    for module in model.modules() if isinstance(model, nn.Module) else []:
        for name in (
            "padding_idx",
            "pad_id",
            "pad_token_id",
            "pad_idx",
            "pad",
            "eos_token_id",
            "bos_token_id",
            "mask_token_id",
        ):
            value = getattr(module, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                found.add(value)
    return found


# -- plain functions of q, k, v -------------------------------------------------------------------------------------


def _function_of_qkv(target: Target, names: Sequence[str]) -> Target:
    """q, k and v: `[batch, heads, length, width]`, else `[batch, length, width]`.

    Queries and keys differ in number where no order of positions is meant and the function runs that way.
    """
    module = isinstance(target.model, nn.Module)
    widths = [target.features] if target.features else _widths_in(target.model) if module else [8, 16, 32, 64]
    ordered = target.intent is None or target.intent.is_causal is not False
    first: Exception | None = None
    for together in (True,) if ordered else (False, True):
        for width in widths:
            for heads in (0, 3) if module else (3, 0):
                streams = _qkv_streams(target, names, width, heads, together=together)
                error = attempt(target, streams)
                if error is None:
                    return dataclasses.replace(target, streams=streams, output=names[0])
                first = first or error
    raise _cannot_feed(target, names, first)


def _qkv_streams(target: Target, names: Sequence[str], width: int, heads: int, *, together: bool) -> tuple[Stream, ...]:
    query, key, value = names
    turned = isinstance(target.model, nn.MultiheadAttention) and not target.model.batch_first
    common = Stream(
        key,
        "features",
        width=width,
        heads=None if turned else heads,
        length=target.length,
        sequence_first=turned,
        part="key",
    )
    return (
        dataclasses.replace(common, argument=query, part="query", follows=key if together else None),
        common,
        dataclasses.replace(common, argument=value, part="value", follows=key),
    )


# -- from an example ------------------------------------------------------------------------------------------------


def _from_example(target: Target) -> Target:
    """Streams read off an example call: ids and vectors keep their kind, everything else is passed on as it is."""
    given = target.inputs
    names = plain_names(signature(target.model))
    if isinstance(given, Tensor):
        given = {names[0] if names else "input": given}
    elif isinstance(given, (tuple, list)):
        given = dict(zip(names, given, strict=False))
    if not isinstance(given, Mapping) or not given:
        raise CannotCheck(
            f"inputs= is a {type(target.inputs).__name__}",
            hint="give a tensor, a tuple or a dict of the call's arguments",
        )
    streams: list[Stream] = []
    constants: dict[str, Any] = {}
    for name, value in given.items():
        if form_of_telling(name) is not None:
            continue  # told apart from content, and in the form that the model takes
        if (
            not isinstance(value, Tensor)
            or (is_mask(name) and value.dim() <= 2)
            or value.dtype == torch.bool
            or value.dim() < 2
        ):
            if not (isinstance(value, Tensor) and is_mask(name)):
                constants[name] = value
        elif not value.is_floating_point() and value.dim() == 2:
            vocab = target.tokens or int(value.max()) + 1
            streams.append(Stream(name, "tokens", vocab=max(vocab, 2)))
        elif value.is_floating_point() and value.dim() == 3:
            streams.append(Stream(name, "features", width=value.shape[-1], sequence_first=sequence_first(target.model)))
        elif value.is_floating_point() and value.dim() == 4 and looks_like_qkv([name, "k", "v"]):
            streams.append(Stream(name, "features", width=value.shape[-1], heads=value.shape[1]))
        elif value.is_floating_point() and value.dim() == 4:
            streams.append(
                Stream(
                    name,
                    "pixels",
                    width=value.shape[1],
                    patch=max(1, value.shape[2] // 4),
                    side=(value.shape[2], value.shape[3]),
                )
            )
        else:
            constants[name] = value
    if not streams:
        raise CannotCheck(
            "no argument of inputs= holds ids or vectors along a sequence",
            hint="give integer [batch, length] or float [batch, length, width]",
        )
    trial = dataclasses.replace(target, streams=tuple(streams), constants=constants)
    if attempt(trial, streams) is not None:
        fixed = [
            dataclasses.replace(s, length=given[s.argument].shape[0 if s.sequence_first else 1])
            if s.kind in ("tokens", "features")
            else s
            for s in streams
        ]
        error = attempt(trial, fixed)
        if error is not None:
            raise _cannot_feed(target, [s.argument for s in streams], error)
        streams = fixed
    streams = [_with_vocabulary(trial, s, streams) if s.kind == "tokens" else s for s in streams]
    names = [s.argument for s in streams]
    return dataclasses.replace(
        trial,
        streams=tuple(streams),
        output=names[0] if len(names) == 1 or looks_like_qkv(names) else _output_stream(streams),
    )
