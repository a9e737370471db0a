"""Relative bias: a learned number per head and per bucket of distances, fine for near tokens and coarse for far ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from intently._typing import Float, Int


class RelativeBias(nn.Module):
    """T5's relative position bias, for `attention(..., bias=RelativeBias(...))`.

    `b(h, i, j) = weight[bucket(j - i), h]`, where the bucket is the distance itself for half the buckets and grows with
    its logarithm up to `max_distance` for the rest; farther tokens share the last. One table serves all layers of T5,
    and T5 does not divide scores by √width: call attention with `scale=1`.

    Args:
        buckets: number of rows of the table (T5: 32).
        max_distance: from here on all distances share a bucket (T5: 128).
        heads: number of query heads.
        bidirectional: True for an encoder, where half of the buckets are for keys after the query. False for a decoder,
            where such keys, hidden anyway, share the bucket of distance 0. The two read the same table differently.

    Symbols: key_index - query_index = the paper's offset, `weight` = `relative_attention_bias.weight` in Hugging Face.

    Equals / differs: torch `scaled_dot_product_attention` and ONNX `Attention` take it as a matrix (`attn_mask`);
    `nn.MultiheadAttention` too, one per batch and head; FlexAttention as a `score_mod` that reads the table.

    Source: Raffel et al. 2019, arXiv 1910.10683, section 2.1, and its code (the buckets).

    Four tokens of a decoder, a row per distance:

    >>> import torch
    >>> bias = RelativeBias(8, 16, heads=1, bidirectional=False)
    >>> _ = bias.weight.data.copy_(torch.tensor([[0.0], [1.0], [10.0], [100.0], [4.0], [5.0], [6.0], [7.0]]))
    >>> bias(torch.arange(4)[:, None], torch.arange(4)).tolist()
    [[[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [10.0, 1.0, 0.0, 0.0], [100.0, 10.0, 1.0, 0.0]]]
    """

    def __init__(self, buckets: int, max_distance: int, heads: int, bidirectional: bool):
        super().__init__()
        _check_buckets(buckets, max_distance, bidirectional)
        if heads < 1:
            raise ValueError(f"RelativeBias: heads is {heads}; at least one is needed")
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.zeros(buckets, heads))

    def forward(
        self, query_index: Int[Tensor, "*query_axes"], key_index: Int[Tensor, "*key_axes"]
    ) -> Float[Tensor, "heads ..."]:
        """`[heads, query, key]` for indices `[query, 1]` and `[key]`, in the dtype of the table."""
        bucket = relative_bucket(
            key_index - query_index,
            buckets=self.buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return self.weight[bucket].movedim(-1, 0)

    def extra_repr(self) -> str:
        buckets, heads = self.weight.shape
        return f"{buckets}, {self.max_distance}, heads={heads}, bidirectional={self.bidirectional}"


def relative_bucket(
    offset: Int[Tensor, "*any"], *, buckets: int, max_distance: int, bidirectional: bool
) -> Int[Tensor, "*any"]:
    """The bucket of each offset `key - query`, int64 of the same shape.

    The logarithm is taken in float32, as T5 was trained: where a bucket ends exactly on a whole number, rounding decides.

    >>> import torch
    >>> relative_bucket(torch.tensor([-100, -9, -2, 0, 2]), buckets=8, max_distance=16, bidirectional=False).tolist()
    [7, 6, 2, 0, 0]
    """
    _check_buckets(buckets, max_distance, bidirectional)
    offset = offset.to(torch.int64)
    if bidirectional:
        buckets //= 2
        first = (offset > 0).to(torch.int64) * buckets
        distance = offset.abs()
    else:
        first = torch.zeros_like(offset)
        distance = (-offset).clamp(min=0)
    exact = buckets // 2
    ratio = distance.clamp(min=1).float() / exact  # distance 0 is exact: the clamp spares its logarithm
    steps = (torch.log(ratio) / math.log(max_distance / exact) * (buckets - exact)).to(torch.int64)
    return first + torch.where(distance < exact, distance, (exact + steps).clamp(max=buckets - 1))


def _check_buckets(buckets: int, max_distance: int, bidirectional: bool) -> None:
    exact = buckets // 4 if bidirectional else buckets // 2
    if exact < 1 or (bidirectional and buckets % 2):
        least = "an even number of at least 4" if bidirectional else "at least 2"
        raise ValueError(f"RelativeBias: buckets is {buckets}; {least} is needed with bidirectional={bidirectional}")
    if max_distance <= exact:
        raise ValueError(
            f"RelativeBias: max_distance is {max_distance}, yet distances below {exact} have a bucket each "
            f"({buckets} buckets, bidirectional={bidirectional}); more than {exact} is needed. Arguments swapped?"
        )
