"""Faults: one file each; `FAULTS` lists them in the order in which they are looked for."""

from __future__ import annotations

from intently.faults import (
    backend_disagrees,
    bias_ignored,
    cache_misaligned,
    causal_extra,
    causal_leak,
    cross_miswired,
    documents_leak,
    dropout_in_eval,
    heads_interleaved,
    kv_heads_misordered,
    mask_ignored,
    mask_inverted,
    mask_misrouted,
    memory_mask_ignored,
    not_finite,
    not_normalized,
    observer_effect,
    order_blind,
    padding_leak,
    position_shifted_by_padding,
    rope_mixed_layout,
    rope_stale_offset,
    rope_wrong_axis,
    saturated_logits,
    scale_missing,
    scale_twice,
    scale_wrong_width,
    side_channel,
    slow_path,
    softmax_low_precision,
    softmax_wrong_axis,
    stale_state,
    weight_is_not_effect,
    window_ignored,
    window_off_by_one,
)
from intently.faults.base import Fault, Suspicion
from intently.faults.evidence import Examination

FAULTS: dict[str, Fault] = {
    module.FAULT.name: module.FAULT
    for module in (
        causal_leak, causal_extra, padding_leak, mask_ignored, mask_inverted, mask_misrouted, window_off_by_one, window_ignored, documents_leak, cache_misaligned,
        bias_ignored, scale_missing, scale_twice, scale_wrong_width, softmax_wrong_axis, not_normalized, softmax_low_precision, dropout_in_eval, stale_state, saturated_logits, kv_heads_misordered, position_shifted_by_padding, rope_wrong_axis, rope_mixed_layout, rope_stale_offset, order_blind, heads_interleaved, cross_miswired, memory_mask_ignored, not_finite, observer_effect, backend_disagrees, weight_is_not_effect, slow_path, side_channel,
    )
}  # fmt: skip

__all__ = ["FAULTS", "Examination", "Fault", "Suspicion"]
