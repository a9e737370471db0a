"""σReparam: a weight whose spectral norm is a learned number, so that no update can blow the logits up unseen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from intently._typing import Float
from intently.mechanism.door import show


class SigmaReparam(nn.Module):
    """The parametrization `W -> γ W / σ(W)`, σ(W) the largest singular value, followed by power iteration.

    In training every computation of the weight takes one step of power iteration from where the last one ended; in
    evaluation nothing moves, so results repeat. The gradient runs through `σ = uᵀ W v` with u and v held fixed. The
    iteration is computed in float32 at least. Between `torch.nn.utils.parametrize.cached()` a step is taken once.

    Args:
        weight: what is to be parametrized, `[out, ...]`; further axes count as one.
        gamma: the spectral norm to start with, 1 in the paper; None keeps that of the weight, and with it the layer's
            output (of weights trained without σReparam).
        warm_up: steps of power iteration taken at once, so that training starts from a good estimate.

    Source: Zhai et al. 2023, arXiv 2303.06296, section 3.
    """

    gamma: nn.Parameter
    left: Tensor
    right: Tensor

    def __init__(self, weight: Float[Tensor, "out ..."], *, gamma: float | None = 1.0, warm_up: int = 20):
        super().__init__()
        if weight.dim() < 2 or not weight.is_floating_point() or 0 in weight.shape:
            raise ValueError(f"SigmaReparam: {show(weight)}; a floating point matrix that is not empty is needed")
        matrix = _matrix(weight.detach())
        self.register_buffer("left", F.normalize(torch.randn_like(matrix[:, 0]), dim=0))
        self.register_buffer("right", F.normalize(torch.randn_like(matrix[0]), dim=0))
        for _ in range(warm_up):
            self._step(matrix)
        start = self._sigma(matrix) if gamma is None else torch.tensor(gamma)
        self.gamma = nn.Parameter(start.to(dtype=weight.dtype, device=weight.device))

    def forward(self, weight: Float[Tensor, "out ..."]) -> Float[Tensor, "out ..."]:
        """The weight with spectral norm γ."""
        matrix = _matrix(weight)
        if self.training:
            self._step(matrix.detach())
        tiny = torch.finfo(matrix.dtype).tiny
        return (
            (self.gamma.to(matrix.dtype) / self._sigma(matrix).clamp(min=tiny) * matrix)
            .to(weight.dtype)
            .view_as(weight)
        )

    def _sigma(self, matrix: Tensor) -> Tensor:
        # Cloned, for a second forward before the backward would change what the first one saved.
        left, right = self.left.clone().to(matrix.dtype), self.right.clone().to(matrix.dtype)
        return left @ matrix @ right

    @torch.no_grad()
    def _step(self, matrix: Tensor) -> None:
        left = F.normalize(matrix @ self.right.to(matrix.dtype), dim=0)
        self.right.copy_(F.normalize(matrix.mT @ left, dim=0))
        self.left.copy_(left)


def sigma_reparam(
    module: nn.Module, name: str = "weight", *, gamma: float | None = 1.0, warm_up: int = 20
) -> nn.Module:
    """Give a layer a weight whose spectral norm is a learned scalar γ: `W' = γ W / σ(W)`.

    The logits of a head are bounded by `|W_Q W_Kᵀ|₂` times what the representations bring along; left alone, that norm grows with
    the updates, and the entropy of attention falls exponentially with it (see `entropy_bound`). The paper puts it on
    every linear layer.

    Args:
        module: a layer with a parameter `name`, changed in place; `torch.nn.utils.parametrize.remove_parametrizations`
            takes it off again and leaves the weight as it last was.
        gamma, warm_up: as in `SigmaReparam`.

    Returns:
        The same module.

    Raises:
        ValueError: no such parameter, or one that is no matrix.

    Source: Zhai et al. 2023, Stabilizing Transformer Training by Preventing Attention Entropy Collapse,
    arXiv 2303.06296, section 3.

    A weight with singular values 8 and 2; as reparametrized the larger one is 1:

    >>> import torch
    >>> layer = torch.nn.Linear(2, 2, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[8.0, 0.0], [0.0, 2.0]]))
    >>> sigma_reparam(layer).weight.detach().round(decimals=3).tolist()
    [[1.0, 0.0], [0.0, 0.25]]
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"sigma_reparam: {type(module).__name__} has no parameter {name!r}")
    parametrization = SigmaReparam(weight, gamma=gamma, warm_up=warm_up).train(module.training)
    parametrize.register_parametrization(module, name, parametrization)
    return module


def _matrix(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32)).flatten(1)
