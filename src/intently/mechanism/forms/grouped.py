"""Grouped heads: several query heads read one key and value head; multi-query is the case of a single one."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from intently._typing import Float
from intently.mechanism.attention import attention
from intently.mechanism.door import show
from intently.mechanism.options import Options


def grouped_attention(
    query: Float[Tensor, "*batch heads query width"],
    key: Float[Tensor, "*batch kv_heads key width"],
    value: Float[Tensor, "*batch kv_heads key value_width"],
    **options: Unpack[Options],
) -> Float[Tensor, "*batch heads query value_width"]:
    """Attention whose query heads share key and value heads, so that a cache of them is `heads / kv_heads` times smaller.

        output_h = attention(query_h, key_g, value_g)        g = ⌊h / (heads / kv_heads)⌋

    `kv_heads = heads` is multi-head attention, `kv_heads = 1` multi-query attention; all between is one idea. Sharing
    goes to *consecutive* query heads: with 4 query and 2 kv heads, query heads 0 and 1 read kv head 0. Tiling
    (`key.repeat`: heads 0 and 2 read kv head 0) has the right shape and pairs queries with keys they never learnt.

    Args:
        query: `[*batch, heads, query, width]`.
        key: `[*batch, kv_heads, key, width]`, `heads` a multiple of `kv_heads`.
        value: `[*batch, kv_heads, key, value_width]`.
        options: `mask`, `bias`, `scale`, `softcap`, `sink`, `dropout`, `backend`, as in `attention`; those with an axis
            of heads have one entry per query head.

    Returns:
        `[*batch, heads, query, value_width]`.

    Raises:
        TypeError, ValueError: as in `attention`.

    Symbols: `heads` is H, `kv_heads` is G ("GQA-G"); MQA is GQA-1, MHA is GQA-H.

    Equals / differs:
        torch `scaled_dot_product_attention`: equal with `enable_gqa=True`, which shares likewise.
        `nn.MultiheadAttention`: cannot; keys have as many heads as queries.
        ONNX `Attention`: equal (`kv_num_heads`); its reference implementation tiled before it was corrected.
        FlexAttention: equal with `enable_gqa=True`.

    Source: Shazeer 2019, arXiv 1911.02150 (multi-query); Ainslie et al. 2023, arXiv 2305.13245 (grouped).

    Four tokens, four query heads, two kv heads, one query. Kv head 1 carries the same negative. Scores are 0, so every
    head takes the mean 1111/4; the signs tell that heads 0 and 1 share, then 2 and 3:

    >>> import torch
    >>> tokens = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> query, key, value = torch.zeros(1, 4, 1, 1), torch.zeros(1, 2, 4, 1), torch.stack([tokens, -tokens])[None]
    >>> grouped_attention(query, key, value).flatten()
    tensor([ 277.7500,  277.7500, -277.7500, -277.7500])
    >>> grouped_attention(query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1)).flatten()     # wrong: tiled
    tensor([ 277.7500, -277.7500,  277.7500, -277.7500])
    """
    return attention(query, key, value, **options)


def share_heads(
    shared: Float[Tensor, "*batch kv_heads key width"], heads: int
) -> Float[Tensor, "*batch heads key width"]:
    """One key or value head for every query head: kv head 0 for the first `heads / kv_heads` of them, and so on.

    `attention` needs no such copy; code that knows no groups does.

    Raises:
        ValueError: `heads` is no multiple of the kv heads.

    >>> import torch
    >>> share_heads(torch.tensor([[[1.0]], [[2.0]]]), heads=4).flatten()
    tensor([1., 1., 2., 2.])
    """
    return shared.repeat_interleave(_group("share_heads", heads, shared.shape[-3]), dim=-3)


def pool_heads(
    weight: Float[Tensor, "*features_and_model"], heads: int, kv_heads: int
) -> Float[Tensor, "*pooled_and_model"]:
    """Turn the key or value projection of a multi-head model into one of fewer heads: the mean of each group.

    A start for further training, not an equal model. Queries and output keep their projections.

    Args:
        weight: `[heads * width, model]` as in `torch.nn.Linear`, or a bias `[heads * width]`.
        heads: key heads before, equal to the query heads.
        kv_heads: key heads after, a divisor of `heads`.

    Returns:
        `[kv_heads * width, model]`, or `[kv_heads * width]`.

    Raises:
        ValueError: the heads do not divide.

    Source: Ainslie et al. 2023, arXiv 2305.13245, section 2.1 (mean pooling).

    Four heads of width 1 become two: (1 + 3) / 2 and (10 + 30) / 2:

    >>> import torch
    >>> pool_heads(torch.tensor([1.0, 3.0, 10.0, 30.0]), heads=4, kv_heads=2)
    tensor([ 2., 20.])
    """
    group = _group("pool_heads", heads, kv_heads)
    features = weight.shape[0]
    if features % heads:
        raise ValueError(
            f"pool_heads: weight {show(weight)} has {features} rows, which do not split into {heads} heads. "
            "Rows are output features, as in torch.nn.Linear; is it transposed, or is `heads` that of another layer?"
        )
    apart = weight.unflatten(0, (kv_heads, group, features // heads))
    return apart.mean(dim=1).flatten(0, 1)


def _group(caller: str, heads: int, kv_heads: int) -> int:
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{caller}: {heads} query heads do not divide among {kv_heads} kv heads; every kv head serves "
            "heads / kv_heads query heads, so kv_heads has to divide heads. Arguments exchanged?"
        )
    return heads // kv_heads
