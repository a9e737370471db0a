"""Promises: one file each; `PROMISES` lists them in the order in which they are tried."""

from __future__ import annotations

from intently.promises import (
    affordable,
    backends_agree,
    batch_independent,
    cache_equal,
    causal,
    documents_isolated,
    finite,
    grouped,
    knobs_live,
    memory_respected,
    normalized,
    observer_neutral,
    order_aware,
    padding_inert,
    position_shift,
    repeatable,
    responsive,
    scaled,
    sees_all,
    windowed,
)
from intently.promises.base import Promise
from intently.promises.trial import Condition, Influence, Layout, Trial, conditions_of, difference, equal_case, feeds_of

PROMISES: dict[str, Promise] = {
    module.PROMISE.name: module.PROMISE
    for module in (
        causal, sees_all, windowed, padding_inert, position_shift, order_aware, batch_independent, cache_equal, documents_isolated, memory_respected, repeatable, observer_neutral, finite, backends_agree, scaled, normalized, responsive, affordable, grouped, knobs_live,
    )
}  # fmt: skip

__all__ = [
    "PROMISES",
    "Condition",
    "Influence",
    "Layout",
    "Promise",
    "Trial",
    "conditions_of",
    "difference",
    "equal_case",
    "feeds_of",
]
