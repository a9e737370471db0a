"""Linear attention: without the softmax the keys can be summed up before any query asks; a contrast, with its limits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from intently._typing import Bool, Float
from intently.mechanism.door import Inputs, admit, own_precision, show
from intently.mechanism.forms.grouped import share_heads

_BLOCK = 64  # tokens compared with each other directly; the sums hand on the rest


class Sums(NamedTuple):
    """All that linear attention remembers of the past, however long: nothing grows with the number of tokens."""

    mixed: Float[Tensor, "*batch heads width value_width"]  # Σ φ(k) vᵀ
    total: Float[Tensor, "*batch heads width"]  # Σ φ(k)


def linear_attention(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    *,
    causal: bool = False,
    keep: Bool[Tensor, "*batch key"] | None = None,
) -> Float[Tensor, "*lead query value_width"]:
    """For each query, the mean of the values, weighted by a product of features that are never below 0.

        φ(x)   = elu(x) + 1 = x + 1 where x > 0, eˣ elsewhere
        output = φ(q) · Σ φ(k) vᵀ  /  φ(q) · Σ φ(k)          sums over all keys, or those up to the query

    The sums are made once, so time and memory grow with the length and not with its square. What that costs:

    - no softmax, so another model: weights trained for one do not serve the other, and there is no scale;
    - no -∞: a pair cannot be hidden; only keys for all queries (`keep`) and the future (`causal`) can. Windows,
      documents, biases, softcap and sinks have no place, which is why there is no `mask` here;
    - no sharp choice: the products φ(q) · φ(k) form a matrix of rank at most `width`, and every share grows only in
      proportion; among more tokens than `width` the queries cannot single out one each, as softmax can.

    Args:
        query: `[*batch, heads, query, width]`, or `[*batch, query, width]` with fewer than 4 axes.
        key: `[*batch, kv_heads, key, width]`; consecutive query heads share, as in `attention`.
        value: `[*batch, kv_heads, key, value_width]`.
        causal: key j counts for query i when j <= i; needs as many queries as keys.
        keep: True for keys that are real tokens, `[*batch, key]`.

    Returns:
        `[*batch, heads, query, value_width]` in the dtype of the values; 0 for a query that sees no key.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    Symbols: `query`, `key`, `value` are Q_i, K_j, V_j; `Sums` are S_i and Z_i.

    Equals / differs:
        torch `scaled_dot_product_attention`, `nn.MultiheadAttention`, ONNX `Attention`, FlexAttention: none can; their
            weights are a softmax. (With φ replaced by exact exponential features the two would agree; those are infinite.)
        The authors' code adds 1e-6 to the denominator; here a denominator of 0 gives 0 and others are not changed.

    Source: Katharopoulos et al. 2020, *Transformers are RNNs*, arXiv 2006.16236, sections 3.2 and 3.3.

    Four tokens by hand. φ(0) = 1 for all keys but the third, φ(2) = 3; so that has 3 shares against 1 each, and the
    causal rows are 1/1, 11/2, 311/5, 1311/6:

    >>> import torch
    >>> key, value = torch.tensor([[0.0], [0.0], [2.0], [0.0]]), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> linear_attention(torch.zeros(4, 1), key, value, causal=True).flatten()
    tensor([  1.0000,   5.5000,  62.2000, 218.5000])
    """
    inputs = admit(query, key, value)
    if causal and inputs.queries != inputs.keys:
        raise ValueError(
            f"linear_attention: causal needs as many queries as keys, there are {inputs.queries} and {inputs.keys}. "
            "Continuing a sequence? Hand its sums to linear_attention_step"
        )
    with own_precision(query):
        query, key, value = _featured(inputs, keep)
        if causal:
            mixed = _causal(query, key, value)
        else:
            mixed = _divide(query @ (key.mT @ value), (query * key.sum(-2, keepdim=True)).sum(-1, keepdim=True))
    return inputs.leave(mixed.to(inputs.value.dtype))


def linear_attention_step(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead query width"],
    value: Float[Tensor, "*kv_lead query value_width"],
    sums: Sums | None = None,
) -> tuple[Float[Tensor, "*lead query value_width"], Sums]:
    """Causal linear attention as a recurrence: the next token or tokens, and the sums of everything up to them.

    Args:
        query, key, value: the new tokens, as in `linear_attention`.
        sums: from the step before; None at the start.

    Returns:
        the output of the new tokens, and the sums to hand to the next step (float32 for half precision).

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, section 3.4.

    >>> import torch
    >>> sums, nothing = None, torch.zeros(1, 1)
    >>> for token in (1.0, 10.0, 100.0, 1000.0):                             # equal shares: 1/1, 11/2, 111/3, 1111/4
    ...     output, sums = linear_attention_step(nothing, nothing, torch.tensor([[token]]), sums)
    ...     print(output.item())
    1.0
    5.5
    37.0
    277.75
    """
    inputs = admit(query, key, value)
    if inputs.queries != inputs.keys:
        raise ValueError(
            f"linear_attention_step: {inputs.queries} queries and {inputs.keys} keys; the new tokens only are needed, "
            "for the sums hold the earlier ones"
        )
    with own_precision(query):
        query, key, value = _featured(inputs, None)
        output, sums = _advance(query, key, value, sums or _nothing_yet(query, value))
    return inputs.leave(output.to(inputs.value.dtype)), sums


def _featured(inputs: Inputs, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Features of queries and keys, one key head per query head, in float32 at least."""
    exact = torch.promote_types(inputs.query.dtype, torch.float32)
    heads = inputs.query.shape[-3]
    query = F.elu(inputs.query.to(exact)) + 1
    key = share_heads(F.elu(inputs.key.to(exact)) + 1, heads)
    if keep is not None:
        wanted = (*key.shape[:-3], key.shape[-2])
        if keep.dtype != torch.bool or tuple(keep.shape) not in (wanted, wanted[-1:]):
            raise ValueError(
                f"linear_attention: keep is {show(keep)}; bool{list(wanted)} is needed, True for keys that are real "
                "tokens. Linear attention can hide a key from all queries, not a pair; see its limits"
            )
        key = torch.where(keep.unsqueeze(-1).unsqueeze(-3), key, 0.0)
    return query, key, share_heads(inputs.value.to(exact), heads)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Block after block, so that the sums are kept once per block and not once per token."""
    sums, outputs = _nothing_yet(query, value), []
    for at in range(0, query.shape[-2], _BLOCK):
        block = slice(at, at + _BLOCK)
        output, sums = _advance(query[..., block, :], key[..., block, :], value[..., block, :], sums)
        outputs.append(output)
    return torch.cat(outputs, dim=-2) if outputs else query.new_zeros(*query.shape[:-1], value.shape[-1])


def _advance(query: Tensor, key: Tensor, value: Tensor, sums: Sums) -> tuple[Tensor, Sums]:
    near = (query @ key.mT).tril()  # among the new tokens; the sums are all that is older
    mixed = near @ value + query @ sums.mixed
    total = near.sum(-1, keepdim=True) + query @ sums.total.unsqueeze(-1)
    return _divide(mixed, total), Sums(sums.mixed + key.mT @ value, sums.total + key.sum(-2))


def _nothing_yet(query: Tensor, value: Tensor) -> Sums:
    lead, width = query.shape[:-2], query.shape[-1]
    return Sums(query.new_zeros(*lead, width, value.shape[-1]), query.new_zeros(*lead, width))


def _divide(mixed: Tensor, total: Tensor) -> Tensor:
    # The denominator is 0 only where no key counts; dividing by 1 there keeps the gradient a number too.
    nothing = total == 0
    return (mixed / total.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)
