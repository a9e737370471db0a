"""ONNX `Attention`: what opsets 23, 24 and 25 say, spoken in the five stages."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from intently.mechanism.aggregate import aggregate, merge_heads
from intently.mechanism.door import admit, show
from intently.mechanism.mask_scale import mask_scale
from intently.mechanism.normalize import normalize
from intently.mechanism.project import split_heads
from intently.mechanism.score import score

VERSIONS = (23, 24, 25)

# Each attribute, and the first version that knows it.
ATTRIBUTES = {
    "is_causal": 23,
    "kv_num_heads": 23,
    "q_num_heads": 23,
    "qk_matmul_output_mode": 23,
    "scale": 23,
    "softcap": 23,
    "softmax_precision": 23,
    "left_window_size": 25,
    "right_window_size": 25,
}

# The codes of onnx.TensorProto that `softmax_precision` may name.
PRECISIONS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}


class AttentionOutputs(NamedTuple):
    """The operator's four outputs, in its order and under its names."""

    Y: Tensor
    present_key: Tensor
    present_value: Tensor
    qk_matmul_output: Tensor


def attention_op(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    version: int = 25,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> AttentionOutputs:
    """The operator `Attention` of ONNX, computed by `score`, `mask_scale`, `normalize` and `aggregate`.

    `softmax(cap(scale * Q @ K.T) + attn_mask, over the keys that mask, causality, window and padding allow) @ V`. Names and
    defaults are the operator's. Query i stands at position `offset + i`, where offset is the length of the past, or
    `nonpad_kv_seqlen - queries` sample by sample, or 0. A query that may see nothing receives 0.

    Args:
        Q: `[batch, heads, query, width]`, or `[batch, query, heads * width]` with `q_num_heads`.
        K: `[batch, kv_heads, key, width]`, or `[batch, key, kv_heads * width]` with `kv_num_heads`.
        V: `[batch, kv_heads, key, value_width]`, or three axes likewise; its dtype may differ.
        attn_mask: bool (True = may see) or float (added after the softcap), 1 to 4 axes, broadcastable to
            `[batch, heads, query, past + key]`. From version 24 on its last axis may be shorter, and the keys beyond it
            are hidden; a last axis of 1 is then short and not broadcast.
        past_key, past_value: `[batch, kv_heads, past, width]`, put before the keys and values; both or neither.
        nonpad_kv_seqlen: int64 `[batch]`, from version 24 on: keys from this one on are padding. Not with a past.
        version: the operator's, 23, 24 or 25.
        is_causal: 1 lets query i see key j only when `j <= offset + i`.
        scale: factor on Q·K, of either sign; `1 / sqrt(width)` when left out.
        softcap: c > 0 squeezes the scaled scores to `c * tanh(x / c)`; 0 is no cap.
        q_num_heads, kv_num_heads: for inputs of three axes.
        qk_matmul_output_mode: the fourth output: 0 scaled scores, 1 after the softcap, 2 after mask and bias,
            3 probabilities.
        softmax_precision: type of the softmax: 1 float32, 10 float16, 11 float64, 16 bfloat16. The weights come back to
            the type of Q. When left out half precision is computed in float32, and rounded once at the end.
        left_window_size, right_window_size: from version 25 on: how many keys before and after its own position a
            query may see; -1 is no bound.

    Returns:
        Y `[batch, heads, query, value_width]`, or `[batch, query, heads * value_width]` for three axes;
        present_key and present_value `[batch, kv_heads, past + key, ...]`;
        qk_matmul_output `[batch, heads, query, past + key]` in the type of Q.

    Raises:
        TypeError, ValueError: arguments that do not fit, or that the version does not know.

    Symbols: offset, Y, and the names of arguments are the specification's; our query, key, value, mask, bias are Q, K, V, a bool
    and a float attn_mask.

    Equals / differs: torch `scaled_dot_product_attention` aligns is_causal top-left, so it agrees only without past and
    padding, and has no softcap. `nn.MultiheadAttention` has projections inside and neither softcap nor cache.
    FlexAttention can express all but the fourth output.

    Source: ONNX operators, `Attention` 23, 24 and 25, as worded in onnx 1.23. That release's own evaluator departs from
    the wording twice: mode 0 with a softcap shows capped scores, and a negative scale gives NaN; here the wording holds.

    Four tokens whose scores are all 0; each sees itself and the token before, so it receives the mean of two values:

    >>> import torch
    >>> blank, value = torch.zeros(1, 1, 4, 2), torch.tensor([1.0, 10.0, 100.0, 1000.0]).reshape(1, 1, 4, 1)
    >>> attention_op(blank, blank, value, is_causal=1, left_window_size=1).Y.flatten()
    tensor([  1.0000,   5.5000,  55.0000, 550.0000])
    """
    _check_numbers(version, is_causal, softcap, qk_matmul_output_mode, softmax_precision)
    _check_window(version, left_window_size, right_window_size)
    query, key, value = _with_heads(Q, K, V, q_num_heads, kv_num_heads, version)
    present_key, present_value = _present(key, value, past_key, past_value)
    batch, queries, keys = query.shape[0], query.shape[-2], present_key.shape[-2]
    _check_padding(version, nonpad_kv_seqlen, past_key, batch, keys)

    seen, bias = None, None
    if attn_mask is not None:
        seen, bias = _seen_and_bias(
            _admit_mask(attn_mask, (batch, query.shape[1], queries, keys), nonpad_kv_seqlen, version)
        )
    query_at = torch.arange(queries, device=query.device).unsqueeze(-1) + _offset(past_key, nonpad_kv_seqlen, queries)
    key_at = torch.arange(keys, device=query.device)
    seen = _all_of(seen, *_geometry(query_at, key_at, is_causal, left_window_size, right_window_size, nonpad_kv_seqlen))

    exact = torch.promote_types(query.dtype, present_value.dtype)
    inputs = admit(
        query.to(exact),
        present_key.to(exact),
        present_value.to(exact),
        mask=seen,
        bias=bias,
        scale=scale,
        softcap=softcap or None,
    )
    scores = score(inputs.query, inputs.key)
    logits = mask_scale(scores, scale=inputs.scale, softcap=inputs.softcap, bias=bias, mask=seen)
    if softmax_precision is None:
        weights = normalize(logits)
    else:
        weights = normalize(logits.to(PRECISIONS[softmax_precision])).to(Q.dtype).to(scores.dtype)
    output = aggregate(weights, inputs.value.to(weights.dtype)).to(Q.dtype)
    if qk_matmul_output_mode == 0:
        plane = mask_scale(scores, scale=inputs.scale)
    elif qk_matmul_output_mode == 1:
        plane = mask_scale(scores, scale=inputs.scale, softcap=inputs.softcap)
    else:
        plane = logits if qk_matmul_output_mode == 2 else weights
    return AttentionOutputs(
        merge_heads(output) if Q.dim() == 3 else output, present_key, present_value, plane.to(Q.dtype)
    )


def _with_heads(
    Q: Tensor, K: Tensor, V: Tensor, q_num_heads: int | None, kv_num_heads: int | None, version: int
) -> tuple[Tensor, Tensor, Tensor]:
    together = f"Q {show(Q)}, K {show(K)}, V {show(V)}"
    if not Q.dim() == K.dim() == V.dim() or Q.dim() not in (3, 4):
        raise ValueError(f"attention_op: {together}; all three with 4 axes, or all three with 3, are needed")
    if Q.dtype != K.dtype:
        raise TypeError(f"attention_op: Q and K differ in dtype: {together}. Only V may have one of its own")
    if Q.dim() == 3:
        if q_num_heads is None or kv_num_heads is None:
            raise ValueError(
                f"attention_op: {together} have three axes, so q_num_heads and kv_num_heads are needed; "
                f"they are {q_num_heads} and {kv_num_heads}. Nothing else says where a head ends"
            )
        return split_heads(Q, q_num_heads), split_heads(K, kv_num_heads), split_heads(V, kv_num_heads)
    # Before 25 the text leaves open what a number of heads beside four axes means; agreement does no harm.
    allowed = {None} if version >= 25 else {None, Q.shape[1]}, {None} if version >= 25 else {None, K.shape[1]}
    if q_num_heads not in allowed[0] or kv_num_heads not in allowed[1]:
        raise ValueError(
            f"attention_op: q_num_heads is {q_num_heads} and kv_num_heads {kv_num_heads}, but {together} have four axes, "
            "whose second counts the heads. Leave both out"
        )
    return Q, K, V


def _present(key: Tensor, value: Tensor, past_key: Tensor | None, past_value: Tensor | None) -> tuple[Tensor, Tensor]:
    if past_key is None and past_value is None:
        return key, value
    if past_key is None or past_value is None:
        alone = "past_value" if past_key is None else "past_key"
        raise ValueError(f"attention_op: {alone} was passed alone; past_key and past_value go together")
    for name, past, new in (("past_key", past_key, key), ("past_value", past_value, value)):
        if past.dim() != 4 or (*past.shape[:2], past.shape[3]) != (*new.shape[:2], new.shape[3]):
            raise ValueError(
                f"attention_op: {name} {show(past)} does not continue into {show(new)}; "
                "[batch, kv_heads, past, width] is needed, four axes even where Q, K and V have three"
            )
        if past.dtype != new.dtype:
            raise TypeError(f"attention_op: {name} {show(past)} and its new part {show(new)} differ in dtype")
    return torch.cat((past_key, key), dim=-2), torch.cat((past_value, value), dim=-2)


def _admit_mask(attn_mask: Tensor, target: tuple[int, ...], nonpad_kv_seqlen: Tensor | None, version: int) -> Tensor:
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(
            f"attention_op: attn_mask is {show(attn_mask)}; bool (True = may see) or a float to add is needed. "
            "Integers of 0 and 1 become one with .bool(), if 1 means `may see`"
        )
    given, keys = attn_mask, target[-1]
    short = attn_mask.dim() >= 1 and attn_mask.shape[-1] < keys and version >= 24
    if short:
        longest = 0 if nonpad_kv_seqlen is None or not nonpad_kv_seqlen.numel() else int(nonpad_kv_seqlen.max())
        if attn_mask.shape[-1] < longest:
            raise ValueError(
                f"attention_op: attn_mask {show(given)} speaks of {given.shape[-1]} keys, "
                f"fewer than the {longest} that nonpad_kv_seqlen counts as tokens"
            )
        hidden = False if attn_mask.dtype == torch.bool else float("-inf")
        tail = attn_mask.new_full((*attn_mask.shape[:-1], keys - attn_mask.shape[-1]), hidden)
        attn_mask = torch.cat((attn_mask, tail), dim=-1)
    fits = 1 <= attn_mask.dim() <= 4 and all(
        size in (1, wanted) for size, wanted in zip(reversed(attn_mask.shape), reversed(target), strict=False)
    )
    if not fits:
        advice = "Axes align from the right: [key], [query, key], [heads, query, key], [batch, heads, query, key]"
        if version < 24 and attn_mask.dim() >= 1 and attn_mask.shape[-1] < keys:
            advice = "Masks shorter than the keys came with version 24"
        raise ValueError(
            f"attention_op: attn_mask {show(given)} does not broadcast to [batch, heads, query, key] = {list(target)}. "
            + advice
        )
    return attn_mask


def _seen_and_bias(attn_mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """A float mask in two parts: an -inf hides, for in a sum it would turn a score of +inf into NaN instead."""
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    seen = attn_mask != float("-inf")
    return seen, attn_mask.masked_fill(~seen, 0.0)


def _offset(past_key: Tensor | None, nonpad_kv_seqlen: Tensor | None, queries: int) -> int | Tensor:
    """The position of query 0: how many tokens stand before the queries, by sample where that differs."""
    if nonpad_kv_seqlen is not None:
        return nonpad_kv_seqlen.reshape(-1, 1, 1, 1) - queries
    return 0 if past_key is None else past_key.shape[-2]


def _geometry(
    query_at: Tensor, key_at: Tensor, is_causal: int, left: int, right: int, nonpad_kv_seqlen: Tensor | None
) -> list[Tensor]:
    """What positions alone forbid: planes that broadcast to `[batch, 1, query, key]`, True = may see."""
    planes = []
    if is_causal:
        planes.append(key_at <= query_at)
    if left >= 0:
        planes.append(key_at >= query_at - left)
    if right >= 0:
        planes.append(key_at <= query_at + right)
    if nonpad_kv_seqlen is not None:
        planes.append(key_at < nonpad_kv_seqlen.reshape(-1, 1, 1, 1))
    return planes


def _all_of(*planes: Tensor | None) -> Tensor | None:
    present = [plane for plane in planes if plane is not None]
    return reduce(torch.logical_and, present) if present else None


def _check_numbers(version: int, is_causal: int, softcap: float, mode: int, softmax_precision: int | None) -> None:
    if version not in VERSIONS:
        raise ValueError(f"attention_op: version is {version}; 23, 24 or 25 is needed")
    if is_causal not in (0, 1):
        raise ValueError(f"attention_op: is_causal is {is_causal}; 0 or 1 is needed")
    if softcap is None or softcap < 0:
        raise ValueError(f"attention_op: softcap is {softcap}; a number above 0 is needed, or 0 for no cap")
    if mode not in (0, 1, 2, 3):
        raise ValueError(
            f"attention_op: qk_matmul_output_mode is {mode}; 0 (scores), 1 (after the softcap), 2 (after the mask) "
            "or 3 (probabilities) is needed"
        )
    if softmax_precision is not None and softmax_precision not in PRECISIONS:
        raise ValueError(
            f"attention_op: softmax_precision is {softmax_precision}; "
            "1 (float32), 10 (float16), 11 (float64) or 16 (bfloat16) is needed"
        )


def _check_window(version: int, left: int, right: int) -> None:
    for name, size in (("left_window_size", left), ("right_window_size", right)):
        if size < -1:
            raise ValueError(f"attention_op: {name} is {size}; a number of keys is needed, or -1 for no bound")
        if size != -1 and version < ATTRIBUTES[name]:
            raise ValueError(
                f"attention_op: {name} is {size}, but version {version} of Attention does not know {name}; "
                f"it came with version {ATTRIBUTES[name]}. Express the window in attn_mask, or raise the opset"
            )


def _check_padding(
    version: int, nonpad_kv_seqlen: Tensor | None, past_key: Tensor | None, batch: int, keys: int
) -> None:
    if nonpad_kv_seqlen is None:
        return
    if version < 24:
        raise ValueError(
            f"attention_op: version {version} of Attention does not know nonpad_kv_seqlen; it came with version 24. "
            "Express the padding in attn_mask, or raise the opset"
        )
    if past_key is not None:
        raise ValueError(
            "attention_op: nonpad_kv_seqlen and past_key exclude each other: the first says that the cache is kept "
            "outside and K, V are all of it, the second that it is grown here"
        )
    if nonpad_kv_seqlen.dtype != torch.int64 or tuple(nonpad_kv_seqlen.shape) != (batch,):
        raise ValueError(
            f"attention_op: nonpad_kv_seqlen is {show(nonpad_kv_seqlen)}; int64[{batch}] is needed, a length per sample"
        )
    if ((nonpad_kv_seqlen < 0) | (nonpad_kv_seqlen > keys)).any():
        raise ValueError(
            f"attention_op: nonpad_kv_seqlen is {nonpad_kv_seqlen.tolist()}; lengths from 0 to the {keys} keys are needed"
        )
