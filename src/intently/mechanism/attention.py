"""Attention: the five stages composed, or torch's fused kernel under the same contract."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from intently._typing import Bool, Float
from intently.masks import Mask
from intently.mechanism.aggregate import aggregate
from intently.mechanism.door import Inputs, admit, show
from intently.mechanism.mask_scale import mask_scale
from intently.mechanism.normalize import normalize
from intently.mechanism.score import score

Backend = Literal["auto", "stages", "fused"]


class Stages(NamedTuple):
    """What each stage hands on: all but `output` are `[*batch, heads, query, key]`."""

    scores: Float[Tensor, "*lead query key"]  # q·k, not scaled
    logits: Float[Tensor, "*lead query key"]  # after scale, softcap, bias and mask; -inf where hidden
    weights: Float[Tensor, "*lead query key"]  # after softmax, before dropout
    output: Float[Tensor, "*lead query value_width"]


class Choice(NamedTuple):
    """The backend that runs, and why."""

    name: Literal["stages", "fused"]
    reason: str


def attention(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    *,
    mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
    bias: Float[Tensor, "*bias_axes"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, "*sink_axes"] | float | None = None,
    dropout: float = 0.0,
    backend: Backend = "auto",
) -> Float[Tensor, "*lead query value_width"]:
    """For each query, mix the values of the keys it may see by how well they match.

    `softmax(bias + cap(scale * query @ key.T), over the keys that mask allows) @ value`. A query that may see nothing
    receives 0, and passes back gradient 0, in every backend.

    Args:
        query: `[*batch, heads, query, width]`; with fewer than 4 axes `[*batch, query, width]`, a single head.
        key: `[*batch, kv_heads, key, width]`; query head h reads kv head `h // (heads / kv_heads)`.
        value: `[*batch, kv_heads, key, value_width]`.
        mask: a `Mask`, or bool broadcastable to `[*batch, heads, query, key]`; True = may see.
        bias: float added to the logits after the softcap, broadcastable likewise; `-inf` hides too.
        scale: factor on q·k; `1 / sqrt(width)` when left out.
        softcap: c squeezes the scaled scores into (-c, c) by `c * tanh(x / c)`.
        sink: a logit per head, `[heads]`, that joins the softmax's denominator; 0 is the off-by-one softmax.
        dropout: probability of dropping a weight; applied whenever it is above 0, so pass 0 in evaluation.
        backend: `"stages"`, `"fused"` (`torch.nn.functional.scaled_dot_product_attention`), or `"auto"`.

    Returns:
        `[*batch, heads, query, value_width]` in the dtype of the values; half precision is computed in float32 inside.

    Raises:
        TypeError, ValueError: arguments that do not fit, or `"fused"` asked for what it cannot express.

    Source: Vaswani et al. 2017, equation 1; ONNX `Attention`, opset 23; torch `scaled_dot_product_attention`.

    >>> import torch
    >>> query, key, value = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.tensor([[[[2.0], [4.0]]]])
    >>> attention(query, key, value, mask=torch.ones(2, 2).tril().bool())    # row 0 sees key 0, row 1 sees both
    tensor([[[[2.],
              [3.]]]])
    """
    inputs = admit(query, key, value, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink, dropout=dropout)
    run = _fused if _choose(inputs, backend).name == "fused" else _output_of_stages
    return inputs.leave(run(inputs))


def stages(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    *,
    mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
    bias: Float[Tensor, "*bias_axes"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, "*sink_axes"] | float | None = None,
    dropout: float = 0.0,
) -> Stages:
    """Everything `attention(..., backend="stages")` computes on its way; its output is the same bit for bit.

    Arguments and errors are those of `attention`. For half precision the first three are float32.

    >>> import torch
    >>> seen = stages(torch.ones(1, 1, 4), torch.ones(1, 2, 4), torch.tensor([[[2.0], [4.0]]]))
    >>> seen.scores, seen.logits, seen.weights, seen.output
    (tensor([[[4., 4.]]]), tensor([[[2., 2.]]]), tensor([[[0.5000, 0.5000]]]), tensor([[[3.]]]))
    """
    inputs = admit(query, key, value, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink, dropout=dropout)
    return Stages(*(inputs.leave(each) for each in _stages(inputs)))


def choose_backend(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    *,
    mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
    bias: Float[Tensor, "*bias_axes"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, "*sink_axes"] | float | None = None,
    dropout: float = 0.0,
    backend: Backend = "auto",
) -> Choice:
    """Which backend `attention` takes for these arguments, and why.

    Arguments and errors are those of `attention`.

    >>> import torch
    >>> states = torch.zeros(1, 2, 3, 4)
    >>> choose_backend(states, states, states).name
    'fused'
    >>> choose_backend(states, states, states, softcap=30.0)
    Choice(name='stages', reason="torch's fused call has no softcap")
    """
    inputs = admit(query, key, value, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink, dropout=dropout)
    return _choose(inputs, backend)


def _stages(inputs: Inputs) -> Stages:
    scores = score(inputs.query, inputs.key)
    logits = mask_scale(scores, scale=inputs.scale, softcap=inputs.softcap, bias=inputs.bias, mask=inputs.seen())
    weights = normalize(logits, inputs.sink)
    return Stages(scores, logits, weights, aggregate(weights, inputs.value, dropout=inputs.dropout))


def _output_of_stages(inputs: Inputs) -> Tensor:
    return _stages(inputs).output


def _choose(inputs: Inputs, backend: str) -> Choice:
    if backend == "stages":
        return Choice("stages", "asked for")
    if backend not in ("auto", "fused"):
        raise ValueError(f'attention: backend is {backend!r}; "auto", "stages" or "fused" is needed')
    obstacle = _obstacle_to_fused(inputs)
    if obstacle is None:
        return Choice("fused", "asked for" if backend == "fused" else "torch's fused call expresses all that is asked")
    if backend == "fused":
        raise ValueError(f'attention: backend="fused" cannot compute this: {obstacle}. Use "auto" or "stages"')
    return Choice("stages", obstacle)


def _obstacle_to_fused(inputs: Inputs) -> str | None:
    query, bias = inputs.query, inputs.bias
    if inputs.softcap is not None:
        return "torch's fused call has no softcap"
    if inputs.sink is not None:
        return "torch's fused call has no sink"
    if bias is not None and query.dtype in (torch.float16, torch.bfloat16) and bias.dtype != query.dtype:
        # Rounded to float16 a bias of -1e9 becomes -inf, and a row that saw its keys would see nothing.
        return f"the bias is {show(bias)}, and rounding it to the query's {query.dtype} may turn a number into -inf"
    if 0 in query.shape or 0 in inputs.value.shape:
        return "an axis is empty, which torch's kernels do not promise to handle"
    return None


def _fused(inputs: Inputs) -> Tensor:
    """torch's kernel, shielded from rows that see nothing: some paths return NaN for them, others a mean."""
    query, key, value = (each.reshape(-1, *each.shape[-3:]) for each in (inputs.query, inputs.key, inputs.value))
    seen, blind = _shield(inputs)
    if seen is not None:
        shape = (*inputs.query.shape[:-3], seen.shape[-3] if seen.dim() > 2 else 1, query.shape[-2], key.shape[-2])
        seen = seen.expand(shape).reshape(-1, *shape[-3:])
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=seen,
        dropout_p=inputs.dropout,
        is_causal=inputs.causal and seen is None,
        scale=inputs.scale,
        enable_gqa=query.shape[-3] != key.shape[-3],
    ).reshape(*inputs.query.shape[:-1], value.shape[-1])
    return output if blind is None else output.masked_fill(blind, 0.0)


def _shield(inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias as the one tensor torch takes, with blind rows opened, and which rows are blind."""
    bias = inputs.bias
    if bias is None and inputs.causal:
        return None, None  # torch's is_causal aligns top-left, as this mask does, so no row is blind
    mask = inputs.seen()
    if bias is None:
        if mask is None:
            return None, None
        blind = ~mask.any(dim=-1, keepdim=True)
        return mask | blind, blind
    bias = bias.to(inputs.query.dtype)
    if mask is not None:
        bias = torch.where(mask, bias, float("-inf"))
    blind = (bias == float("-inf")).all(dim=-1, keepdim=True)
    return bias.masked_fill(blind, 0.0), blind
