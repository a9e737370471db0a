"""The module at which a model fed in pieces parts from its whole forward: inputs alike, outputs not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from intently.faults.recording import Channel, gap, hooked, swapped, tensors_held
from intently.promises import Condition, Trial
from intently.promises.cache_equal import gaps, noise
from intently.targets.target import tensors_of

_MOST = 12
_LEAST = 1e-11  # a relative difference below this is rounding

Calls = dict[int, list[tuple[list[Tensor], list[Tensor]]]]  # module → inputs and outputs of its calls


def parted(trial: Trial, condition: Condition) -> tuple[list[Channel], bool]:
    """Modules that give another output for the same input when fed in pieces; and whether holding them restores the promise."""
    root, feed = trial.runner.model, condition.feed
    if not isinstance(root, nn.Module) or feed is None or not feed.cuts:
        return [], False
    names = {id(m): n or "(root)" for n, m in root.named_modules()}
    guarded = trial.real_rows(condition, sum(feed.cuts))
    tolerance = max(noise(trial, condition) / float(trial.whole(condition).abs().amax().clamp_min(1e-30)), _LEAST)
    whole: Calls = {}
    with hooked(root, _recorder(whole)):
        trial.feed(condition.whole)
    channels: list[Channel] = []
    for _ in range(_MOST):
        fed: Calls = {}
        with hooked(root, _recorder(fed, {id(c.module): whole[id(c.module)] for c in channels}, feed.cuts)):
            output = trial.feed(condition)
        if float(gaps(trial, condition, output).amax()) <= noise(trial, condition):
            return channels, True
        found = _first(whole, fed, feed.cuts, guarded, {id(c.module) for c in channels}, tolerance)
        if found is None or found[0] not in names:
            return channels, False
        module = next(m for m in root.modules() if id(m) == found[0])
        channels.append(Channel(module, names[found[0]], found[1]))
    return channels, False


def _recorder(calls: Calls, held: Calls | None = None, cuts: Sequence[int] = ()) -> Any:
    """A hook that notes what modules read and gave; outputs of held modules are taken from the whole forward."""

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        mine = calls.setdefault(id(module), [])
        theirs = (held or {}).get(id(module))
        if theirs is not None:
            output = _held(output, theirs, len(mine), cuts)
        inputs = [t.detach() for t in tensors_held([args, kwargs])]
        mine.append((inputs, [t.detach() for t in tensors_of(output)]))
        return output

    return hook


def _held(output: Any, whole: list[tuple[list[Tensor], list[Tensor]]], number: int, cuts: Sequence[int]) -> Any:
    """A piece's output with its tensors cut out of those of the whole forward."""
    piece, call = divmod(number, len(whole))
    swaps = {}
    for mine, theirs in zip(tensors_of(output), whole[call][1], strict=False):
        axis = _axis(theirs, mine, sum(cuts), cuts[piece]) if piece < len(cuts) else None
        if axis is not None:
            swaps[id(mine)] = theirs.narrow(axis, sum(cuts[:piece]), cuts[piece]).to(mine.dtype)
    return swapped(output, swaps)


def _axis(whole: Tensor, piece: Tensor, length: int, count: int) -> int | None:
    """The axis along which one tensor is a piece of another."""
    if whole.dim() != piece.dim():
        return None
    fits = [a for a in range(whole.dim()) if whole.shape[a] == length and piece.shape[a] == count]
    return next(
        (a for a in fits if [*whole.shape[:a], *whole.shape[a + 1 :]] == [*piece.shape[:a], *piece.shape[a + 1 :]]),
        None,
    )


def _joined(
    whole: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]], cuts: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of the whole forward beside those of the pieces put together; what is no sequence of positions is left out."""
    for index, tensor in enumerate(whole):
        parts = [p[index] for p in pieces if index < len(p)]
        axes = {_axis(tensor, part, sum(cuts), n) for part, n in zip(parts, cuts, strict=False)}
        if len(parts) == len(cuts) and len(axes) == 1 and (axis := axes.pop()) is not None:
            yield tensor, torch.cat(list(parts), axis)


def _first(
    whole: Calls, fed: Calls, cuts: Sequence[int], guarded: Tensor, held: set[int], tolerance: float
) -> tuple[int, float] | None:
    """The module that parts first: modules are listed in the order in which their first calls end."""
    for module, calls in whole.items():
        pieces = fed.get(module, [])
        if module in held or len(pieces) != len(calls) * len(cuts):
            continue
        for number, (inputs, outputs) in enumerate(calls):
            mine = pieces[number :: len(calls)]
            read = list(_joined(inputs, [p[0] for p in mine], cuts))
            given = list(_joined(outputs, [p[1] for p in mine], cuts))
            if not given or _apart(read, guarded) > tolerance:
                continue
            moved = _apart(given, guarded)
            if moved > tolerance:
                return module, moved
    return None


def _apart(pairs: Sequence[tuple[Tensor, Tensor]], guarded: Tensor) -> float:
    """Largest relative difference; of tensors without a batch axis (tables of angles) every position counts."""
    if not pairs:
        return 0.0
    worst = gap([a for a, _ in pairs], [b for _, b in pairs], guarded)
    for a, b in pairs:
        if guarded.shape[0] not in a.shape[:2]:
            size = float(a.double().abs().amax().clamp_min(1e-30))
            worst = max(worst, float((a.double() - b.double()).abs().amax()) / size)
    return worst
