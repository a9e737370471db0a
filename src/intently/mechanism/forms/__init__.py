"""The forms of attention: one short file each, pure functions made of the five stages."""

from __future__ import annotations

from intently.mechanism.forms.additive import additive_attention
from intently.mechanism.forms.by_scores import attention_by_scores
from intently.mechanism.forms.compress import Compressed, LatentProjections, compress
from intently.mechanism.forms.cross import cross_attention
from intently.mechanism.forms.differential import (
    differential_attention,
    differential_share,
    initial_share,
    normalize_heads,
)
from intently.mechanism.forms.dilated import dilated_attention, strided_attention
from intently.mechanism.forms.gat import gat_attention, gat_stages, gatv2_attention, gatv2_stages
from intently.mechanism.forms.graph import edge_softmax, graph_attention, graph_stages, with_self_loops
from intently.mechanism.forms.grouped import grouped_attention, pool_heads, share_heads
from intently.mechanism.forms.latent import latent_attention
from intently.mechanism.forms.linear import Sums, linear_attention, linear_attention_step
from intently.mechanism.forms.local import local_attention
from intently.mechanism.forms.luong import luong_concat, luong_dot, luong_general
from intently.mechanism.forms.multi_head import Projections, multi_head_attention
from intently.mechanism.forms.neighborhood import (
    neighborhood_attention,
    neighborhood_mask,
    neighborhood_stages,
    neighbors,
)
from intently.mechanism.forms.off_by_one import off_by_one_attention, sink_attention
from intently.mechanism.forms.scaled_dot_product import scaled_dot_product
from intently.mechanism.forms.shifted import (
    relative_position_bias,
    relative_position_index,
    shifted_window_attention,
    shifted_windows,
    window_mask,
)

__all__ = [
    "Compressed",
    "LatentProjections",
    "Projections",
    "Sums",
    "additive_attention",
    "attention_by_scores",
    "compress",
    "cross_attention",
    "differential_attention",
    "differential_share",
    "dilated_attention",
    "edge_softmax",
    "gat_attention",
    "gat_stages",
    "gatv2_attention",
    "gatv2_stages",
    "graph_attention",
    "graph_stages",
    "grouped_attention",
    "initial_share",
    "latent_attention",
    "linear_attention",
    "linear_attention_step",
    "local_attention",
    "luong_concat",
    "luong_dot",
    "luong_general",
    "multi_head_attention",
    "neighborhood_attention",
    "neighborhood_mask",
    "neighborhood_stages",
    "neighbors",
    "normalize_heads",
    "off_by_one_attention",
    "pool_heads",
    "relative_position_bias",
    "relative_position_index",
    "scaled_dot_product",
    "share_heads",
    "shifted_window_attention",
    "shifted_windows",
    "sink_attention",
    "strided_attention",
    "window_mask",
    "with_self_loops",
]
