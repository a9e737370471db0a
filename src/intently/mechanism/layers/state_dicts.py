"""Weights from and to torch's own modules, as pure functions on state dicts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from intently.mechanism.door import show

State = dict[str, Tensor]

ROLES = ("query", "key", "value")
IN_ENCODER_LAYER = {
    "linear1": "feed_forward.inner",
    "linear2": "feed_forward.outer",
    "norm1": "attention_norm",
    "norm2": "feed_forward_norm",
}
IN_DECODER_LAYER = {**IN_ENCODER_LAYER, "norm2": "cross_norm", "norm3": "feed_forward_norm"}


def from_multihead_attention(state: Mapping[str, Tensor]) -> State:
    """The weights of `nn.MultiheadAttention` for `MultiHeadAttention` or `CrossAttention`.

    Args:
        state: its `state_dict()`, with one packed `in_proj_weight` or, where widths differ, three separate ones.

    Raises:
        ValueError: `bias_k` or `bias_v`, a learned extra key and value that no source position stands for.

    >>> theirs = torch.nn.MultiheadAttention(8, 2)
    >>> sorted(from_multihead_attention(theirs.state_dict()))
    ['key.bias', 'key.weight', 'output.bias', 'output.weight', 'query.bias', 'query.weight', 'value.bias', 'value.weight']
    """
    if "bias_k" in state:
        raise ValueError(
            f"from_multihead_attention: bias_k is {show(state['bias_k'])} (add_bias_kv=True), a learned key and value "
            "appended to the sequence; there is no place for it here. Append it to the source yourself"
        )
    if "in_proj_weight" in state:
        weights = state["in_proj_weight"].chunk(3)
    else:
        weights = tuple(state[f"{letter}_proj_weight"] for letter in "qkv")
    ours = {f"{role}.weight": weight for role, weight in zip(ROLES, weights, strict=True)}
    if "in_proj_bias" in state:
        biases = state["in_proj_bias"].chunk(3)
        ours |= {f"{role}.bias": bias for role, bias in zip(ROLES, biases, strict=True)}
    return ours | {
        f"output.{name}": state[f"out_proj.{name}"] for name in ("weight", "bias") if f"out_proj.{name}" in state
    }


def to_multihead_attention(state: Mapping[str, Tensor]) -> State:
    """Undo `from_multihead_attention`; packed where the three projections read the same width, as torch does.

    Raises:
        ValueError: kv heads fewer than the heads, or a width of its own; torch's module has neither.
    """
    weights = [state[f"{role}.weight"] for role in ROLES]
    model = state["output.weight"].shape[0]
    if any(weight.shape[0] != model for weight in weights):
        raise ValueError(
            f"to_multihead_attention: query {show(weights[0])}, key {show(weights[1])}, value {show(weights[2])}; "
            f"nn.MultiheadAttention projects all three to the width of the model, {model}: no kv heads, no width of its own"
        )
    if weights[0].shape == weights[1].shape == weights[2].shape:
        theirs = {"in_proj_weight": torch.cat(weights)}
    else:
        theirs = {f"{letter}_proj_weight": weight for letter, weight in zip("qkv", weights, strict=True)}
    if "query.bias" in state:
        theirs["in_proj_bias"] = torch.cat([state[f"{role}.bias"] for role in ROLES])
    return theirs | {
        f"out_proj.{name}": state[f"output.{name}"] for name in ("weight", "bias") if f"output.{name}" in state
    }


def from_encoder_layer(state: Mapping[str, Tensor]) -> State:
    """The weights of `nn.TransformerEncoderLayer` for a `TransformerBlock` of the same placement.

    >>> from intently.mechanism.layers import TransformerBlock
    >>> theirs = torch.nn.TransformerEncoderLayer(8, 2, 16)
    >>> TransformerBlock.classic(8, heads=2, hidden=16).load_state_dict(from_encoder_layer(theirs.state_dict()))
    <All keys matched successfully>
    """
    return _from_layer(state, {"self_attn": "attention"}, IN_ENCODER_LAYER)


def to_encoder_layer(state: Mapping[str, Tensor]) -> State:
    """Undo `from_encoder_layer`."""
    return _to_layer(state, {"self_attn": "attention"}, IN_ENCODER_LAYER)


def from_decoder_layer(state: Mapping[str, Tensor]) -> State:
    """The weights of `nn.TransformerDecoderLayer` for a `TransformerBlock` with cross-attention."""
    return _from_layer(state, {"self_attn": "attention", "multihead_attn": "cross"}, IN_DECODER_LAYER)


def to_decoder_layer(state: Mapping[str, Tensor]) -> State:
    """Undo `from_decoder_layer`."""
    return _to_layer(state, {"self_attn": "attention", "multihead_attn": "cross"}, IN_DECODER_LAYER)


def _from_layer(state: Mapping[str, Tensor], attentions: dict[str, str], renamed: dict[str, str]) -> State:
    ours = {}
    for name, place in attentions.items():
        ours |= _placed(place, from_multihead_attention(_within(name, state)))
    for name, place in renamed.items():
        ours |= _placed(place, _within(name, state))
    return ours


def _to_layer(state: Mapping[str, Tensor], attentions: dict[str, str], renamed: dict[str, str]) -> State:
    theirs = {}
    for name, place in attentions.items():
        theirs |= _placed(name, to_multihead_attention(_within(place, state)))
    for name, place in renamed.items():
        theirs |= _placed(name, _within(place, state))
    return theirs


def _within(place: str, state: Mapping[str, Tensor]) -> State:
    return {name.removeprefix(place + "."): value for name, value in state.items() if name.startswith(place + ".")}


def _placed(place: str, state: State) -> State:
    return {f"{place}.{name}": value for name, value in state.items()}
