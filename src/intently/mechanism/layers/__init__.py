"""Layers: attention as parts of a model, each a small module that is composed with others."""

from __future__ import annotations

from intently.mechanism.layers.additive import AdditiveAttention
from intently.mechanism.layers.attend import Attend
from intently.mechanism.layers.block import TransformerBlock
from intently.mechanism.layers.cache import Cache, GrowingCache, PreallocatedCache, SlidingCache
from intently.mechanism.layers.cross import CrossAttention, Source
from intently.mechanism.layers.decoder import Decoder
from intently.mechanism.layers.encoder import Encoder
from intently.mechanism.layers.encoder_decoder import EncoderDecoder
from intently.mechanism.layers.feed_forward import FeedForward, GatedFeedForward
from intently.mechanism.layers.generate import greedy
from intently.mechanism.layers.graph import (
    GraphAttention,
    GraphAttentionV2,
    from_gat_conv,
    from_gatv2_conv,
    to_gat_conv,
    to_gatv2_conv,
)
from intently.mechanism.layers.look import Seen, look
from intently.mechanism.layers.multi_head import MultiHeadAttention
from intently.mechanism.layers.neighborhood import NeighborhoodAttention, from_dinat, from_natten, to_dinat, to_natten
from intently.mechanism.layers.shifted_windows import AttendShiftedWindows
from intently.mechanism.layers.state_dicts import (
    from_decoder_layer,
    from_encoder_layer,
    from_multihead_attention,
    to_decoder_layer,
    to_encoder_layer,
    to_multihead_attention,
)

__all__ = [
    "AdditiveAttention",
    "Attend",
    "AttendShiftedWindows",
    "Cache",
    "CrossAttention",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "GatedFeedForward",
    "GraphAttention",
    "GraphAttentionV2",
    "GrowingCache",
    "MultiHeadAttention",
    "NeighborhoodAttention",
    "PreallocatedCache",
    "Seen",
    "SlidingCache",
    "Source",
    "TransformerBlock",
    "from_decoder_layer",
    "from_dinat",
    "from_encoder_layer",
    "from_gat_conv",
    "from_gatv2_conv",
    "from_multihead_attention",
    "from_natten",
    "greedy",
    "look",
    "to_decoder_layer",
    "to_dinat",
    "to_encoder_layer",
    "to_gat_conv",
    "to_gatv2_conv",
    "to_multihead_attention",
    "to_natten",
]
