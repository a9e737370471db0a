"""Attaches to each stream the argument that carries its key mask: which argument, in which form, and what a true entry means."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from intently.errors import CannotCheck
from intently.targets.signature import (
    HIDE,
    KEEP,
    LENGTHS,
    MASK_WORDS,
    MASKLIKE,
    TARGET_SIDE,
    dtype_of,
    form_of_telling,
    lengths_for,
    looks_like_qkv,
    plain_names,
    signature,
)
from intently.targets.stream import MaskForm, Padding, Stream
from intently.targets.target import Target, call, output_form


def with_padding(target: Target) -> Target:
    """Attach to each stream the argument that carries its key mask, in a form that the model takes."""
    streams = list(target.streams)
    for argument, keep in _padding_arguments(target):
        where = stream_of_mask(argument, streams)
        held = streams[where].padding if where is not None else None
        # A mask that the model cannot do without is there already; only what it means may be open.
        if where is None or (held is not None and (held.argument != argument or held.keep is not None)):
            continue
        fitted = _fit_mask(target, streams, where, argument, keep)
        if fitted is not None:
            streams[where] = dataclasses.replace(streams[where], padding=fitted)
        elif target.padding:
            raise CannotCheck(
                f"{target.label} raised for every form of the key mask tried for {argument}",
                hint="pass bool or 0/1 [batch, length], or name another argument with --padding",
            )
    return dataclasses.replace(target, streams=tuple(streams))


def _padding_arguments(target: Target) -> list[tuple[str, bool | None]]:
    names = plain_names(signature(target.model))
    if target.padding:
        argument, _, said = target.padding.partition(":")
        if argument not in names and not any(p.kind is p.VAR_KEYWORD for p in signature(target.model).values()):
            raise CannotCheck(
                f"--padding names {argument!r}, which {target.label} does not take",
                cause=f"it takes {', '.join(names)}",
            )
        keep = {"keep": True, "hide": False}.get(said)
        if keep is None:
            keep = True if KEEP.match(argument) else False if HIDE.match(argument) else None
        return [(argument, keep)]
    found: list[tuple[str, bool | None]] = []
    taken = {s.argument for s in target.streams}
    for name in names:
        if name in taken or name in target.constants or form_of_telling(name) is not None:
            continue
        owner = next((n for n in names if n != name and name.startswith(f"{n}_")), None)
        if owner is not None and owner not in taken:
            continue  # the mask of an optional argument that is not passed
        if KEEP.match(name):
            found.append((name, True))
        elif HIDE.match(name):
            found.append((name, False))
        elif LENGTHS.match(name):
            found.append((name, True))
        elif MASKLIKE.search(name) and "causal" not in name and "head" not in name:
            found.append((name, None))
    # a name that says what it means comes before one that does not
    return sorted(found, key=lambda item: (item[1] is None, item[0] in ("attn_mask",)))


def stream_of_mask(argument: str, streams: Sequence[Stream]) -> int | None:
    if len(streams) == 1:
        return 0
    names = [s.argument for s in streams]
    if looks_like_qkv(names):
        return 1
    stem = MASK_WORDS.sub("", argument).strip("_")
    named = [i for i, n in enumerate(names) if stem and (n == stem or n.split("_")[0] == stem.split("_")[0])]
    if len(named) == 1:
        return named[0]
    on_target = bool(TARGET_SIDE.search(argument))
    sides = [bool(TARGET_SIDE.search(n)) for n in names]
    if True not in sides:
        sides = [False] * (len(names) - 1) + [True]
    if on_target:
        return sides.index(True)
    return sides.index(False) if False in sides else 0


def _fit_mask(
    target: Target, streams: Sequence[Stream], where: int, argument: str, keep: bool | None
) -> Padding | None:
    optional = signature(target.model).get(argument)
    is_optional = optional is None or optional.default is not inspect.Parameter.empty
    forms: tuple[MaskForm, ...] = (
        ("lengths",) if LENGTHS.match(argument) else ("batch key", "batch 1 1 key", "batch 1 key", "batch query key")
    )
    dtypes = (
        (torch.long,)
        if forms == ("lengths",)
        else (torch.bool, torch.long, torch.float32)
        if keep is False
        else (torch.long, torch.bool, torch.float32)
    )
    working: list[Padding] = []
    for form in forms:
        for dtype in dtypes:
            padding = Padding(argument, keep, dtype, form, is_optional)
            if _runs_with(target, streams, where, padding):
                if keep is not None:
                    return padding
                working.append(padding)
    for padding in working:
        for polarity in (True, False):
            candidate = dataclasses.replace(padding, keep=polarity, observed=True)
            if _hides(target, streams, where, candidate):
                return candidate
    if working:
        # No form hides anything: assume the commoner meaning; the check will say what it sees.
        boolean = next((p for p in working if p.dtype == torch.bool), working[0])
        return dataclasses.replace(boolean, keep=True, observed=True)
    return None


def _masked(
    target: Target, streams: Sequence[Stream], where: int, padding: Padding
) -> tuple[Target, dict[str, int], dict[str, Tensor]]:
    changed = list(streams)
    changed[where] = dataclasses.replace(streams[where], padding=padding)
    trial = dataclasses.replace(target, streams=tuple(changed))
    lengths = lengths_for(changed)
    positions = changed[where].positions(lengths[changed[where].argument])
    kept = torch.ones(target.samples or 2, positions, dtype=torch.bool)
    kept[0, -2:] = False
    return trial, lengths, {changed[where].argument: kept}


def _runs_with(target: Target, streams: Sequence[Stream], where: int, padding: Padding) -> bool:
    trial, lengths, kept = _masked(target, streams, where, padding)
    try:
        batch = trial.batch(target.samples or 2, lengths, dtype=dtype_of(target.model), kept=kept)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(target.model, batch.arguments)
    except Exception:
        return False
    return True


def _hides(target: Target, streams: Sequence[Stream], where: int, padding: Padding) -> bool:
    """Whether, under this meaning, a change of a hidden position moves no real output and a change of a kept one does."""
    trial, lengths, kept = _masked(target, streams, where, padding)
    dtype = dtype_of(target.model)
    stream = trial.streams[where]
    batch = trial.batch(target.samples or 2, lengths, dtype=dtype, kept=kept)

    def run(position: int | None) -> Tensor:
        arguments = dict(batch.arguments)
        if position is not None:
            arguments[stream.argument] = stream.change(arguments[stream.argument], 0, position, 1)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = call(target.model, arguments)
        return output_form(
            output, target.samples or 2, lengths[trial.main.argument if trial.output else stream.argument]
        ).read(output)[0]

    try:
        base = run(None)
        last = kept[stream.argument].shape[1] - 1
        real = slice(0, last - 1) if base.shape[0] == last + 1 else slice(None)
        hidden = (run(last) - base)[real].abs().amax()
        shown = (run(0) - base)[real].abs().amax()
    except Exception:
        return False
    scale = base[real].abs().amax().clamp_min(1e-12)
    return bool(hidden <= 1e-6 * scale) and bool(shown > 1e-6 * scale)
