"""One attention written in many ways: the same projections, and a function of q, k, v that differs.

Sizes differ from each other: 2 samples, 3 heads, 5 positions, query width 4, value width 6, input width 7.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, HEADS, LENGTH, WIDTH, VALUE, INPUT = 2, 3, 5, 4, 6, 7
SCALE = 0.5  # 1 / √4


class Written(nn.Module):
    """Projects `x` to `[batch, heads, position, width]`; `mix(q, k, v)` gives the output in that layout."""

    def __init__(self, mix: Callable[..., Tensor], kv_heads: int = HEADS, heads: int = HEADS):
        super().__init__()
        self.mix, self.heads, self.kv_heads = mix, heads, kv_heads
        self.q, self.k = nn.Linear(INPUT, heads * WIDTH), nn.Linear(INPUT, kv_heads * WIDTH)
        self.v, self.out = nn.Linear(INPUT, kv_heads * VALUE), nn.Linear(heads * VALUE, INPUT)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        other = x if memory is None else memory
        q = self.q(x).unflatten(-1, (self.heads, WIDTH)).transpose(1, 2)
        k = self.k(other).unflatten(-1, (self.kv_heads, WIDTH)).transpose(1, 2)
        v = self.v(other).unflatten(-1, (self.kv_heads, VALUE)).transpose(1, 2)
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """The attention one module further in, so that its path is `inner`."""

    def __init__(self, mix: Callable[..., Tensor], **options: int):
        super().__init__()
        torch.manual_seed(1)
        self.inner = Written(mix, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def content(samples: int = BATCH, length: int = LENGTH, seed: int = 2) -> Tensor:
    return torch.randn(samples, length, INPUT, generator=torch.Generator().manual_seed(seed))


def lines(function: Callable[..., Tensor], marker: str) -> set[int]:
    """Line numbers of the lines of a function that end in a comment with `marker`."""
    text, first = inspect.getsourcelines(function)
    return {first + i for i, line in enumerate(text) if line.rstrip().endswith(f"# {marker}")}


# -- products of queries and keys, and of weights and values --------------------------------------------------------


def by_operator(q, k, v):
    weights = (q @ k.transpose(-2, -1) * SCALE).softmax(-1)  # weights
    return weights @ v  # values


def by_matmul(q, k, v):
    weights = F.softmax(torch.matmul(q, k.mT) / math.sqrt(q.shape[-1]), dim=-1)  # weights
    return torch.matmul(weights, v)  # values


def by_method(q, k, v):
    weights = q.matmul(k.permute(0, 1, 3, 2)).mul(SCALE).softmax(dim=-1)  # weights
    return weights.matmul(v)  # values


def keys_first(q, k, v):
    weights = (k @ q.mT * SCALE).mT.softmax(-1)  # weights
    return (v.mT @ weights.mT).mT  # values


def by_bmm(q, k, v):
    batch = q.shape[0]
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) * SCALE, -1)  # weights
    return torch.bmm(weights, v).unflatten(0, (batch, -1))  # values


def by_bmm_heads_outside(q, k, v):
    batch = q.shape[0]
    q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
    weights = torch.softmax(q.bmm(k.mT) * SCALE, -1)  # weights
    return weights.bmm(v).unflatten(0, (-1, batch)).transpose(0, 1)  # values


def by_baddbmm(q, k, v):
    batch = q.shape[0]
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    empty = torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    weights = torch.baddbmm(empty, q, k.mT, beta=0, alpha=SCALE).softmax(-1)  # weights
    return torch.bmm(weights, v).unflatten(0, (batch, -1))  # values


def by_einsum(q, k, v):
    weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(SCALE).softmax(-1)  # weights
    return torch.einsum("bhij,bhjd->bhid", weights, v)  # values


def by_einsum_heads_inside(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE, dim=-1)  # weights
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)  # values


def by_einsum_heads_last(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bqkh", q, k) * SCALE, dim=2)  # weights
    return torch.einsum("bqkh,bkhd->bqhd", weights, v).transpose(1, 2)  # values


def by_einsum_keys_before_queries(q, k, v):
    weights = torch.softmax(torch.einsum("bhid,bhjd->bhji", q, k) * SCALE, dim=-2)  # weights
    return torch.einsum("bhji,bhjd->bhid", weights, v)  # values


def by_einsum_ellipsis(q, k, v):
    weights = torch.softmax(torch.einsum("...id,...jd->...ij", q, k) * SCALE, -1)  # weights
    return torch.einsum("...ij,...jd->...id", weights, v)  # values


def by_einsum_implicit(q, k, v):
    weights = torch.softmax(torch.einsum("...id,...jd", q, k) * SCALE, -1)  # weights
    return torch.einsum("...ij,...jd", weights, v).mT  # values


def by_einsum_list(q, k, v):
    weights = torch.softmax(torch.einsum("b h i d, b h j d -> b h i j", [q, k]) * SCALE, -1)  # weights
    return torch.einsum("b h i j, b h j d -> b h i d", [weights, v])  # values


def by_product_and_sum(q, k, v):
    weights = ((q[..., :, None, :] * k[..., None, :, :]).sum(-1) * SCALE).softmax(-1)  # weights
    return (weights[..., None] * v[..., None, :, :]).sum(-2)  # values


def by_product_and_torch_sum(q, k, v):
    weights = torch.softmax(torch.sum(q.unsqueeze(3) * k.unsqueeze(2), dim=-1) * SCALE, dim=-1)  # weights
    return torch.sum(weights.unsqueeze(-1) * v.unsqueeze(2), dim=3)  # values


PRODUCTS = (
    by_operator, by_matmul, by_method, keys_first, by_bmm, by_bmm_heads_outside, by_baddbmm, by_einsum,
    by_einsum_heads_inside, by_einsum_heads_last, by_einsum_keys_before_queries, by_einsum_ellipsis,
    by_einsum_implicit, by_einsum_list, by_product_and_sum, by_product_and_torch_sum,
)  # fmt: skip


# -- softmax --------------------------------------------------------------------------------------------------------


def exp_over_sum(q, k, v):
    e = torch.exp(q @ k.mT * SCALE)  # weights
    return (e / e.sum(-1, keepdim=True)) @ v  # values


def exp_of_the_gap_to_the_maximum(q, k, v):
    logits = q @ k.mT * SCALE
    e = (logits - logits.amax(-1, keepdim=True)).exp()  # weights
    return (e / torch.sum(e, dim=-1, keepdim=True)) @ v  # values


def exp_minus_logsumexp(q, k, v):
    logits = q @ k.mT * SCALE
    weights = torch.exp(logits - torch.logsumexp(logits, -1, keepdim=True))  # weights
    return weights @ v  # values


def log_softmax_exp(q, k, v):
    weights = F.log_softmax(q @ k.mT * SCALE, -1).exp()  # weights
    return weights @ v  # values


def softmax_module(q, k, v):
    weights = nn.Softmax(dim=-1)(q @ k.mT * SCALE)  # weights
    return weights @ v  # values


def divided_at_the_end(q, k, v):
    e = torch.exp(q @ k.mT * SCALE)  # weights
    return e @ v / e.sum(-1, keepdim=True)  # values


def in_a_wider_type(q, k, v):
    weights = F.softmax(q @ k.mT * SCALE, dim=-1, dtype=torch.float64).to(q.dtype)  # weights
    return weights @ v  # values


def cast_and_copied(q, k, v):
    weights = torch.softmax((q @ k.mT * SCALE).double(), -1).type_as(v).contiguous()  # weights
    return weights @ v  # values


SOFTMAXES = (
    exp_over_sum, exp_of_the_gap_to_the_maximum, exp_minus_logsumexp, log_softmax_exp, softmax_module,
    divided_at_the_end, in_a_wider_type, cast_and_copied,
)  # fmt: skip


# -- where the factor stands ----------------------------------------------------------------------------------------


def factor_on_q(q, k, v):
    return ((q * SCALE) @ k.mT).softmax(-1) @ v


def factor_on_k(q, k, v):
    return (q @ (k / 2.0).mT).softmax(-1) @ v


def factor_on_both(q, k, v):
    root = WIDTH**-0.25
    return ((q * root) @ (k * root).mT).softmax(-1) @ v


def factor_on_q_and_after(q, k, v):
    return (((q * 0.25) @ k.mT) * 3.0).softmax(-1) @ v  # 0.75


def factor_on_columns(q, k, v):
    return ((q / math.sqrt(WIDTH)) @ k.transpose(-1, -2)).softmax(-1) @ v


def factor_missing(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def factor_as_tensor(q, k, v):
    return (q @ k.mT / torch.sqrt(torch.tensor(float(WIDTH)))).softmax(-1) @ v


def factor_in_place(q, k, v):
    logits = q @ k.mT
    logits /= 2.0
    return logits.softmax(-1) @ v


def factor_of_baddbmm(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    empty = torch.zeros(1, dtype=q.dtype)
    logits = torch.baddbmm(empty, q, k.mT, beta=0, alpha=0.125)
    return (logits.softmax(-1) @ v).unflatten(0, (-1, HEADS))


def factor_of_each_head(q, k, v):
    logits = q @ k.mT * torch.tensor([0.5, 0.25, 1.0])[:, None, None]
    return logits.softmax(-1) @ v


FACTORS = {
    factor_on_q: 0.5, factor_on_k: 0.5, factor_on_both: 0.5, factor_on_q_and_after: 0.75, factor_on_columns: 0.5,
    factor_missing: 1.0, factor_as_tensor: 0.5, factor_in_place: 0.5, factor_of_baddbmm: 0.125,
}  # fmt: skip


# -- masks ----------------------------------------------------------------------------------------------------------


def future(q: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)


def mask_added(q, k, v):
    bias = torch.zeros(LENGTH, LENGTH, dtype=q.dtype).masked_fill(future(q), float("-inf"))
    return (q @ k.mT * SCALE + bias).softmax(-1) @ v


def mask_added_finite(q, k, v):
    return (q @ k.mT * SCALE + torch.finfo(q.dtype).min * future(q).to(q.dtype)).softmax(-1) @ v


def mask_where(q, k, v):
    return torch.where(future(q), -1e9, q @ k.mT * SCALE).softmax(-1) @ v


def mask_filled(q, k, v):
    return (q @ k.mT * SCALE).masked_fill(future(q), float("-inf")).softmax(-1) @ v


def mask_filled_before_the_factor(q, k, v):
    return (q @ k.mT).masked_fill(future(q), -1e20).mul(SCALE).softmax(-1) @ v


def mask_filled_in_place(q, k, v):
    logits = q @ k.mT * SCALE
    logits.masked_fill_(future(q), torch.finfo(logits.dtype).min)
    return logits.softmax(-1) @ v


def mask_set_by_index(q, k, v):
    logits = q @ k.mT * SCALE
    logits[:, :, future(q)] = float("-inf")
    return logits.softmax(-1) @ v


def mask_multiplied_in(q, k, v):
    weights = (q @ k.mT * SCALE).softmax(-1) * ~future(q)
    return weights / weights.sum(-1, keepdim=True) @ v


def mask_multiplied_into_exp(q, k, v):
    e = (q @ k.mT * SCALE).exp() * (~future(q)).to(q.dtype)
    return e / e.sum(-1, keepdim=True) @ v


def mask_in_baddbmm(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    bias = torch.zeros(LENGTH, LENGTH, dtype=q.dtype).masked_fill(future(q), -1e9).expand(q.shape[0], -1, -1)
    return (torch.baddbmm(bias, q, k.mT, alpha=SCALE).softmax(-1) @ v).unflatten(0, (-1, HEADS))


MASKS = (
    mask_added, mask_added_finite, mask_where, mask_filled, mask_filled_before_the_factor, mask_filled_in_place,
    mask_set_by_index, mask_multiplied_in, mask_multiplied_into_exp, mask_in_baddbmm,
)  # fmt: skip


# -- heads, dropout, softcap ----------------------------------------------------------------------------------------


def heads_stacked(q, k, v):
    weights = [(a @ b.mT * SCALE).softmax(-1) for a, b in zip(q.unbind(1), k.unbind(1), strict=True)]
    return torch.stack(weights, 1) @ v


def scores_stacked(q, k, v):
    scores = torch.stack([q[:, h] @ k[:, h].mT for h in range(q.shape[1])], dim=1)
    return (scores * SCALE).softmax(-1) @ v


def heads_one_by_one(q, k, v):
    out = [((a @ b.mT) * SCALE).softmax(-1) @ c for a, b, c in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)]
    return torch.stack(out, 1)


def dropped(q, k, v):
    weights = F.dropout((q @ k.mT * SCALE).softmax(-1), 0.25, training=True)
    return weights @ v


def dropped_in_eval(q, k, v):
    weights = F.dropout((q @ k.mT * SCALE).softmax(-1), 0.25, training=False)
    return weights @ v


def capped(q, k, v):
    logits = torch.tanh(q @ k.mT * SCALE / 2.0) * 2.0
    return logits.softmax(-1) @ v


def grouped_by_repeat(q, k, v):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return (q @ k.mT * SCALE).softmax(-1) @ v


def grouped_by_expand(q, k, v):
    batch, groups = k.shape[:2]
    k, v = (t[:, :, None].expand(-1, -1, q.shape[1] // groups, -1, -1).reshape(batch, -1, *t.shape[2:]) for t in (k, v))
    return (q @ k.mT * SCALE).softmax(-1) @ v


def grouped_by_broadcast(q, k, v):
    grouped = q.unflatten(1, (k.shape[1], -1))
    weights = (grouped @ k[:, :, None].mT * SCALE).softmax(-1)
    return (weights @ v[:, :, None]).flatten(1, 2)


def biased(q, k, v):
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return (q @ k.mT * SCALE - 0.3 * distance.abs()).softmax(-1) @ v


# -- fused ----------------------------------------------------------------------------------------------------------


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)  # weights


def fused_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # weights


def fused_bool(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, ~future(q))  # weights


def fused_float(q, k, v):
    bias = torch.zeros(LENGTH, LENGTH, dtype=q.dtype).masked_fill(future(q), float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # weights


def fused_scale(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)  # weights


def fused_factor_on_q(q, k, v):
    return F.scaled_dot_product_attention(q * 3.0, k, v)  # weights


def fused_dropout(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)  # weights


def fused_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # weights
