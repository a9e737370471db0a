"""Two float64 oracles, attention written out plainly and torch's own math path; both are backends as well."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from intently._typing import Float
from intently.mechanism.backends.stages import Stages
from intently.mechanism.door import Inputs, admit, own_precision
from intently.mechanism.options import TruthOptions


def reference(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    **options: Unpack[TruthOptions],
) -> Stages:
    """The truth that everything else is held against: `attention` in float64, by exp and sum, with every stage.

    It shares the checks of `attention` and none of its arithmetic, and is differentiable. Arguments and errors are
    those of `attention`; there is no dropout, for a truth is not random.

    Returns:
        `Stages` in float64.

    >>> import torch
    >>> one = torch.ones(1, 1, 4, dtype=torch.float16)
    >>> reference(one, one, one).output
    tensor([[[1., 1., 1., 1.]]], dtype=torch.float64)
    """
    with own_precision(query):
        inputs = admit(query, key, value, **options)
        return Stages(*(inputs.leave(each) for each in _written_out(inputs)))


def torch_math(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    **options: Unpack[TruthOptions],
) -> Float[Tensor, "*lead query value_width"]:
    """The output of `attention` in float64 through torch's math path, a second witness when `reference` is doubted.

    Two terms that torch's call lacks are expressed in those it has: a sink is one more key and value of zeros whose
    bias is the sink, and softcapped logits go in as the bias of a query of zeros. Arguments and errors are those of
    `attention`.

    >>> import torch
    >>> one = torch.ones(1, 1, 4)
    >>> torch_math(one, one, one, sink=0.5)[0, 0, 0]                         # exp(2) / (exp(2) + exp(0.5))
    tensor(0.8176, dtype=torch.float64)
    """
    with own_precision(query):
        inputs = admit(query, key, value, **options)
        return inputs.leave(_by_torch(inputs, torch.float64))


def by_oracle(inputs: Inputs) -> Tensor:
    """The backend `"oracle"`: `reference`, rounded once to the dtype of the values."""
    return _written_out(inputs).output.to(inputs.value.dtype)


def by_math(inputs: Inputs) -> Tensor:
    """The backend `"math"`: `torch_math` in the dtype of the query, float32 for half precision."""
    dtype = inputs.query.dtype
    inner = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return _by_torch(inputs, inner).to(dtype)


def _written_out(inputs: Inputs) -> Stages:
    query = inputs.query.double()
    keys, values = (_one_per_query_head(each.double(), query) for each in (inputs.key, inputs.value))

    scores = torch.einsum("...qw,...kw->...qk", query, keys)
    logits = inputs.scale * scores
    if inputs.softcap is not None:
        logits = inputs.softcap * (logits / inputs.softcap).tanh()
    bias, mask = inputs.added(), inputs.seen()
    if bias is not None:
        logits = logits + bias.double()
    if mask is not None:
        logits = torch.where(mask, logits, -torch.inf)

    # The weights do not depend on the number subtracted, so it is a constant to the gradient as well.
    columns = logits
    if inputs.sink is not None:
        sink_logit = inputs.sink.double().reshape(-1, 1, 1).expand(*logits.shape[:-1], 1)
        columns = torch.cat((logits, sink_logit), dim=-1)
    if columns.shape[-1] == 0:
        weights = logits
    else:
        top = columns.detach().amax(dim=-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0.0, top)
        total = torch.exp(columns - top).sum(dim=-1, keepdim=True)
        weights = torch.exp(logits - top) / torch.where(total == 0, 1.0, total)
    output = torch.einsum("...qk,...kv->...qv", weights, values)
    return Stages(scores, logits, weights, output)


def _by_torch(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    query = inputs.query.to(dtype)
    key, value = (_one_per_query_head(each.to(dtype), query) for each in (inputs.key, inputs.value))
    if 0 in value.shape or 0 in query.shape:
        return query @ key.mT @ value  # zeros, with a way back for gradients of zero
    added = query.new_zeros(*query.shape[:-1], key.shape[-2])
    if inputs.softcap is not None:
        added = inputs.softcap * torch.tanh(inputs.scale * (query @ key.mT) / inputs.softcap)
        query = torch.zeros_like(query)
    bias, mask = inputs.added(), inputs.seen()
    if bias is not None:
        added = added + bias.to(dtype)
    if mask is not None:
        added = added.masked_fill(~mask, -torch.inf)
    if inputs.sink is not None:
        added = torch.cat([added, inputs.sink.to(dtype).reshape(-1, 1, 1).expand(*added.shape[:-1], 1)], dim=-1)
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    blind = (added == -torch.inf).all(dim=-1, keepdim=True)
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=added.masked_fill(blind, 0.0), dropout_p=inputs.dropout, scale=inputs.scale
        )
    return output.masked_fill(blind, 0.0)


def _one_per_query_head(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values, each kv head repeated for the consecutive query heads that read it."""
    heads, kv_heads = query.shape[-3], shared.shape[-3]
    reads = [head * kv_heads // heads for head in range(heads)]
    return shared[..., reads, :, :]
