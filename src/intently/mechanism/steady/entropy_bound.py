"""Entropy of attention, and the least it can be for logits of a given norm: collapse can be ruled out, or seen coming."""

from __future__ import annotations

import torch
from torch import Tensor

from intently._typing import Float, Num


def row_entropy(weights: Float[Tensor, "*lead key"]) -> Float[Tensor, "*lead"]:
    """How widely each query looks: `-Σ w ln w` in nats, from 0 (one key alone) to ln(keys) (all alike).

    `exp` of it is the number of keys that are looked at, in effect. Weights of 0 count 0, with gradient 0.

    Args:
        weights: `[*lead, query, key]` after softmax, as of `stages`; a row that sees nothing gives 0.

    Returns:
        `[*lead, query]`, float32 for half precision.

    Source: Shannon 1948; Zhai et al. 2023, arXiv 2303.06296, section 3 (averaged over queries there).

    >>> import torch
    >>> row_entropy(torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]))    # ln 4, ln 2, 0
    tensor([1.3863, 0.6931, 0.0000])
    """
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    present = torch.where(weights > 0, weights, 1.0)  # 1 ln 1 = 0, and no infinite slope where a weight is 0
    return (present * -present.log()).sum(dim=-1)


def entropy_bound(
    norm: Num[Tensor, "*norm_axes"] | float, keys: Num[Tensor, "*key_axes"] | int
) -> Float[Tensor, "*axes"]:
    """The least entropy that a row of softmax can have when its logits, as a vector, are no longer than `norm`.

    `H >= ln(1 + (T - 1) β) + σ √(T (T - 1)) β / (1 + (T - 1) β)`,  `β = exp(-σ √(T / (T - 1)))`

    Every row of a matrix is at most as long as its spectral norm, so the norm of the logits bounds all rows at once. It
    is tight: logits of `σ √((T-1)/T)` for one key and `-σ / √(T (T-1))` for the others have norm σ, sum 0 and this
    entropy. For large σ it falls like T σ exp(-σ). Softmax does not see what is added to a whole row, so a norm taken
    after subtracting each row's mean serves, and is smaller.

    Args:
        norm: σ, at least the Euclidean norm of a row of logits, scaled, before hiding: the spectral norm
            `torch.linalg.matrix_norm(logits, ord=2)`, or `|W_Q W_Kᵀ|₂ · |X Xᵀ|₂` times the scale, as in the paper.
        keys: T, number of keys that the row sees. Under a mask it differs by row, and the total would be too many:
            a row that sees one key has entropy 0.

    Returns:
        float64, nats, of the shape the arguments broadcast to.

    Raises:
        ValueError: a negative norm.

    Symbols: norm = σ (bold), keys = T, β as there.

    Source: Zhai et al. 2023, arXiv 2303.06296, theorem 3.1.

    Four keys: logits all alike have entropy ln 4. A gap of ln 3 gives weights 1/2, 1/6, 1/6, 1/6 and the entropy
    (ln 2 + ln 6) / 2; those logits, less their mean, have norm √3/2 · ln 3.

    >>> import math
    >>> entropy_bound(0.0, 4)
    tensor(1.3863, dtype=torch.float64)
    >>> entropy_bound(3**0.5 / 2 * math.log(3), 4), round(math.log(12) / 2, 4)
    (tensor(1.2425, dtype=torch.float64), 1.2425)
    """
    sigma = torch.as_tensor(norm, dtype=torch.float64)
    count = torch.as_tensor(keys, dtype=torch.float64, device=sigma.device)
    if not torch.compiler.is_compiling() and bool((sigma < 0).any()):
        raise ValueError(f"entropy_bound: norm is {sigma.min().item()}; a norm is not negative")
    others = (count - 1).clamp(min=0)
    gap = sigma * (count / others.clamp(min=1)).sqrt()  # between the favoured key and the rest
    beta = torch.exp(-gap)
    return torch.log1p(others * beta) + others * beta * gap / (1 + others * beta)
