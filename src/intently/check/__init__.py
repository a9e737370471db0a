"""Check: promises × conditions from outside, then the sites, then names for what is broken, then proof by repair."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from intently._verbs import callable_module
from intently.check.naming import Selection
from intently.check.precision import parameters
from intently.check.run import Check, Progress
from intently.errors import CannotCheck
from intently.intent import Intent
from intently.report import Report
from intently.targets.target import Target

__all__ = ["check"]

SMALL = 5_000_000  # parameters


def check(
    target: Any,
    *,
    intent: Intent | None = None,
    inputs: Any = None,
    padding: str | None = None,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    dtype: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Try what an intent promises on a model, and name, locate and prove the faults that break it.

    Args:
        target: a `Target`, a module, or a function of q, k and v. The model itself is not changed: a copy runs.
        intent: what the attention is meant to do; left out, what the target says, else what is observed.
        inputs: an example call (tensor, tuple or dict) where the inputs cannot be found by trying.
        padding: the argument that carries the key mask, `"name"`, `"name:keep"` or `"name:hide"`.
        select, ignore: names of promises or faults to try, or to leave out.
        dtype: `"auto"` (float64 where the model runs in it), or a floating type's name.
        seed: seed of the inputs.
        progress: called with a phase in words, how many runs are done, and about how many there will be.

    Returns:
        A `Report`: verdict, grid of promise × condition, findings, sites.

    Raises:
        CannotCheck: no verdict is possible; the message says why and what to try.

    >>> import torch, intently
    >>> from intently import Intent, Mask
    >>> def attention(q, k, v):
    ...     return (q @ k.mT).softmax(-1) @ v
    >>> report = intently.check(attention, intent=Intent(Mask.full()))
    >>> [(f.fault, f.proof) for f in report.findings]
    [('scale-missing', 'proven')]
    """
    whole = target if isinstance(target, Target) else Target(target)
    given = {k: v for k, v in {"intent": intent, "inputs": inputs, "padding": padding}.items() if v is not None}
    whole = replace(whole, **given)
    with torch.random.fork_rng(devices=[]), _threads_for(whole):
        torch.manual_seed(seed)
        wanted = Selection(select, ignore)
        try:
            return Check(whole.ready(), wanted, dtype, seed, progress).report()
        except (CannotCheck, KeyboardInterrupt):
            raise
        except Exception as error:
            if not _from_model(error):
                raise
            said = str(error).splitlines()[0][:200] if str(error) else ""
            raise CannotCheck(
                f"{whole.label} raised during the check", cause=f"{type(error).__name__}: {said}".rstrip(": ")
            ) from error


def _from_model(error: BaseException) -> bool:
    """Whether the innermost frame is neither ours nor a function that we handed to torch."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = str(Path(__file__).parent.parent)
    return (
        bool(files)
        and not any(f.startswith(ours) for f in files[-1:])
        and any(not f.startswith((ours, str(Path(torch.__file__).parent))) for f in files[1:])
    )


@contextlib.contextmanager
def _threads_for(target: Target) -> Iterator[None]:
    """One thread for a small model: its operations are too short to be shared, and waiting threads cost more than they do."""
    before = torch.get_num_threads()
    if parameters(target) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


callable_module(__name__, "check")
