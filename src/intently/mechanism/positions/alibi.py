"""ALiBi: no position vectors at all; a logit loses in proportion to the distance, each head at its own rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from intently._typing import Float, Int


@dataclass(frozen=True)
class Alibi:
    """A bias computed from indices, so that no query × key matrix need exist: `bias(query_index, key_index)`."""

    slopes: tuple[float, ...]

    def __call__(
        self, query_index: Int[Tensor, "*query_axes"], key_index: Int[Tensor, "*key_axes"]
    ) -> Float[Tensor, "heads ..."]:
        """`-slope * |query_index - key_index|`, `[heads, query, key]` float32 for indices `[query, 1]` and `[key]`."""
        distance = (query_index - key_index).abs()
        slopes = torch.tensor(self.slopes, device=distance.device)
        return -slopes.view(-1, *[1] * distance.dim()) * distance


def alibi(heads: int, *, exponent: float = 8.0) -> Alibi:
    """The bias of attention with linear biases, for `attention(..., bias=alibi(heads))`.

    `b(h, i, j) = -m_h |i - j|`, `m_h = 2 ** (-exponent * h / heads)` for h = 1, ..., heads a power of two

    Under a causal mask this is the paper's -m (i - j); without one it is symmetric, and the model cannot tell before
    from after. Bloom and MPT add m j instead: the same up to a constant per row, to which softmax is blind. (Not so with
    a sink, nor in reduced precision: m j grows with the text, and bfloat16 tells 256 from 257 no more. Float32 is kept
    here.) It is not scaled: the paper adds it after the factor 1/√width.

    Args:
        heads: number of query heads.
        exponent: the last slope is `2 ** -exponent`; `alibi_bias_max` of MPT.

    Returns:
        A callable bias: int64 indices `[query, 1]` and `[key]` -> `[heads, query, key]`, float32.

    Raises:
        ValueError: fewer than one head.

    Symbols: slope = m, query_index - key_index = i - j.

    Equals / differs: torch `scaled_dot_product_attention` and ONNX `Attention` take it as a matrix (`attn_mask`);
    `nn.MultiheadAttention` too, one per batch and head; FlexAttention as a `score_mod`, without a matrix, like here.

    Source: Press et al. 2021, Train Short, Test Long, arXiv 2108.12409, section 3 and its code (other numbers of heads).

    Four tokens, eight heads, of which the first has slope 1/2:

    >>> import torch
    >>> alibi(8)(torch.arange(4)[:, None], torch.arange(4))[0]
    tensor([[-0.0000, -0.5000, -1.0000, -1.5000],
            [-0.5000, -0.0000, -0.5000, -1.0000],
            [-1.0000, -0.5000, -0.0000, -0.5000],
            [-1.5000, -1.0000, -0.5000, -0.0000]])
    """
    return Alibi(alibi_slopes(heads, exponent=exponent))


def alibi_slopes(heads: int, *, exponent: float = 8.0) -> tuple[float, ...]:
    """A slope per head: a geometric sequence for a power of two, else that of the next lower one and then, from the
    sequence of the next higher, every other.

    >>> alibi_slopes(4), alibi_slopes(3)
    ((0.25, 0.0625, 0.015625, 0.00390625), (0.0625, 0.00390625, 0.25))
    """
    if heads < 1:
        raise ValueError(f"alibi: heads is {heads}; at least one is needed")
    lower = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-exponent * head / lower) for head in range(1, lower + 1)]
    between = [2.0 ** (-exponent * head / (2 * lower)) for head in range(1, 2 * lower, 2)]
    return tuple((slopes + between)[:heads])
