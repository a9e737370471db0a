"""Compression for latent attention: from the states of tokens to queries, latents and the rotary key all heads share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from intently._typing import Float
from intently.mechanism.door import show
from intently.mechanism.project import project


@dataclass(frozen=True, eq=False)
class LatentProjections:
    """The maps down, laid out as in `torch.nn.Linear`; the maps up belong to `latent_attention`.

    Attributes:
        query: `[heads * (content_width + rotary_width), model]`, or `[..., query_rank]` where queries are compressed;
            in every head the content comes first.
        latent: `[rank, model]`.
        rotary_key: `[rotary_width, model]`.
        query_down: `[query_rank, model]`, or None where queries are not compressed.
        latent_gain, query_gain: gains of an RMS norm of the latent and of the compressed query; None for no norm.
        epsilon: added to the mean square in both norms.
    """

    query: Float[Tensor, "query_features query_source"]
    latent: Float[Tensor, "rank model"]
    rotary_key: Float[Tensor, "rotary_width model"]
    query_down: Float[Tensor, "query_rank model"] | None = None
    latent_gain: Float[Tensor, " rank"] | None = None
    query_gain: Float[Tensor, " query_rank"] | None = None
    epsilon: float = 1e-6


class Compressed(NamedTuple):
    """The first three arguments of `latent_attention`; a cache holds the last two."""

    query: Float[Tensor, "*batch heads length both_widths"]
    latent: Float[Tensor, "*batch length rank"]
    rotary_key: Float[Tensor, "*batch length rotary_width"]


def compress(
    states: Float[Tensor, "*batch length model"],
    projections: LatentProjections,
    *,
    heads: int,
    rotate: Callable[[Tensor], Tensor],
) -> Compressed:
    """Project the states to what latent attention reads.

        c^Q = norm(W^DQ h)        q_h = [W^UQ_h c^Q ; rotate(W^QR_h c^Q)]        (h itself in place of c^Q if not compressed)
        c^KV = norm(W^DKV h)      k^R = rotate(W^KR h)

    Args:
        states: `[*batch, length, model]`, at least one batch axis.
        projections: the maps down.
        heads: number of query heads.
        rotate: turns `[*batch, heads, length, rotary_width]` by position, such as `lambda part: rotary(part, positions)`.

    Returns:
        query `[*batch, heads, length, content_width + rotary_width]`, latent `[*batch, length, rank]` and
        rotary key `[*batch, length, rotary_width]`.

    Raises:
        ValueError: features that do not split into heads, or heads no wider than their rotary part.

    Symbols: `states` are h_t, `query_down` W^DQ, `query` W^UQ and W^QR of each head, `latent` W^DKV, `rotary_key` W^KR.

    Equals / differs: no call of torch, ONNX or FlexAttention does this; it precedes them. The norms are in the models
    and in the paper's text (section 3.1.2), not in its equations.

    Source: DeepSeek-AI 2024, *DeepSeek-V2*, arXiv 2405.04434, sections 2.1.2 and 2.1.3.

    Four tokens, one head with one feature of content and one to rotate; the rotation here just changes the sign:

    >>> states, same = torch.tensor([[[1.0], [10.0], [100.0], [1000.0]]]), torch.ones(1, 1)
    >>> query, latent, rotary_key = compress(states, LatentProjections(torch.ones(2, 1), same, same), heads=1,
    ...                                      rotate=torch.neg)
    >>> query[0, 0].tolist()
    [[1.0, -1.0], [10.0, -10.0], [100.0, -100.0], [1000.0, -1000.0]]
    >>> latent.flatten().tolist(), rotary_key.flatten().tolist()
    ([1.0, 10.0, 100.0, 1000.0], [-1.0, -10.0, -100.0, -1000.0])
    """
    source = states
    if projections.query_down is not None:
        source = _norm(F.linear(states, projections.query_down), projections.query_gain, projections.epsilon)
    query = project(source, projections.query, heads=heads)
    turned = projections.rotary_key.shape[0]
    if states.dim() < 3 or query.shape[-1] <= turned:
        raise ValueError(
            f"compress: states {show(states)} and query weight {show(projections.query)} give heads of width "
            f"{query.shape[-1]}, of which {turned} are rotated; [*batch, length, model] and more than {turned} per head "
            "are needed"
        )
    content, rotary = query.split([query.shape[-1] - turned, turned], dim=-1)
    latent = _norm(F.linear(states, projections.latent), projections.latent_gain, projections.epsilon)
    rotary_key = rotate(F.linear(states, projections.rotary_key).unsqueeze(-3)).squeeze(-3)
    return Compressed(torch.cat([content, rotate(rotary)], dim=-1), latent.to(query.dtype), rotary_key)


def _norm(states: Tensor, gain: Tensor | None, epsilon: float) -> Tensor:
    return states if gain is None else F.rms_norm(states, states.shape[-1:], gain.to(states.dtype), epsilon)
