"""What a size in a model's configuration is for, told from its name alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# First match wins, so the special comes before the general. A field that matches nothing keeps its default.
_ROLES: tuple[tuple[str, str], ...] = (
    ("kept", r"(num_|in_|input_|audio_|image_)?channels|num_input_channels|type_vocab_size|chunk_size_feed_forward"),
    ("kept", r".*(kernel|stride|padding|dilation|loss|cost|coefficient|dropout|_prob|temperature).*"),
    ("kept", r".*(feat_extract|adapter).*"),
    ("token", r".*tokens?_(id|ids|index)|(begin_)?suppress_tokens"),
    ("token", r"(bos|eos|pad|sep|cls|mask|unk|eod|im_\w+)_(id|index)"),
    ("codes", r".*codebook_size"),
    ("filters", r"(num|n)_filters|(base|stem)_channels"),
    ("vocabulary", r".*vocab_size.*|n_vocab|(.*_)?vocab"),
    ("positions", r"(.*_)?(max|n)_.*positions?|.*max_position_embeddings|n_positions|n_ctx"),
    ("positions", r"(max_)?seq(uence)?_len(gth)?|(model_)?max_length|max_seq_len.*|rel_extent|context_length"),
    ("band", r"sliding_window|attention_chunk_size|attention_window_size|local_attention"),
    ("window", r".*sliding_window.*|.*window_size|attention_window|index_topk|block_size|window"),
    ("window", r"(attention_|mamba_)?chunk_size"),
    ("chosen experts", r".*experts?_per_(tok|token)|(moe_)?top_?k(_experts)?|moe_k|router_top_k"),
    ("chosen experts", r".*num_selected_experts"),
    ("experts", r"(moe_)?(num|n)_(?!shared|zero)(\w+_)?experts?|num_experts|n_experts"),
    ("shared experts", r"(\w+_)?shared_experts?"),
    ("expert groups", r"n_group|topk_group|num_expert_group|topk_groups?|n_expert_groups?"),
    ("key-value heads", r".*(key_value|kv)_heads?(_per_layer)?|multi_query_group_num|n_head_kv|.*num_kv|kv_n_heads"),
    ("state", r"(mamba_|ssm_)?(d_state|state_size|state_dim)|ssm_state_size"),
    ("state groups", r"(mamba_)?n_groups|mamba_num_groups"),
    ("state heads", r"mamba_(n|num)_heads|ssm_num_heads"),
    ("head width", r"(.*_)?head_dim|.*_head_dim\w*|d_kv|d_head|mamba_d_head|(attention_)?head_size|kv_channels"),
    ("head width", r"query_pre_attn_scalar"),
    ("rotary width", r"rotary_(dim|ndims)|rotary_emb_dim"),
    ("heads", r"(.*_)?(num|n)_(.*_)?heads?(_per_layer)?|(.*_)?attention_heads|n_heads?|num_(query|key|value)_heads"),
    ("layer share", r".*(shared_layers|first_k_dense_replace|dense_layers|window_layers)"),
    ("layers", r"(.*_)?(num|n)_(.*_)?layers?|(.*_)?(encoder|decoder|hidden)_layers|n_layers?|depth|num_blocks|layers"),
    ("rank", r".*(lora_rank|low_rank\w*|_rank|_rank_dim|lora)"),
    ("image", r"(.*_)?(image|img|spec)_size"),
    ("experts' width", r"(moe|expert|shared_expert)_\w*(intermediate|ffn|hidden)\w*"),
    (
        "width",
        r".*(hidden_size|hidden_dim|embed_dim|embedding_dim|embedding_size|embd_size|d_model|n_embd|d_embed"
        r"|intermediate|ffn_dim|ffn_hidden|ffn_size|d_ff|d_latents|ff_dim|d_inner|n_inner|inner_dim|mlp_dim"
        r"|projection_dim|proj_size|proj_dim|emb_dim|lru_width|conv_dim|feedforward_dim|dim_feedforward|hidden_channels|filter_size|hidden_states_size"
        r"|hidden_act_dim).*|dim|dim_model|width|.*_channels|.*_dim|.*_width",
    ),
)
_COMPILED = tuple((role, re.compile(pattern)) for role, pattern in _ROLES)

# Kinds of layers, as transformers' own mask functions know them: with the size that says what is near, and without one.
# Other kinds narrow what is seen by the same sizes, or by rules of their own.
NEAR = {"sliding_attention": "sliding_window", "local": "window_size", "chunked_attention": "attention_chunk_size"}
WHOLE = frozenset(
    {"full_attention", "attention", "global", "hybrid", "linear_attention", "conv", "mamba", "recurrent", "moe", "mlp"}
)


def kinds_of(fields: Mapping[str, Any]) -> Sequence[str]:
    """The kind of each layer, as the fields of a configuration list them."""
    for name in ("layer_types", "attention_layers"):
        kinds = fields.get(name)
        if isinstance(kinds, list | tuple) and kinds and all(isinstance(k, str) for k in kinds):
            return kinds
    return ()


def are_known(kinds: Sequence[str]) -> bool:
    """Whether what every kind of layer sees is told by its name and a size."""
    return all(kind in WHOLE or kind in NEAR for kind in kinds)


# Names of the width that everything else in a configuration is measured by, in order of preference.
PRIMARY_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "dim_model", "width",
                  "decoder_hidden_size")  # fmt: skip
PRIMARY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "attention_heads",
                 "decoder_attention_heads", "decoder_num_attention_heads")  # fmt: skip
PRIMARY_HEAD_WIDTHS = ("head_dim", "d_kv", "d_head", "kv_channels", "head_size", "attention_head_size",
                       "attention_head_dim")  # fmt: skip


def role(name: str) -> str | None:
    """The role of the configuration field `name`, or None where its name says nothing about a size.

    >>> role("num_key_value_heads"), role("decoder_layers"), role("layer_norm_eps")
    ('key-value heads', 'layers', None)
    """
    for found, pattern in _COMPILED:
        if pattern.fullmatch(name.lower()):
            return None if found == "kept" else found
    return None


def is_period(name: str) -> bool:
    """Whether `name` counts every how many layers something recurs."""
    return re.fullmatch(r".*(period|interval|pattern|sparse_step|_every|_freq|every_n\w*|moe_step)", name) is not None


def is_layer_index(name: str) -> bool:
    """Whether `name` lists layers by their numbers."""
    return re.fullmatch(r".*(idx|idxs|index|indexes|indices|layers|layer_ids|_ids)", name.lower()) is not None
