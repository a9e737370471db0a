"""Interventions at sites: a change of one attention call while the model runs, gone when the run ends."""

from __future__ import annotations

from intently.edits.repair import (
    Repair,
    apply_all,
    as_in,
    attend_to,
    biased,
    drop_nothing,
    float32_inside,
    multiplied,
    norm_queries_and_keys,
    regroup,
    rescale,
    safe_rows,
    see,
    see_uncut,
    silence,
    softcapped,
    softmax_over_keys,
    split_heads,
    turn_again,
    turn_on,
    with_sink,
)

__all__ = [
    "Repair", "apply_all", "as_in", "attend_to", "biased", "drop_nothing", "float32_inside", "multiplied", "norm_queries_and_keys", "regroup", "rescale", "safe_rows", "see", "see_uncut", "silence", "softcapped", "softmax_over_keys", "split_heads", "turn_again", "turn_on", "with_sink",
]  # fmt: skip
