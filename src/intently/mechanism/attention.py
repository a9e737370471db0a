"""Attention: one function and its contract; the backends that compute it are chosen aloud."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from intently._typing import Bool, Float
from intently.masks import Mask
from intently.mechanism.backends.choice import RUN, Choice, Verdict, choose, verdicts
from intently.mechanism.backends.stages import Stages, every_stage
from intently.mechanism.door import Bias, admit, own_precision
from intently.mechanism.options import Backend, StageOptions


def attention(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    *,
    mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
    bias: Float[Tensor, "*bias_axes"] | Bias | None = None,
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
        bias: float added to the logits after the softcap, broadcastable likewise; `-inf` hides too. Or a rule,
            `bias(query_index, key_index)`: from int64 positions `[query, 1]` and `[key]`, both counted from 0, to such
            a float (ALiBi, relative positions). It is asked for pieces where a backend works in pieces.
        scale: factor on q·k; `1 / sqrt(width)` when left out.
        softcap: c squeezes the scaled scores into (-c, c) by `c * tanh(x / c)`.
        sink: a logit per head, `[heads]`, that joins the softmax's denominator; 0 is the off-by-one softmax.
        dropout: probability of dropping a weight; applied whenever it is above 0, so pass 0 in evaluation.
        backend: `"auto"`, or by name: `"stages"`; `"fused"`, torch's `scaled_dot_product_attention`; `"blocked"`, in
            memory that grows with the length only, skipping keys out of the mask's reach; `"flex"`, torch's compiled
            FlexAttention; `"math"`, torch's math path; `"oracle"`, float64. `choose_backend` tells what `"auto"` takes.

    Returns:
        `[*batch, heads, query, value_width]` in the dtype of the values; half precision is computed in float32 inside.
        Torch's kernels round the weights of half precision once more before they mix. `torch.autocast` changes nothing:
        inside, the arguments are computed with as they came in, and the result has their dtype.

    Raises:
        TypeError, ValueError: arguments that do not fit, or a backend asked for what it cannot express.

    Source: Vaswani et al. 2017, equation 1; ONNX `Attention`, opset 23; torch `scaled_dot_product_attention`.

    >>> import torch
    >>> query, key, value = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.tensor([[[[2.0], [4.0]]]])
    >>> attention(query, key, value, mask=torch.ones(2, 2).tril().bool())    # row 0 sees key 0, row 1 sees both
    tensor([[[[2.],
              [3.]]]])
    """
    with own_precision(query):
        inputs = admit(
            query, key, value, mask=mask, bias=bias, scale=scale, softcap=softcap, sink=sink, dropout=dropout
        )
        return inputs.leave(RUN[choose(inputs, backend).name](inputs))


def stages(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    **options: Unpack[StageOptions],
) -> Stages:
    """Everything `attention(..., backend="stages")` computes on its way; its output is the same bit for bit.

    Arguments and errors are those of `attention`. For half precision the first three are float32.

    >>> import torch
    >>> seen = stages(torch.ones(1, 1, 4), torch.ones(1, 2, 4), torch.tensor([[[2.0], [4.0]]]))
    >>> seen.scores, seen.logits, seen.weights, seen.output
    (tensor([[[4., 4.]]]), tensor([[[2., 2.]]]), tensor([[[0.5000, 0.5000]]]), tensor([[[3.]]]))
    """
    with own_precision(query):
        inputs = admit(query, key, value, **options)
        return Stages(*(inputs.leave(each) for each in every_stage(inputs)))


def choose_backend(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    *,
    backend: Backend = "auto",
    **options: Unpack[StageOptions],
) -> Choice:
    """Which backend `attention` takes for these arguments, and why.

    Arguments and errors are those of `attention`.

    >>> import torch
    >>> states = torch.zeros(1, 2, 3, 4)
    >>> choose_backend(states, states, states).name
    'fused'
    >>> choose_backend(states, states, states, softcap=30.0)
    Choice(name='stages', reason="torch's fused call has no softcap")
    >>> long = torch.zeros(1, 2, 4096, 4)
    >>> choose_backend(long, long, long, mask=Mask.causal() & Mask.window(256))
    Choice(name='blocked', reason='the mask leaves 9% of 4096 × 4096 pairs within reach')
    """
    return choose(admit(query, key, value, **options), backend)


def explain_backends(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    **options: Unpack[StageOptions],
) -> list[Verdict]:
    """What every backend says to these arguments: whether it can, and why not or at what price.

    Arguments and errors are those of `attention`.

    >>> import torch
    >>> states = torch.zeros(1, 2, 1024, 4)
    >>> for name, can, reason in explain_backends(states, states, states, mask=Mask.window(16, 16), softcap=30.0)[:3]:
    ...     print(f"{name:8}{can!s:6}{reason}")
    stages  True  keeps 1024 × 1024 pairs a head: 8 MiB a plane of scores
    fused   False torch's fused call has no softcap
    blocked True  15% of 1024 × 1024 pairs lie within reach of the mask
    """
    return verdicts(admit(query, key, value, **options))
