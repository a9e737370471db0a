"""A product of tensors summed over shared axes, by any spelling (matmul, bmm, baddbmm, einsum, tensordot, mul and sum), in one form."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Contraction:
    """`output[labels] = factor · Σ Π operands[labels]`, the axes of every operand named by letters."""

    operands: tuple[Tensor, ...]
    labels: tuple[Labels, ...]
    output: Labels
    factor: float = 1.0
    added: Tensor | None = None  # baddbmm's first argument, already times beta

    def compute(self, *operands: Tensor) -> Tensor:
        """The sum of products for these operands (the recorded ones when none are given), without factor and addend."""
        chosen = operands or self.operands
        equation = ",".join("".join(axes) for axes in self.labels) + "->" + "".join(self.output)
        return torch.einsum(equation, *chosen)

    def size(self, label: str) -> int:
        """The length of an axis (an operand may hold it as 1 and be broadcast)."""
        sizes = [
            t.shape[axes.index(label)] for t, axes in zip(self.operands, self.labels, strict=True) if label in axes
        ]
        return max(sizes) if sizes else 1

    def only_in(self, index: int) -> Labels:
        """Axes of one operand that no other operand has and the output keeps: its free axes."""
        others = {a for i, axes in enumerate(self.labels) if i != index for a in axes}
        return tuple(a for a in self.labels[index] if a in self.output and a not in others)

    def summed(self, index: int) -> Labels:
        """Axes of one operand that the sum runs over."""
        return tuple(a for a in self.labels[index] if a not in self.output)


def read(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], factors: Callable[[Tensor], Any]
) -> Contraction | None:
    """The contraction that a call makes, or None when it is none (or has a form without an einsum)."""
    if name in {"matmul", "bmm", "mm"}:
        left, right = _pick(args, kwargs, ("input", "self", "mat1"), ("other", "mat2", "tensor2"))
        return _matmul(left, right)
    if name == "rmatmul":
        return _matmul(args[1], args[0])
    if name in {"baddbmm"}:
        added = args[0] if args else kwargs.get("input")
        batch1, batch2 = (*args[1:3], *(kwargs[k] for k in ("batch1", "batch2") if k in kwargs))[:2]
        made = _matmul(batch1, batch2)
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        if made is None:
            return None
        return Contraction(made.operands, made.labels, made.output, float(alpha), added * beta if beta else None)
    if name == "linear":
        left, right = _pick(args, kwargs, ("input",), ("weight",))
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return _matmul(left, right.mT) if isinstance(right, Tensor) and right.dim() == 2 and bias is None else None
    if name == "einsum":
        return _einsum(args)
    if name == "tensordot":
        left, right = _pick(args, kwargs, ("a",), ("b",))
        return _tensordot(left, right, args[2] if len(args) > 2 else kwargs.get("dims", 2))
    if name == "sum":
        return _product_and_sum(args, kwargs, factors)
    return None


def _pick(args: tuple[Any, ...], kwargs: dict[str, Any], *names: tuple[str, ...]) -> list[Any]:
    given = list(args[: len(names)])
    for keys in names[len(given) :]:
        given.append(next((kwargs[k] for k in keys if k in kwargs), None))
    return given


def _matmul(left: Any, right: Any) -> Contraction | None:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or left.dim() < 2 or right.dim() < 2:
        return None
    rank = max(left.dim(), right.dim())
    if rank > 20:
        return None
    lead = string.ascii_uppercase[: rank - 2]
    left_labels = (*lead[rank - left.dim() :], "i", "k")
    right_labels = (*lead[rank - right.dim() :], "k", "j")
    return Contraction((left, right), (left_labels, right_labels), (*lead, "i", "j"))


def _einsum(args: tuple[Any, ...]) -> Contraction | None:
    if not args or not isinstance(args[0], str):
        return None
    operands = args[1:] if not (len(args) == 2 and isinstance(args[1], (list, tuple))) else tuple(args[1])
    equation = args[0].replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(operands) or not all(isinstance(t, Tensor) for t in operands):
        return None
    used = set(equation)
    spare = [c for c in string.ascii_letters if c not in used]
    widest = max(
        (t.dim() - len(term.replace("...", "")) for t, term in zip(operands, terms, strict=True) if "..." in term),
        default=0,
    )
    dots = "".join(spare[:widest])
    labels = []
    for tensor, term in zip(operands, terms, strict=True):
        count = tensor.dim() - len(term.replace("...", ""))
        labels.append(tuple(term.replace("...", dots[widest - count :] if count else "")))
    if arrow:
        output = tuple(right.replace("...", dots))
    else:
        letters = [c for term in terms for c in term.replace("...", "")]
        output = (*dots, *sorted(c for c in set(letters) if letters.count(c) == 1))
    if any(len(set(axes)) != len(axes) for axes in labels):
        return None
    return Contraction(tuple(operands), tuple(labels), output)


def _tensordot(left: Any, right: Any, dims: Any) -> Contraction | None:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None
    if isinstance(dims, int):
        pairs = list(zip(range(left.dim() - dims, left.dim()), range(dims), strict=True))
    else:
        pairs = list(zip([d % left.dim() for d in dims[0]], [d % right.dim() for d in dims[1]], strict=True))
    left_labels = list(string.ascii_lowercase[: left.dim()])
    right_labels = list(string.ascii_uppercase[: right.dim()])
    for mine, theirs in pairs:
        right_labels[theirs] = left_labels[mine]
    summed = {left_labels[mine] for mine, _ in pairs}
    output = tuple(a for a in [*left_labels, *right_labels] if a not in summed)
    return Contraction((left, right), (tuple(left_labels), tuple(right_labels)), output)


def _product_and_sum(
    args: tuple[Any, ...], kwargs: dict[str, Any], factors: Callable[[Tensor], Any]
) -> Contraction | None:
    """`(a * b).sum(dim)` with broadcasting: the long way to write a matmul."""
    if not args or not isinstance(args[0], Tensor):
        return None
    summed: Tensor = args[0]
    pair = factors(summed)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if pair is None or dim is None:
        return None
    rank = summed.dim()
    dims = {d % rank for d in ((dim,) if isinstance(dim, int) else dim)}
    letters = string.ascii_letters[:rank]
    operands, labels = [], []
    for tensor in pair:
        axes = letters[rank - tensor.dim() :]
        kept = [i for i in range(tensor.dim()) if tensor.shape[i] != 1 or summed.shape[rank - tensor.dim() + i] == 1]
        operands.append(tensor.reshape([tensor.shape[i] for i in kept]))
        labels.append(tuple(axes[i] for i in kept))
    present = {a for axes in labels for a in axes}
    if not dims <= {letters.index(a) for a in present}:
        return None
    output = tuple(letters[i] for i in range(rank) if i not in dims and letters[i] in present)
    return Contraction(tuple(operands), tuple(labels), output)
