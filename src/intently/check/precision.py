"""In which precisions a target is run, with how many samples and positions, and how large its rounding is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from intently.errors import CannotCheck
from intently.promises import difference
from intently.targets.program import Program
from intently.targets.running import Runner
from intently.targets.signature import dtype_of, lengths_for
from intently.targets.target import Target

# A float64 copy of a model with more parameters than this may not fit beside the model itself.
MOST_PARAMETERS_IN_DOUBLE = 700_000_000
MOST_PARAMETERS_IN_HALF = 50_000_000
PRECISIONS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Setup:
    """Runners and sizes of one check: `runner` judges the promises, `others` (by the name of their dtype) only `finite`."""

    runner: Runner
    others: Mapping[str, Runner]
    samples: int
    lengths: Mapping[str, int]
    notes: tuple[str, ...]


def short(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def set_up(target: Target, dtype: str) -> Setup:
    """Choose precisions and sizes; raises `CannotCheck` when the model runs in none."""
    runner, others, notes = _runners(target, dtype)
    samples, lengths = _sizes(target, runner)
    return Setup(runner, others, samples, lengths, tuple(notes))


def _runners(target: Target, dtype: str) -> tuple[Runner, dict[str, Runner], list[str]]:
    own = dtype_of(target.model)
    if dtype not in ("auto", *PRECISIONS):
        raise CannotCheck(f"there is no precision {dtype!r}", hint=", ".join(("auto", *PRECISIONS)))
    if dtype != "auto":
        chosen = Runner(target, getattr(torch, dtype))
        _must_run(target, chosen)
        return chosen, {}, []
    if isinstance(target.model, Program):
        fixed = Runner(target)
        _must_run(target, fixed)
        return fixed, {}, [f"checked in {short(own)}, as the file computes, against its own noise floor"]
    size = parameters(target)
    plain = Runner(target, own if own in (torch.float32, torch.float64) else torch.float32)
    _must_run(target, plain)
    if size > MOST_PARAMETERS_IN_DOUBLE:
        note = (
            f"{size / 1e6:.0f}M parameters: checked in {short(plain.dtype)} against its own noise floor, not in float64"
        )
        return plain, {}, [note]
    double = Runner(target, torch.float64, like=plain)
    error = fails(target, double)
    if error is not None:
        return plain, {}, [f"the model does not run in float64 ({error}); checked in {short(plain.dtype)}"]
    others: dict[str, Runner] = {}
    if isinstance(target.model, nn.Module):
        others[short(plain.dtype)] = plain
        for half in (torch.bfloat16, torch.float16) if size < MOST_PARAMETERS_IN_HALF else ():
            runner = Runner(target, half, like=plain)
            if fails(target, runner) is None:
                others[short(half)] = runner
    return double, others, []


def parameters(target: Target) -> int:
    """How many parameters the model has."""
    if isinstance(target.model, Program):
        return target.model.parameters
    return sum(p.numel() for p in target.model.parameters()) if isinstance(target.model, nn.Module) else 0


def _must_run(target: Target, runner: Runner) -> None:
    error = fails(target, runner)
    if error is not None:
        raise CannotCheck(
            f"{target.label} raised on the inputs made for it", cause=error, hint="give inputs= an example call"
        )


def fails(target: Target, runner: Runner) -> str | None:
    """What the model raises on inputs made for it; None when it runs."""
    try:
        runner.output(target.batch(target.samples or 2, lengths_for(target.streams), dtype=runner.dtype))
    except CannotCheck:
        raise
    except Exception as error:
        said = str(error).splitlines()[0][:200] if str(error) else ""
        return f"{type(error).__name__}: {said}".rstrip(": ")
    return None


def _sizes(target: Target, runner: Runner) -> tuple[int, dict[str, int]]:
    """Numbers that differ from each other and from the numbers of heads and widths of the model."""
    lengths = lengths_for(target.streams)
    short_ones = [s for s in target.streams if s.positions(lengths[s.argument]) < 2]
    if short_ones:
        raise CannotCheck(
            f"the input {short_ones[0].argument} is one position long",
            cause="with one position there is nothing to see or to hide",
            hint="--length 7, or an example with at least two positions",
        )
    _, sites = runner.traced(target.batch(target.samples or 2, lengths, dtype=runner.dtype), keep=False)
    taken = {n for s in sites for n in (s.heads, s.kv_heads, s.head_dim, s.value_dim)}
    # Numbers of queries or keys that are the model's own: learned queries, windows.
    taken |= {n for s in sites for n in (s.queries, s.keys)} - set(lengths.values())
    samples = target.samples or next(n for n in (2, 3, 5, 4, 7) if n not in taken)
    for base in (7, 6, 9, 10, 5, 11):
        chosen = lengths_for(target.streams, base)
        free = {n for a, n in chosen.items() if target.stream(a).length is None}
        if not free & (taken | {samples}) and _runs_at(target, runner, samples, chosen):
            return samples, chosen
    return samples, lengths


def _runs_at(target: Target, runner: Runner, samples: int, lengths: Mapping[str, int]) -> bool:
    try:
        runner.output(target.batch(samples, lengths, dtype=runner.dtype))
    except Exception:
        return False
    return True


def noise_floor(target: Target, runner: Runner, samples: int, lengths: Mapping[str, int], seed: int) -> float:
    """Rounding of this model, relative to its largest output: how far a change of its weights by some ulps moves it."""
    eps = runner.resolution
    batch = target.batch(samples, lengths, seed=seed, dtype=runner.dtype)
    base = runner.output(batch)
    least = 64 * eps
    finite = base[torch.isfinite(base)]
    if not finite.numel() or not float(finite.abs().amax()):
        return least
    moved = runner.shaken(batch, 4 * eps, seed)
    if moved is None:
        return least
    gap = torch.nan_to_num(difference(moved, base), posinf=0.0)
    # A router that flips at a tie moves far more than rounding does; the floor is not raised to hide that much.
    return min(max(least, 8 * float(gap.amax()) / float(finite.abs().amax())), 1e5 * eps)
