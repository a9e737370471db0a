"""Two float64 oracles: attention written out plainly, and torch's own math path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from intently._typing import Bool, Float
from intently.masks import Mask
from intently.mechanism.attention import Stages
from intently.mechanism.door import admit


def reference(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    *,
    mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
    bias: Float[Tensor, "*bias_axes"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, "*sink_axes"] | float | None = None,
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
    inputs = admit(query, key, value, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink)
    keys, values = _one_per_query_head(inputs.key, inputs.query), _one_per_query_head(inputs.value, inputs.query)

    scores = torch.einsum("...qw,...kw->...qk", inputs.query.double(), keys)
    logits = inputs.scale * scores
    if inputs.softcap is not None:
        logits = inputs.softcap * (logits / inputs.softcap).tanh()
    if inputs.bias is not None:
        logits = logits + inputs.bias.double()
    mask = inputs.seen()
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
    return Stages(*(inputs.leave(each) for each in (scores, logits, weights, output)))


def torch_math(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    *,
    mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
    bias: Float[Tensor, "*bias_axes"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, "*sink_axes"] | float | None = None,
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
    inputs = admit(query, key, value, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink)
    query = inputs.query.double()
    key, value = _one_per_query_head(inputs.key, query), _one_per_query_head(inputs.value, query)
    added = query.new_zeros(*query.shape[:-1], key.shape[-2])
    if inputs.softcap is not None:
        added = inputs.softcap * torch.tanh(inputs.scale * (query @ key.mT) / inputs.softcap)
        query = torch.zeros_like(query)
    if inputs.bias is not None:
        added = added + inputs.bias.double()
    mask = inputs.seen()
    if mask is not None:
        added = added.masked_fill(~mask, -torch.inf)
    if inputs.sink is not None:
        added = torch.cat([added, inputs.sink.double().reshape(-1, 1, 1).expand(*added.shape[:-1], 1)], dim=-1)
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    if key.shape[-2] == 0:
        return inputs.leave(query.new_zeros(*query.shape[:-1], value.shape[-1]))
    blind = (added == -torch.inf).all(dim=-1, keepdim=True)
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=added.masked_fill(blind, 0.0), scale=inputs.scale
        )
    return inputs.leave(output.masked_fill(blind, 0.0))


def _one_per_query_head(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values in float64, each kv head repeated for the consecutive query heads that read it."""
    heads, kv_heads = query.shape[-3], shared.shape[-3]
    reads = [head * kv_heads // heads for head in range(heads)]
    return shared.double()[..., reads, :, :]
