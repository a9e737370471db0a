"""Which backend computes a call, and why: the fused kernel where it can, blocks where most is hidden or memory is short."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple, get_args

from torch import Tensor

from intently.masks import Mask
from intently.mechanism.backends.blocked import BLOCK, by_blocks, reach
from intently.mechanism.backends.flex import by_flex, flex_obstacle
from intently.mechanism.backends.fused import by_fused, fused_obstacle, widened
from intently.mechanism.backends.stages import by_stages
from intently.mechanism.door import Inputs
from intently.mechanism.options import Backend, Name
from intently.mechanism.oracle import by_math, by_oracle

LONG = 2**20
"""Pairs of query and key, 1024 × 1024, from which cutting the work up is worth its calls."""

SEEN = 0.7
"""With at most this share of the pairs within reach, blocks are faster than the whole."""

PLANES = 2**28
"""Bytes, 256 MiB, that mask, bias and scores may take before blocks are preferred."""


class Choice(NamedTuple):
    """The backend that runs, and why."""

    name: Name
    reason: str


class Verdict(NamedTuple):
    """What a backend says to a call: whether it can compute it, and why not or at what price."""

    name: Name
    can: bool
    reason: str


RUN: dict[Name, Callable[[Inputs], Tensor]] = {
    "stages": by_stages,
    "fused": by_fused,
    "blocked": by_blocks,
    "flex": by_flex,
    "math": by_math,
    "oracle": by_oracle,
}


def choose(inputs: Inputs, backend: str) -> Choice:
    """The backend asked for, or the best of those that can.

    Raises:
        ValueError: a name that is none, or a backend asked for what it cannot compute.
    """
    if backend == "auto":
        return _best(inputs)
    if backend not in RUN:
        names = ", ".join(f'"{name}"' for name in get_args(Backend))
        raise ValueError(f"attention: backend is {backend!r}; one of {names} is needed")
    obstacle = _obstacle(inputs, backend)
    if obstacle is not None:
        raise ValueError(f'attention: backend="{backend}" cannot compute this: {obstacle}. Use "auto" or "stages"')
    return Choice(backend, "asked for")


def verdicts(inputs: Inputs) -> list[Verdict]:
    """What every backend says."""
    answers = []
    for name in RUN:
        obstacle = _obstacle(inputs, name)
        answers.append(Verdict(name, obstacle is None, obstacle or _price(inputs, name)))
    return answers


def _obstacle(inputs: Inputs, name: str) -> str | None:
    if name == "fused":
        return fused_obstacle(inputs)
    if name == "flex":
        return flex_obstacle(inputs)
    if name == "oracle" and inputs.dropout:
        return f"a truth is not random, and dropout is {inputs.dropout}"
    return None


def _price(inputs: Inputs, name: Name) -> str:
    pairs = f"{inputs.queries} × {inputs.keys} pairs"
    if name == "stages":
        return f"keeps {pairs} a head: {_in_bytes(bytes_of_scores(inputs))} a plane of scores"
    if name == "fused":
        return f"one call; mask and bias take {_in_bytes(bytes_of_planes(inputs))}{_padding(inputs)}"
    if name == "blocked":
        return f"{share_in_reach(inputs):.0%} of {pairs} lie within reach of the mask"
    if name == "flex":
        return "compiled at the first call"
    return "float64 throughout, every plane kept" if name == "oracle" else f"keeps {pairs} a head"


def _best(inputs: Inputs) -> Choice:
    obstacle = fused_obstacle(inputs)
    if inputs.queries * inputs.keys >= LONG and isinstance(inputs.mask, Mask):
        share = share_in_reach(inputs)
        # Torch's kernel knows the plain triangle by name and skips its hidden half itself.
        if share <= SEEN and not (obstacle is None and inputs.causal and inputs.bias is None):
            why = f"the mask leaves {share:.0%} of {inputs.queries} × {inputs.keys} pairs within reach"
            if inputs.query.device.type == "cuda" and flex_obstacle(inputs) is None:
                return Choice("flex", f"{why}, and FlexAttention skips the other blocks")
            return Choice("blocked", why)
    if obstacle is not None:
        needed = bytes_of_scores(inputs)
        if needed > PLANES:
            return Choice("blocked", f"{obstacle}, and the stages would keep {_in_bytes(needed)} a plane of scores")
        return Choice("stages", obstacle)
    needed = bytes_of_planes(inputs)
    if needed > PLANES:
        return Choice("blocked", f"torch's fused call would need {_in_bytes(needed)} for mask and bias")
    return Choice("fused", f"torch's fused call expresses all that is asked{_padding(inputs)}")


def share_in_reach(inputs: Inputs) -> float:
    """The share of pairs within reach of the mask, from sixteen blocks of queries spread over all."""
    if not inputs.queries or not inputs.keys:
        return 1.0
    step = max(inputs.queries // 16, BLOCK)
    parts = [range(start, min(start + BLOCK, inputs.queries)) for start in range(0, inputs.queries, step)]
    return sum(len(reach(inputs, rows)) / inputs.keys for rows in parts) / len(parts)


def bytes_of_scores(inputs: Inputs) -> int:
    """Bytes of one plane of scores for all samples and heads."""
    item = max(inputs.query.element_size(), 4)
    return item * prod(inputs.query.shape[:-1]) * inputs.keys


def bytes_of_planes(inputs: Inputs) -> int:
    """Bytes of the tensor that torch's call turns mask and bias into."""
    if inputs.bias is None and (inputs.mask is None or inputs.causal):
        return 0
    mask, bias = inputs.mask, inputs.sample_of_bias()
    apart = [prod(each.shape[:-2]) for each in (mask, bias) if isinstance(each, Tensor)]
    if isinstance(mask, Mask):
        apart.append((mask.batch or 1) * (mask.heads or 1))
    return inputs.query.element_size() * max(apart) * inputs.queries * inputs.keys


def _padding(inputs: Inputs) -> str:
    if not widened(inputs):
        return ""
    width, value_width = inputs.query.shape[-1], inputs.value.shape[-1]
    what = (
        f"the value is padded from {value_width}" if value_width < width else f"query and key are padded from {width}"
    )
    return f"; {what} to {max(width, value_width)}, the width that torch's flash kernel needs on a CPU"


def _in_bytes(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count < 2**30 else f"{count / 2**30:.3g} GiB"
