"""Normalised queries and keys: logits that cannot grow with the length of the vectors, only with learned gains.

Four modules, each called as `query, key = norm(query, key)` on `[*batch, heads, length, width]`, after the projection and
before rotary positions (gains that differ within a pair, applied after the rotation, would make scores depend on more
than i - j). None is invertible into weights: a model trained with one needs it forever.

| module | per head, over | largest logit possible |
|---|---|---|
| `QKLayerNorm` | width, mean removed | √width · gain, more with a bias (ViT-22B) |
| `QKRMSNorm` | width | √width · gain (Qwen3, Gemma 3) |
| `QKRMSNormAcrossHeads` | heads × width at once | √(heads · kv_heads · width) · gain, if one head takes all (OLMo 2) |
| `QKL2Norm` | width | the learned temperature (Henry et al.) |

Gain stands for the largest |query gain · key gain| of a feature; the scale is the usual 1/√width but for `QKL2Norm`, which
brings its own and wants `scale=1`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intently._typing import Float
from intently.mechanism.door import show

Pair = tuple[Float[Tensor, "*batch heads query width"], Float[Tensor, "*batch kv_heads key width"]]


class QKLayerNorm(nn.Module):
    """Layer normalisation of every query and key of every head, one gain per feature for queries and one for keys.

    `q' = γ_q (q - mean q) / √(var q + ε)`, keys alike

    Args:
        width: of a head.
        bias: adds a learned vector to each; ViT-22B has none.
        eps: ε.

    Symbols: `query_gain`, `key_gain` = the scales of LN(XW^Q) and LN(XW^K).

    Source: Dehghani et al. 2023, Scaling Vision Transformers to 22 Billion Parameters, arXiv 2302.05442, section 2.

    >>> import torch
    >>> query, key = QKLayerNorm(2)(torch.tensor([[[5.0, 9.0]]]), torch.tensor([[[1e6, 0.0]]]))
    >>> query.detach(), key.detach()                                         # how long they were no longer counts
    (tensor([[[-1.0000,  1.0000]]]), tensor([[[ 1., -1.]]]))
    """

    def __init__(self, width: int, *, bias: bool = False, eps: float = 1e-6):
        super().__init__()
        _check_sizes("QKLayerNorm", width=width)
        self.width, self.eps = width, eps
        self.query_gain, self.key_gain = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.query_bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.key_bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, query: Tensor, key: Tensor) -> Pair:
        """Both normalised, each in its dtype; half precision is computed in float32."""
        return self._norm(query, self.query_gain, self.query_bias), self._norm(key, self.key_gain, self.key_bias)

    def _norm(self, states: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        _check_width("QKLayerNorm", states, self.width)
        exact = _exact(states)
        centred = exact - exact.mean(dim=-1, keepdim=True)
        normed = _by_rms(centred, self.eps, -1) * gain.to(exact.dtype)
        return (normed if bias is None else normed + bias.to(exact.dtype)).to(states.dtype)

    def bound(self) -> Float[Tensor, ""]:
        """The largest |logit| these gains allow with the scale 1/√width."""
        if self.query_bias is None or self.key_bias is None:
            return _gain(self.query_gain, self.key_gain) * math.sqrt(self.width)
        longest = math.sqrt(self.width) * self.query_gain.abs().amax() + self.query_bias.norm()
        return (
            longest
            * (math.sqrt(self.width) * self.key_gain.abs().amax() + self.key_bias.norm())
            / math.sqrt(self.width)
        )


class QKRMSNorm(nn.Module):
    """Root-mean-square normalisation of every query and key of every head; heads share the gains.

    `q' = γ_q q / √(mean q² + ε)`, keys alike

    Args:
        width: of a head.
        eps: ε.

    Symbols: `query_gain`, `key_gain` = `q_norm.weight`, `k_norm.weight` in Hugging Face (Gemma keeps gain - 1).

    Source: Yang et al. 2025, Qwen3, arXiv 2505.09388, section 2; Zhang and Sennrich 2019, arXiv 1910.07467 (RMSNorm).

    >>> import torch
    >>> query, key = QKRMSNorm(2)(torch.tensor([[[7.0, 7.0]]]), torch.tensor([[[0.0, -3.0]]]))
    >>> query.detach(), key.detach()                                         # the root of the mean square is 7, and 3/√2
    (tensor([[[1., 1.]]]), tensor([[[ 0.0000, -1.4142]]]))
    """

    def __init__(self, width: int, *, eps: float = 1e-6):
        super().__init__()
        _check_sizes("QKRMSNorm", width=width)
        self.width, self.eps = width, eps
        self.query_gain, self.key_gain = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, query: Tensor, key: Tensor) -> Pair:
        """Both normalised, each in its dtype; half precision is computed in float32."""
        return self._norm(query, self.query_gain), self._norm(key, self.key_gain)

    def _norm(self, states: Tensor, gain: Tensor) -> Tensor:
        _check_width("QKRMSNorm", states, self.width)
        exact = _exact(states)
        return (_by_rms(exact, self.eps, -1) * gain.to(exact.dtype)).to(states.dtype)

    def bound(self) -> Float[Tensor, ""]:
        """The largest |logit| these gains allow with the scale 1/√width."""
        return _gain(self.query_gain, self.key_gain) * math.sqrt(self.width)


class QKRMSNormAcrossHeads(nn.Module):
    """Root-mean-square normalisation over the features of all heads at once, a gain for each of them.

    `q' = γ_q q / √(mean over heads and width of q² + ε)`, keys alike

    Heads compete for one budget: a head may be as large as the others are small, so the bound on its logits is loose.

    Args:
        heads, kv_heads, width: of the queries and keys; `kv_heads` is `heads` when left out.
        eps: ε.

    Symbols: `query_gain`, `key_gain` `[heads, width]` = `q_norm.weight`, `k_norm.weight` `[heads * width]` in Hugging Face.

    Source: OLMo team 2024, 2 OLMo 2 Furious, arXiv 2501.00656.

    Two heads of width 1, of which the first takes all there is:

    >>> import torch
    >>> query, key = QKRMSNormAcrossHeads(2, width=1)(torch.tensor([[[9.0]], [[0.0]]]), torch.tensor([[[4.0]], [[4.0]]]))
    >>> query.flatten().detach(), key.flatten().detach()                     # √2 and 0; 1 and 1
    (tensor([1.4142, 0.0000]), tensor([1., 1.]))
    """

    def __init__(self, heads: int, kv_heads: int | None = None, *, width: int, eps: float = 1e-6):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        _check_sizes("QKRMSNormAcrossHeads", heads=heads, kv_heads=kv_heads, width=width)
        self.width, self.eps = width, eps
        self.query_gain = nn.Parameter(torch.ones(heads, width))
        self.key_gain = nn.Parameter(torch.ones(kv_heads, width))

    def forward(self, query: Tensor, key: Tensor) -> Pair:
        """Both normalised, each in its dtype; half precision is computed in float32."""
        return self._norm(query, self.query_gain), self._norm(key, self.key_gain)

    def _norm(self, states: Tensor, gain: Tensor) -> Tensor:
        _check_width("QKRMSNormAcrossHeads", states, self.width)
        if states.dim() < 3 or states.shape[-3] != gain.shape[0]:
            raise ValueError(
                f"QKRMSNormAcrossHeads: {show(states)} for gains of {gain.shape[0]} heads; "
                f"[*batch, {gain.shape[0]}, length, {self.width}] is needed. kv_heads not given for grouped heads?"
            )
        exact = _exact(states)
        return (_by_rms(exact, self.eps, (-3, -1)) * gain.to(exact.dtype).unsqueeze(-2)).to(states.dtype)

    def bound(self) -> Float[Tensor, ""]:
        """The largest |logit| these gains allow with the scale 1/√width."""
        heads, kv_heads = self.query_gain.shape[0], self.key_gain.shape[0]
        paired = _gain(self.query_gain, self.key_gain.repeat_interleave(heads // kv_heads, dim=0))
        return paired * math.sqrt(heads * kv_heads * self.width)


class QKL2Norm(nn.Module):
    """Queries and keys of length 1, the queries times a learned temperature: logits are g times a cosine.

    `q' = g q / |q|`, `k' = k / |k|`; call attention with `scale=1`, for g takes the place of 1/√width.

    Args:
        length: typical number of tokens (the paper: the 97.5th percentile in training); g starts at log2(L² - L).
        heads: gives each head a temperature of its own; the paper has one for all.
        eps: shorter vectors are divided by it instead of by their length.

    Symbols: `temperature` = g, length = L.

    Source: Henry et al. 2020, Query-Key Normalization for Transformers, arXiv 2010.04245, section 3.

    With L = 2 the temperature is log2(2) = 1; a query of (3, 4) has length 5:

    >>> import torch
    >>> query, key = QKL2Norm(2)(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 9.0]]]))
    >>> query.detach(), key
    (tensor([[[0.6000, 0.8000]]]), tensor([[[0., 1.]]]))
    """

    def __init__(self, length: int, *, heads: int = 1, eps: float = 1e-6):
        super().__init__()
        _check_sizes("QKL2Norm", heads=heads)
        if length < 2:
            raise ValueError(f"QKL2Norm: length is {length}; log2(length² - length) needs at least 2")
        self.eps = eps
        self.temperature = nn.Parameter(torch.full((heads, 1, 1), math.log2(length**2 - length)))

    def forward(self, query: Tensor, key: Tensor) -> Pair:
        """Both normalised, each in its dtype; half precision is computed in float32."""
        heads = self.temperature.shape[0]
        if query.dim() < 3 or heads not in (1, query.shape[-3]):
            raise ValueError(
                f"QKL2Norm: query {show(query)} for {heads} temperatures; [*batch, {heads}, length, width] is needed"
            )
        turned = F.normalize(_exact(query), dim=-1, eps=self.eps)
        turned = turned * self.temperature.to(turned.dtype)
        return turned.to(query.dtype), F.normalize(_exact(key), dim=-1, eps=self.eps).to(key.dtype)

    def bound(self) -> Float[Tensor, ""]:
        """The largest |logit| the temperatures allow with `scale=1`."""
        return self.temperature.abs().amax()


def _exact(states: Tensor) -> Tensor:
    return states.to(torch.promote_types(states.dtype, torch.float32))


def _by_rms(states: Tensor, eps: float, over: int | tuple[int, ...]) -> Tensor:
    return states * torch.rsqrt(states.square().mean(dim=over, keepdim=True) + eps)


def _gain(query_gain: Tensor, key_gain: Tensor) -> Tensor:
    return (query_gain * key_gain).abs().amax()


def _check_sizes(where: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{where}: {name} is {size}; at least 1 is needed")
    if "kv_heads" in sizes and sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"{where}: {sizes['heads']} heads are no multiple of {sizes['kv_heads']} kv heads")


def _check_width(where: str, states: Tensor, width: int) -> None:
    if states.shape[-1] != width:
        raise ValueError(
            f"{where}: {show(states)} for a width of {width}; [*batch, heads, length, {width}] is needed. "
            "Heads not yet split, or the width of the model given for that of a head?"
        )
