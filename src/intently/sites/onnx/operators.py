"""What each ONNX operator computes, said in torch functions, so that a graph can be followed like any other model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from intently.sites.onnx import fused

Attributes = Mapping[str, Any]
Operator = Callable[..., Any]

# The codes of onnx.TensorProto.
TYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip

_TABLE: dict[str, Operator] = {}


def operator(name: str, opset: int) -> Operator | None:
    """The function for an operator's name, `op(attributes, *inputs)`; None where it is not known here."""
    if name == "Softmax" and opset < 13:
        return _softmax_flattened
    return _TABLE.get(name)


def _is(*names: str) -> Callable[[Operator], Operator]:
    def put(function: Operator) -> Operator:
        for name in names:
            _TABLE[name] = function
        return function

    return put


def _plain(name: str, function: Callable[..., Any]) -> None:
    """An operator without attributes."""
    _TABLE[name] = lambda a, *inputs: function(*inputs)


def ints(tensor: Tensor | Sequence[int] | int | None) -> list[int] | None:
    """The whole numbers in a tensor that holds a shape, axes or places."""
    if tensor is None or isinstance(tensor, int):
        return None if tensor is None else [tensor]
    return [int(n) for n in (tensor.reshape(-1).tolist() if isinstance(tensor, Tensor) else tensor)]


def _axes(a: Attributes, inputs: Sequence[Any], at: int = 1) -> list[int] | None:
    """Axes by attribute (older opsets) or by input."""
    return ints(a["axes"]) if "axes" in a else ints(inputs[at]) if len(inputs) > at else None


# -- arithmetic -----------------------------------------------------------------------------------------------------

for _name, _function in {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Neg": torch.neg, "Abs": torch.abs, "Sqrt": torch.sqrt,
    "Exp": torch.exp, "Log": torch.log, "Erf": torch.erf, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Relu": F.relu,
    "Sin": torch.sin, "Cos": torch.cos, "Reciprocal": torch.reciprocal, "Floor": torch.floor, "Ceil": torch.ceil,
    "Round": torch.round, "Sign": torch.sign, "Not": torch.logical_not, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt,
    "LessOrEqual": torch.le, "IsNaN": torch.isnan, "Where": torch.where, "MatMul": torch.matmul, "Softplus": F.softplus,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseNot": torch.bitwise_not, "Mish": F.mish,
}.items():  # fmt: skip
    _plain(_name, _function)


@_is("Pow")
def _pow(a: Attributes, base: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(base, exponent.to(base.dtype)).to(base.dtype)


@_is("Div")
def _div(a: Attributes, left: Tensor, right: Tensor) -> Tensor:
    return torch.div(left, right) if left.is_floating_point() else torch.div(left, right, rounding_mode="trunc")


@_is("Mod")
def _mod(a: Attributes, left: Tensor, right: Tensor) -> Tensor:
    return torch.fmod(left, right) if a.get("fmod") else torch.remainder(left, right)


@_is("Sum")
def _sum(a: Attributes, *inputs: Tensor) -> Tensor:
    total = inputs[0]
    for each in inputs[1:]:
        total = torch.add(total, each)
    return total


@_is("Min")
def _min(a: Attributes, *inputs: Tensor) -> Tensor:
    least = inputs[0]
    for each in inputs[1:]:
        least = torch.minimum(least, each)
    return least


@_is("Max")
def _max(a: Attributes, *inputs: Tensor) -> Tensor:
    most = inputs[0]
    for each in inputs[1:]:
        most = torch.maximum(most, each)
    return most


@_is("Clip")
def _clip(a: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    least = a["min"] if "min" in a else None if low is None else low.item()
    most = a["max"] if "max" in a else None if high is None else high.item()
    return x if least is None and most is None else torch.clamp(x, least, most)


@_is("IsInf")
def _is_inf(a: Attributes, x: Tensor) -> Tensor:
    negative, positive = bool(a.get("detect_negative", 1)), bool(a.get("detect_positive", 1))
    return torch.isinf(x) if negative and positive else torch.isneginf(x) if negative else torch.isposinf(x)


@_is("Cast")
def _cast(a: Attributes, x: Tensor) -> Tensor:
    return x.to(TYPES[a["to"]])


@_is("CastLike")
def _cast_like(a: Attributes, x: Tensor, other: Tensor) -> Tensor:
    return x.to(other.dtype)


@_is("Gelu", "com.microsoft.Gelu")
def _gelu(a: Attributes, x: Tensor) -> Tensor:
    approximate = a.get("approximate", b"none")
    return F.gelu(x, approximate=approximate.decode() if isinstance(approximate, bytes) else approximate)


@_is("com.microsoft.FastGelu")
def _fast_gelu(a: Attributes, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@_is("com.microsoft.BiasGelu")
def _bias_gelu(a: Attributes, x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@_is("com.microsoft.QuickGelu")
def _quick_gelu(a: Attributes, x: Tensor) -> Tensor:
    return x * torch.sigmoid(a.get("alpha", 1.702) * x)


@_is("Swish")
def _swish(a: Attributes, x: Tensor) -> Tensor:
    return x * torch.sigmoid(a.get("alpha", 1.0) * x)


@_is("Elu")
def _elu(a: Attributes, x: Tensor) -> Tensor:
    return F.elu(x, a.get("alpha", 1.0))


@_is("LeakyRelu")
def _leaky(a: Attributes, x: Tensor) -> Tensor:
    return F.leaky_relu(x, a.get("alpha", 0.01))


@_is("HardSigmoid")
def _hard_sigmoid(a: Attributes, x: Tensor) -> Tensor:
    return torch.clamp(a.get("alpha", 0.2) * x + a.get("beta", 0.5), 0, 1)


# -- products, norms, softmax ---------------------------------------------------------------------------------------


@_is("Gemm")
def _gemm(a: Attributes, left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    left = left.t() if a.get("transA") else left
    product = torch.matmul(left, right.t() if a.get("transB") else right)
    alpha, beta = a.get("alpha", 1.0), a.get("beta", 1.0)
    product = product if alpha == 1 else product * alpha
    return product if added is None or beta == 0 else product + (added if beta == 1 else added * beta)


@_is("com.microsoft.FusedMatMul")
def _fused_matmul(a: Attributes, left: Tensor, right: Tensor) -> Tensor:
    left = left.transpose(-2, -1) if a.get("transA") else left
    right = right.transpose(-2, -1) if a.get("transB") else right
    alpha = a.get("alpha", 1.0)
    product = torch.matmul(left, right)
    return product if alpha == 1 else product * alpha


@_is("Einsum")
def _einsum(a: Attributes, *inputs: Tensor) -> Tensor:
    return torch.einsum(a["equation"].decode(), *inputs)


@_is("Softmax")
def _softmax(a: Attributes, x: Tensor) -> Tensor:
    return torch.softmax(x, a.get("axis", -1))


def _softmax_flattened(a: Attributes, x: Tensor) -> Tensor:
    """Before opset 13: over all axes from `axis` on."""
    axis = a.get("axis", 1) % x.dim()
    return torch.softmax(x, -1) if axis == x.dim() - 1 else torch.softmax(x.flatten(axis), -1).reshape(x.shape)


@_is("LogSoftmax")
def _log_softmax(a: Attributes, x: Tensor) -> Tensor:
    return torch.log_softmax(x, a.get("axis", -1))


@_is("LayerNormalization")
def _layer_norm(a: Attributes, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    axis = a.get("axis", -1) % x.dim()
    return F.layer_norm(x, list(x.shape[axis:]), weight, bias, a.get("epsilon", 1e-5))


@_is("RMSNormalization", "SimplifiedLayerNormalization", "com.microsoft.SimplifiedLayerNormalization")
def _rms_norm(a: Attributes, x: Tensor, weight: Tensor | None = None) -> Tensor:
    axis = a.get("axis", -1) % x.dim()
    return F.rms_norm(x, list(x.shape[axis:]), weight, a.get("epsilon", 1e-5))


@_is("com.microsoft.SkipLayerNormalization")
def _skip_norm(
    a: Attributes, x: Tensor, skip: Tensor, weight: Tensor, beta: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Any, ...]:
    total = x + skip if bias is None else x + skip + bias
    return F.layer_norm(total, [total.shape[-1]], weight, beta, a.get("epsilon", 1e-12)), None, None, total


@_is("com.microsoft.SkipSimplifiedLayerNormalization")
def _skip_rms_norm(
    a: Attributes, x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Any, ...]:
    total = x + skip if bias is None else x + skip + bias
    return F.rms_norm(total, [total.shape[-1]], weight, a.get("epsilon", 1e-12)), None, None, total


@_is("BatchNormalization")
def _batch_norm(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, a.get("epsilon", 1e-5))


@_is("InstanceNormalization")
def _instance_norm(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias, eps=a.get("epsilon", 1e-5))


@_is("LpNormalization")
def _lp_norm(a: Attributes, x: Tensor) -> Tensor:
    return F.normalize(x, p=a.get("p", 2), dim=a.get("axis", -1))


@_is("Conv")
def _conv(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    spatial = x.dim() - 2
    pads = a.get("pads", [0] * 2 * spatial)
    if a.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise NotImplementedError("Conv with auto_pad")
    if any(pads):
        x = F.pad(x, [p for i in reversed(range(spatial)) for p in (pads[i], pads[i + spatial])])
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[spatial]
    return convolve(
        x, weight, bias, a.get("strides", [1] * spatial), 0, a.get("dilations", [1] * spatial), a.get("group", 1)
    )


# Inference alone is replayed: nothing is dropped unless the graph says that it trains.
@_is("Dropout")
def _dropout(a: Attributes, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None) -> tuple[Any, ...]:
    share = 0.5 if ratio is None else float(ratio)
    kept = F.dropout(x, share, training=True) if training is not None and bool(training) else x
    return kept, torch.ones_like(x, dtype=torch.bool)


# -- shapes and places ----------------------------------------------------------------------------------------------


@_is("Identity")
def _identity(a: Attributes, x: Tensor) -> Tensor:
    return x


@_is("Shape")
def _shape(a: Attributes, x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape)[a.get("start", 0) : a.get("end", None)], dtype=torch.int64)


@_is("Size")
def _size(a: Attributes, x: Tensor) -> Tensor:
    return torch.tensor(x.numel())


@_is("Reshape")
def _reshape(a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    wanted = ints(shape) or []
    if not a.get("allowzero"):
        wanted = [x.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    return x.reshape(wanted)


@_is("Flatten")
def _flatten(a: Attributes, x: Tensor) -> Tensor:
    axis = a.get("axis", 1)
    return x.reshape(math.prod(x.shape[: axis if axis >= 0 else x.dim() + axis]), -1)


@_is("Transpose")
def _transpose(a: Attributes, x: Tensor) -> Tensor:
    return x.permute(a.get("perm", list(reversed(range(x.dim())))))


@_is("Unsqueeze")
def _unsqueeze(a: Attributes, x: Tensor, *rest: Tensor) -> Tensor:
    axes = _axes(a, (x, *rest)) or []
    rank = x.dim() + len(axes)
    for axis in sorted(n % rank for n in axes):
        x = x.unsqueeze(axis)
    return x


@_is("Squeeze")
def _squeeze(a: Attributes, x: Tensor, *rest: Tensor) -> Tensor:
    axes = _axes(a, (x, *rest))
    axes = [i for i, n in enumerate(x.shape) if n == 1] if axes is None else [n % x.dim() for n in axes]
    for axis in sorted(axes, reverse=True):
        x = x.squeeze(axis)
    return x


@_is("Expand")
def _expand(a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, torch.Size(ints(shape) or [])))


@_is("Tile")
def _tile(a: Attributes, x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(ints(repeats) or [])


@_is("Concat")
def _concat(a: Attributes, *inputs: Tensor) -> Tensor:
    return torch.cat(inputs, a["axis"])


@_is("Split")
def _split(a: Attributes, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = a.get("axis", 0)
    given = ints(a["split"]) if "split" in a else ints(sizes)
    if given is None:
        count = a.get("num_outputs") or a["outputs"]
        given = -(-x.shape[axis] // count)
    return torch.split(x, given, axis)


@_is("Slice")
def _slice(a: Attributes, x: Tensor, *rest: Any) -> Tensor:
    starts, ends, axes, steps = [*(ints(each) for each in rest), None, None, None, None][:4]
    if "starts" in a:
        starts, ends, axes = a["starts"], a["ends"], a.get("axes")
    starts, ends = starts or [], ends or []
    for i, axis in enumerate(axes or range(len(starts))):
        step = steps[i] if steps else 1
        size = x.shape[axis]
        if step > 0:
            low, high = (min(max(n + size if n < 0 else n, 0), size) for n in (starts[i], ends[i]))
            if (low, high, step) != (0, size, 1):
                x = x[(*[slice(None)] * (axis % x.dim()), slice(low, max(low, high), step))]
        else:
            places = torch.tensor(list(range(size))[slice(starts[i], ends[i] if ends[i] >= -size else None, step)])
            x = x.index_select(axis, places.to(torch.int64))
    return x


@_is("Gather")
def _gather(a: Attributes, x: Tensor, index: Tensor) -> Tensor:
    axis = a.get("axis", 0) % x.dim()
    if index.dim() == 0:
        return x.select(axis, int(index))
    index = torch.where(index < 0, index + x.shape[axis], index) if bool((index < 0).any()) else index
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(index, x)
    flat = x.index_select(axis, index.reshape(-1))
    return flat if index.dim() == 1 else flat.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


@_is("GatherElements")
def _gather_elements(a: Attributes, x: Tensor, index: Tensor) -> Tensor:
    axis = a.get("axis", 0)
    return torch.gather(x, axis, torch.where(index < 0, index + x.shape[axis], index))


@_is("GatherND")
def _gather_nd(a: Attributes, x: Tensor, index: Tensor) -> Tensor:
    if a.get("batch_dims", 0):
        raise NotImplementedError("GatherND with batch_dims")
    return x[tuple(index.unbind(-1))]


@_is("ScatterND")
def _scatter_nd(a: Attributes, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    if a.get("reduction", b"none") != b"none":
        raise NotImplementedError("ScatterND with a reduction")
    made = x.clone()
    made[tuple(index.unbind(-1))] = updates
    return made


@_is("ScatterElements")
def _scatter_elements(a: Attributes, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    if a.get("reduction", b"none") != b"none":
        raise NotImplementedError("ScatterElements with a reduction")
    return torch.scatter(x, a.get("axis", 0), index, updates)


@_is("Pad")
def _pad(a: Attributes, x: Tensor, pads: Tensor | None = None, value: Tensor | None = None, *rest: Tensor) -> Tensor:
    given = ints(a["pads"]) if "pads" in a else ints(pads)
    mode = a.get("mode", b"constant").decode()
    axes = ints(rest[0]) if rest else None
    axes = list(range(x.dim())) if axes is None else [n % x.dim() for n in axes]
    assert given is not None
    around = {axis: (given[i], given[i + len(axes)]) for i, axis in enumerate(axes)}
    flat = [n for axis in reversed(range(x.dim())) for n in around.get(axis, (0, 0))]
    if mode == "constant":
        return F.pad(x, flat, value=a.get("value", 0.0) if value is None else value.item())
    while len(flat) > 2 and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    return F.pad(x, flat, mode={"edge": "replicate", "reflect": "reflect"}[mode])


@_is("ConstantOfShape")
def _constant_of_shape(a: Attributes, shape: Tensor) -> Tensor:
    filler = a.get("value", torch.zeros(1))
    return torch.full(ints(shape) or [], filler.reshape(-1)[0].item(), dtype=filler.dtype)


@_is("Range")
def _range(a: Attributes, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@_is("Trilu")
def _trilu(a: Attributes, x: Tensor, offset: Tensor | None = None) -> Tensor:
    shift = 0 if offset is None else int(offset)
    return torch.triu(x, shift) if a.get("upper", 1) else torch.tril(x, shift)


@_is("EyeLike")
def _eye(a: Attributes, x: Tensor) -> Tensor:
    ones = torch.ones(x.shape, dtype=TYPES[a["dtype"]] if "dtype" in a else x.dtype)
    return torch.tril(torch.triu(ones, a.get("k", 0)), a.get("k", 0))


@_is("NonZero")
def _non_zero(a: Attributes, x: Tensor) -> Tensor:
    return torch.nonzero(x).t()


@_is("OneHot")
def _one_hot(a: Attributes, index: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    hot = F.one_hot(index.to(torch.int64) % int(depth), int(depth)).movedim(-1, a.get("axis", -1))
    return torch.where(hot.bool(), values[1], values[0])


@_is("DepthToSpace")
def _depth_to_space(a: Attributes, x: Tensor) -> Tensor:
    if a.get("mode", b"DCR") != b"CRD":
        raise NotImplementedError("DepthToSpace in mode DCR")
    return F.pixel_shuffle(x, a["blocksize"])


# -- reductions -----------------------------------------------------------------------------------------------------


def _reduction(function: Callable[..., Tensor]) -> Operator:
    def reduce(a: Attributes, x: Tensor, *rest: Tensor) -> Tensor:
        axes = _axes(a, (x, *rest))
        if not axes:
            if a.get("noop_with_empty_axes"):
                return x
            axes = list(range(x.dim()))
        return function(x, axes, keepdim=bool(a.get("keepdims", 1)))

    return reduce


def _sum_square(x: Tensor, axes: list[int], *, keepdim: bool) -> Tensor:
    return torch.sum(x * x, axes, keepdim=keepdim)


def _l1(x: Tensor, axes: list[int], *, keepdim: bool) -> Tensor:
    return torch.sum(torch.abs(x), axes, keepdim=keepdim)


def _prod(x: Tensor, axes: list[int], *, keepdim: bool) -> Tensor:
    for axis in sorted((n % x.dim() for n in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keepdim)
    return x


for _name, _function in {
    "ReduceSum": torch.sum, "ReduceMean": torch.mean, "ReduceMax": torch.amax, "ReduceMin": torch.amin,
    "ReduceLogSumExp": torch.logsumexp, "ReduceL2": torch.linalg.vector_norm, "ReduceSumSquare": _sum_square,
    "ReduceProd": _prod, "ReduceL1": _l1,
}.items():  # fmt: skip
    if _name == "ReduceL2":
        _TABLE[_name] = _reduction(lambda x, axes, keepdim: torch.linalg.vector_norm(x, 2, axes, keepdim))
    else:
        _TABLE[_name] = _reduction(_function)


@_is("ArgMax", "ArgMin")
def _arg_max(a: Attributes, x: Tensor) -> Tensor:
    return torch.argmax(x, a.get("axis", 0), keepdim=bool(a.get("keepdims", 1)))


_TABLE["ArgMin"] = lambda a, x: torch.argmin(x, a.get("axis", 0), keepdim=bool(a.get("keepdims", 1)))


@_is("CumSum")
def _cum_sum(a: Attributes, x: Tensor, axis: Tensor) -> Tensor:
    along = int(axis)
    turned = torch.flip(x, [along]) if a.get("reverse") else x
    total = torch.cumsum(turned, along).to(x.dtype)
    total = total - turned if a.get("exclusive") else total
    return torch.flip(total, [along]) if a.get("reverse") else total


@_is("TopK")
def _top_k(a: Attributes, x: Tensor, count: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.topk(x, int(count), a.get("axis", -1), bool(a.get("largest", 1)), bool(a.get("sorted", 1))))


@_is("GlobalAveragePool")
def _global_pool(a: Attributes, x: Tensor) -> Tensor:
    return torch.mean(x, list(range(2, x.dim())), keepdim=True)


# -- quantised weights ----------------------------------------------------------------------------------------------


def _along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """A scale or zero point per channel, laid along its axis."""
    return values.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())]) if values.numel() > 1 else values


@_is("DequantizeLinear")
def _dequantize(a: Attributes, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    if a.get("block_size"):
        raise NotImplementedError("DequantizeLinear by blocks")
    axis = a.get("axis", 1)
    whole = x.to(scale.dtype) if zero is None else x.to(scale.dtype) - _along(zero, x, axis).to(scale.dtype)
    return whole * _along(scale, x, axis)


@_is("DynamicQuantizeLinear")
def _dynamic_quantize(a: Attributes, x: Tensor) -> tuple[Tensor, ...]:
    zero = torch.zeros((), dtype=x.dtype)
    low, high = torch.minimum(x.amin(), zero), torch.maximum(x.amax(), zero)
    scale = (high - low) / 255
    point = torch.clamp(torch.round(-low / scale), 0, 255)
    return torch.clamp(torch.round(x / scale) + point, 0, 255).to(torch.uint8), scale, point.to(torch.uint8)


@_is("MatMulInteger")
def _matmul_integer(
    a: Attributes, left: Tensor, right: Tensor, left_zero: Tensor | None = None, right_zero: Tensor | None = None
) -> Tensor:
    wide = left.to(torch.float64) if left_zero is None else left.to(torch.float64) - left_zero.to(torch.float64)
    other = right.to(torch.float64) if right_zero is None else right.to(torch.float64) - right_zero.to(torch.float64)
    return torch.matmul(wide, other).to(torch.int32)


_TABLE["com.microsoft.Attention"] = fused.packed_attention
_TABLE["com.microsoft.MultiHeadAttention"] = fused.multi_head
_TABLE["com.microsoft.GroupQueryAttention"] = fused.grouped
_TABLE["com.microsoft.RotaryEmbedding"] = fused.rotary
