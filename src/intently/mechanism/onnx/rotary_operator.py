"""ONNX `RotaryEmbedding`: what opset 23 says, through `rotate`."""

from __future__ import annotations

from torch import Tensor

from intently.mechanism.aggregate import merge_heads
from intently.mechanism.door import show
from intently.mechanism.positions.rotary import Angles, rotate
from intently.mechanism.project import split_heads

# Each attribute, and the first version that knows it.
ATTRIBUTES = {"interleaved": 23, "num_heads": 23, "rotary_embedding_dim": 23}


def rotary_embedding_op(
    X: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    rotary_embedding_dim: int = 0,
    num_heads: int | None = None,
) -> Tensor:
    """The operator `RotaryEmbedding` of ONNX: `rotate` with angles looked up by position.

    Args:
        X: `[batch, heads, length, width]`, or `[batch, length, heads * width]` with `num_heads`.
        cos_cache, sin_cache: `[positions, pairs]` with `position_ids`, else `[batch, length, pairs]`.
        position_ids: int64 `[batch, length]`.
        interleaved: 1 pairs feature 2p with 2p + 1, 0 pairs p with p + width/2.
        rotary_embedding_dim: how many first features are turned, twice the pairs; 0 means all.
        num_heads: for inputs of three axes.

    Returns:
        The shape and dtype of X.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    Symbols: X = states, pairs = rotary_embedding_dim / 2.

    Equals / differs: torch has no such call; `rotate` is this one with angles in place of caches.

    Source: ONNX operators, `RotaryEmbedding` 23; Su et al. 2021, arXiv 2104.09864.

    Four tokens that say (1, 0), turned by 0, 1, 2 and 3 quarters:

    >>> import torch
    >>> cos, sin = torch.tensor([[1.0], [0.0], [-1.0], [0.0]]), torch.tensor([[0.0], [1.0], [0.0], [-1.0]])
    >>> rotary_embedding_op(torch.tensor([[[[1.0, 0.0]] * 4]]), cos, sin, torch.arange(4)[None])[0, 0]
    tensor([[ 1.,  0.],
            [ 0.,  1.],
            [-1.,  0.],
            [ 0., -1.]])
    """
    if interleaved not in (0, 1):
        raise ValueError(f"rotary_embedding_op: interleaved is {interleaved}; 0 or 1 is needed")
    if X.dim() not in (3, 4):
        raise ValueError(
            f"rotary_embedding_op: X is {show(X)}; [batch, heads, length, width] or [batch, length, heads * width] is needed"
        )
    if X.dim() == 3 and not num_heads:
        raise ValueError(f"rotary_embedding_op: X is {show(X)}; with three axes num_heads is needed")
    states = split_heads(X, num_heads) if X.dim() == 3 and num_heads else X
    turned = rotary_embedding_dim or states.shape[-1]
    angles = _angles(states, cos_cache, sin_cache, position_ids)
    if 2 * angles.cos.shape[-1] != turned or 2 * angles.sin.shape[-1] != turned:
        raise ValueError(
            f"rotary_embedding_op: cos_cache {show(cos_cache)} and sin_cache {show(sin_cache)} do not turn {turned} features; "
            f"a last axis of {turned} / 2 is needed. A partial rotation says so in rotary_embedding_dim"
        )
    result = rotate(states, angles, layout="interleaved" if interleaved else "half")
    return merge_heads(result) if X.dim() == 3 else result


def _angles(states: Tensor, cos_cache: Tensor, sin_cache: Tensor, position_ids: Tensor | None) -> Angles:
    batch, length = states.shape[0], states.shape[-2]
    caches = f"cos_cache {show(cos_cache)} and sin_cache {show(sin_cache)}"
    if position_ids is None:
        if any(tuple(cache.shape[:-1]) != (batch, length) for cache in (cos_cache, sin_cache)):
            raise ValueError(
                f"rotary_embedding_op: without position_ids {caches} must be [batch, length, pairs] = [{batch}, {length}, ...]"
            )
        return Angles(cos_cache, sin_cache)
    if cos_cache.dim() != 2 or sin_cache.dim() != 2:
        raise ValueError(f"rotary_embedding_op: with position_ids {caches} must be [positions, pairs]")
    if tuple(position_ids.shape) != (batch, length):
        raise ValueError(
            f"rotary_embedding_op: position_ids {show(position_ids)} must be [batch, length] = [{batch}, {length}]"
        )
    known = min(cos_cache.shape[0], sin_cache.shape[0])
    if position_ids.numel() and not 0 <= int(position_ids.min()) <= int(position_ids.max()) < known:
        raise ValueError(
            f"rotary_embedding_op: position_ids reach from {int(position_ids.min())} to {int(position_ids.max())}, "
            f"the caches know 0 to {known - 1}"
        )
    return Angles(cos_cache[position_ids], sin_cache[position_ids])
