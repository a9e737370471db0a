"""What a torch call does to the axes of a tensor: the few kinds that tracing has to tell apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Calls that only move, select or copy entries: replaying them on a tensor of indices shows where each entry came from.
MOVES = frozenset(
    [
        "transpose",
        "permute",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "t",
        "T",
        "mT",
        "H",
        "mH",
        "adjoint",
        "view",
        "reshape",
        "_unsafe_view",
        "view_as",
        "reshape_as",
        "flatten",
        "unflatten",
        "ravel",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "broadcast_to",
        "repeat",
        "tile",
        "repeat_interleave",
        "getitem",
        "select",
        "slice",
        "narrow",
        "index_select",
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "hsplit",
        "vsplit",
        "dsplit",
        "unbind",
        "cat",
        "concat",
        "concatenate",
        "stack",
        "hstack",
        "vstack",
        "dstack",
        "roll",
        "flip",
        "unfold",
        "gather",
        "take_along_dim",
        "diagonal",
        "as_strided",
        "atleast_2d",
        "atleast_3d",
    ]
)

# Calls that return their first argument unchanged in shape and order (a cast, a copy, a dropout).
COPIES = frozenset(
    [
        "contiguous",
        "clone",
        "detach",
        "detach_",
        "to",
        "_to_copy",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "cpu",
        "cuda",
        "alias",
        "data",
        "requires_grad_",
        "dropout",
        "dropout_",
        "feature_dropout",
        "alpha_dropout",
        "native_dropout",
        "identity",
    ]
)

# Calls that write rows of one tensor where an index says in another: which came from where is not told by the shape.
SCATTERS = frozenset(
    [
        "index_add",
        "index_add_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "scatter_reduce_",
        "index_reduce",
        "index_reduce_",
        "masked_scatter",
        "masked_scatter_",
    ]
)

# Calls that return something new in the shape of what they are given.
FRESH = frozenset(["empty", "zeros", "empty_like", "zeros_like", "new_empty", "new_zeros"])

# Calls that tables of positions take part in: done again on other content, they show what the tables do.
TURNS = frozenset(
    [
        "add",
        "sub",
        "neg",
        "negative",
        "mul",
        "div",
        "rdiv",
        "addcmul",
        "where",
        "setitem",
        "view_as_complex",
        "view_as_real",
        "complex",
        "real",
        "imag",
        "matmul",
        "bmm",
        "einsum",
    ]
)

CONTRACTIONS = frozenset(["matmul", "bmm", "baddbmm", "einsum", "mm", "tensordot", "linalg_multi_dot", "inner"])

# Calls that act on the last axis of each position alone: a projection or a norm of one token.
PER_POSITION = frozenset(["linear", "addmm", "layer_norm", "rms_norm", "native_layer_norm", "normalize", "bilinear"])

CONVOLUTIONS = frozenset(["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "embedding"])

NORMS = frozenset(["layer_norm", "rms_norm", "native_layer_norm", "normalize", "group_norm", "batch_norm"])

REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "prod",
        "logsumexp",
        "norm",
        "vector_norm",
        "linalg_vector_norm",
        "linalg_norm",
        "std",
        "var",
        "std_mean",
        "var_mean",
        "argmax",
        "argmin",
        "any",
        "all",
        "count_nonzero",
        "topk",
        "sort",
        "argsort",
        "cumsum",
        "cumprod",
        "median",
        "mode",
        "nansum",
    ]
)

# Calls that turn logits into weights, by any spelling.
EXPONENTIALS = frozenset(
    ["softmax", "_softmax", "exp", "exp2", "exp_", "softmin", "sigmoid", "sigmoid_", "_safe_softmax", "_masked_softmax"]
)

# Calls that draw numbers, and those that drop entries by them.
RANDOM = frozenset(
    [
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "bernoulli",
        "bernoulli_",
        "randint",
        "randint_like",
        "uniform_",
        "normal_",
    ]
)
RANDOM_DROPS = frozenset(
    ["dropout", "dropout_", "feature_dropout", "alpha_dropout", "native_dropout", "bernoulli", "bernoulli_"]
)

_ALIASES = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "rsub": "rsub",
    "rmul": "mul", "radd": "add", "rtruediv": "rdiv", "rdiv": "rdiv", "imul": "mul", "iadd": "add", "isub": "sub",
    "itruediv": "div", "idiv": "div", "mul_": "mul", "div_": "div", "add_": "add", "sub_": "sub", "neg_": "neg",
    "mm": "mm", "dot": "dot",
}  # fmt: skip


def name_of(func: Callable[..., Any]) -> str:
    """The plain name of a torch function, method or property: `__matmul__`, `Tensor.matmul` and `torch.matmul` are `matmul`."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "get")
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    name = name.partition(".")[0]  # an operator of an exported graph names its overload too: softmax.int
    return _ALIASES.get(name, name)


def is_in_place(func: Callable[..., Any]) -> bool:
    """True for calls that write into their first argument: `mul_`, `__imul__`, `__setitem__`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__invert__", "__int__"))
    return name.endswith("_") and not name.startswith("_")
