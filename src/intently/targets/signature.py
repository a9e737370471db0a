"""What a model's signature says: the names of its arguments, and what an argument of a certain name usually means."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from intently.targets.program import Program
from intently.targets.stream import Stream, TellingForm

# What an argument of this name means by a true entry. A name that says neither is tried both ways.
KEEP = re.compile(
    r"^(encoder_|decoder_|src_|tgt_|source_|target_|input_|context_|memory_)?(attention_mask|attn_mask|valid_mask|keep_mask|input_mask|valid|keep)$"
)
HIDE = re.compile(
    r"^(src_|tgt_|memory_|source_|target_|encoder_|decoder_)?(key_padding_mask|padding_mask|pad_mask|is_pad|is_padding)$"
)
LENGTHS = re.compile(r"^([a-z]+_)?([iox]|seq|sequence|input|src|tgt|valid)?_?(lengths?|lens?|seqlens?)$")
MASK_WORDS = re.compile(r"(key_padding|attention|attn|padding|valid|keep|pad)?_?mask$|_?(lengths?|lens?)$")
MASKLIKE = re.compile(r"mask|^valid|^pad|padding")
# What carries what a model saw before, says where the new tokens begin, or gives the position of each.
CACHE = re.compile(
    r"^(past(_key_values?|_kvs?|_buckets_states|_states?)?|layer_past|(kv_?)?cache(s|_params)?|kvs?|states?|mems|inference_params|incremental_state|presents?)$"
)
START = re.compile(
    r"^(start_?pos(ition)?|(pos(ition)?_)?offset|cache_position|input_pos|start|cur_pos|past_len(gth)?|cache_len(gth)?|step)$"
)
POSITIONS = re.compile(r"^(position_?ids?|positions|pos_?ids?|pos)$")
TARGET_SIDE = re.compile(r"^(tgt|target|decoder|dec)_|^(tgt|target|decoder|dec|y|trg)$")
SIDE = re.compile(r"^(src|source|encoder|enc|memory|context)(_|$)")
# Which documents are packed into a row: a number for each position, bounds, or positions that start again.
DOCUMENT_NUMBERS = re.compile(
    r"^(documents?|docs?|segments?|seqs?|sequences?|samples?|examples?|packing|packed)_?(ids?|idx|index|indices|numbers?)$"
)
DOCUMENT_BOUNDS = re.compile(r"^cu_?seq_?len(s|gths)?(_[qk])?$")
POSITIONS = re.compile(r"^(position|pos)_?(ids?|idx|indices)$|^(positions|input_pos)$")


def signature(model: Any) -> dict[str, inspect.Parameter]:
    """The parameters of the model's forward, by name; of a wrapper that passes everything on, those of what it wraps."""
    function = model.forward if isinstance(model, nn.Module) else model
    inner = getattr(model, "_orig_mod", None)
    children = list(model.children()) if isinstance(model, nn.Module) else []
    if isinstance(inner, nn.Module):
        return signature(inner)
    try:
        found = dict(inspect.signature(function).parameters)
        if len(children) == 1 and all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found.values()):
            return signature(children[0])
        return found
    except (TypeError, ValueError):
        schema = getattr(function, "schema", None)
        if schema is not None:  # scripted code tells its arguments this way
            plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
            return {a.name: inspect.Parameter(a.name, plain) for a in schema.arguments[1:]}
        # A function written in C tells no names; of attention functions the order is always this.
        positional = inspect.Parameter.POSITIONAL_ONLY
        return {n: inspect.Parameter(n, positional) for n in ("query", "key", "value")}


def plain_names(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [n for n, p in parameters.items() if p.kind not in kinds]


def is_mask(name: str) -> bool:
    return bool(MASKLIKE.search(name) or LENGTHS.match(name))


def form_of_telling(argument: str) -> TellingForm | None:
    """What an argument of this name says of packed documents; None when it speaks of something else."""
    if DOCUMENT_NUMBERS.match(argument):
        return "numbers"
    return "bounds" if DOCUMENT_BOUNDS.match(argument) else "positions" if POSITIONS.match(argument) else None


def lengths_for(streams: Sequence[Stream], base: int = 7) -> dict[str, int]:
    """Different lengths for different streams, so that no axis can be taken for another."""
    own = [s for s in streams if s.follows is None]
    taken = {s.length for s in own}
    lengths = {}
    for i, s in enumerate(own):
        length = s.length or base + 2 * (len(own) - 1 - i)
        while not s.length and length in taken:
            length += 1
        lengths[s.argument] = length
        taken.add(length)
    lengths.update({s.argument: lengths[s.follows] for s in streams if s.follows is not None})
    return lengths


def dtype_of(model: Any) -> torch.dtype:
    """The floating type of the model's parameters."""
    if isinstance(model, Program):
        return model.dtype
    if isinstance(model, nn.Module):
        for parameter in [*model.parameters(), *model.buffers()]:
            if parameter.is_floating_point():
                return parameter.dtype
    return torch.float32


_QKV = [{"q", "query", "queries", "xq"}, {"k", "key", "keys", "xk"}, {"v", "value", "values", "xv"}]


def looks_like_qkv(names: Sequence[str]) -> bool:
    return len(names) >= 3 and all(n.lower() in known for n, known in zip(names, _QKV, strict=False))
