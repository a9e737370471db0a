"""Random weights under which every path of a model shows: no tiny matrices, no closed gates, no saturated softmax."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn

# State-space decays, time steps and the like mean something by their value; a draw from nowhere makes them diverge.
_STRUCTURED = re.compile(
    r".*(a_log|dt_bias|dt_proj\.bias|time_decay|time_first|time_mix|lambda|slope|inv_freq|original0|weight_g"
    r"|correction_bias|expert_bias|recurrent_param|decay|log_alpha|codebook|quantizer).*"
)
_NORM = re.compile(r".*(norm|layernorm|ln_?\w?\d*|_ln)\b.*")
_PLACED = re.compile(r".*(embed|embedding|position|_pos|pos_|token|latent|quer(y|ies)_?emb|prompt).*")


@torch.no_grad()
def redraw(model: nn.Module, seed: int = 0, *, gain: float = 1.0) -> None:
    """Draw all floating weights of `model` anew, in place, so that a change anywhere in the input shows in the output.

    Matrices are normal with standard deviation `gain`/√(inputs), embeddings of order 1, norms near their neutral value
    (1, or 0 where the model stores weight − 1), biases within ±0.1, gates that start closed open to 0.3–0.8. Parameters
    whose value has a meaning (state-space decays, router corrections) are only jittered. Tied weights stay tied. The
    same seed gives the same weights.

    >>> layer = nn.Linear(4, 4); redraw(layer, 0); first = layer.weight.clone(); redraw(layer, 0)
    >>> bool((layer.weight == first).all())
    True
    """
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.is_floating_point() or parameter.is_meta:
                continue
            seen.add(id(parameter))
            full = f"{path}.{name}".lower()
            parameter.copy_(_draw(module, full, parameter.float(), generator, gain).to(parameter.dtype))


def _draw(module: nn.Module, full: str, value: Tensor, generator: torch.Generator, gain: float) -> Tensor:
    def normal(shape: torch.Size = value.shape) -> Tensor:
        return torch.randn(shape, generator=generator)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(value.shape, generator=generator)

    if value.numel() == 0:
        return value
    constant = bool((value == value.flatten()[0]).all())
    first = float(value.flatten()[0])
    name = full.rsplit(".", 1)[-1]
    if _STRUCTURED.fullmatch(full):
        return value * uniform(0.95, 1.05)
    if isinstance(module, nn.Embedding):
        return gain * normal()
    vector = value.numel() == max(value.shape, default=1)
    if vector and not _PLACED.fullmatch(name):
        if name == "bias" or name.endswith("_bias") or name.endswith("bias_"):
            return uniform(-0.1, 0.1)
        if "norm" in type(module).__name__.lower() or _NORM.fullmatch(full):
            neutral = float(value.mean())
            return uniform(-0.1, 0.1) + (0.0 if abs(neutral) < 0.5 else neutral)
        if constant and abs(first) <= 1e-2:
            return uniform(0.3, 0.8)
        if constant:
            return first * uniform(0.9, 1.1)
        if float(value.std()) < 0.1 and abs(float(value.mean())) < 0.1:
            return 0.5 * normal()
        return value * uniform(0.9, 1.1)
    if _PLACED.fullmatch(name) and not isinstance(module, nn.Linear):
        return 0.7 * gain * normal()
    return gain * normal() / math.sqrt(_inputs(module, name, value))


def _inputs(module: nn.Module, name: str, value: Tensor) -> float:
    """How many numbers are summed into each output of a matrix."""
    if isinstance(module, nn.modules.conv._ConvNd):
        receptive = math.prod(value.shape[2:])
        return value.shape[0] * receptive / module.groups if module.transposed else value.shape[1] * receptive
    if isinstance(module, nn.Linear) or (value.dim() == 2 and type(module).__name__ != "Conv1D"):
        return value.shape[1] if value.shape[1] > 1 else value.shape[0]
    if type(module).__name__ == "Conv1D":
        return value.shape[0]
    # Stacked experts store either orientation; the geometric mean is at most a small factor away from both.
    return math.sqrt(value.shape[-1] * value.shape[-2]) if value.dim() >= 2 else max(value.numel(), 1)
