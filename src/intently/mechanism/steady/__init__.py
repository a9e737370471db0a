"""Steadying: what keeps logits from growing until every query sees one key alone. (A softcap is part of `mask_scale`.)"""

from __future__ import annotations

from intently.mechanism.steady.entropy_bound import entropy_bound, row_entropy
from intently.mechanism.steady.qk_norm import QKL2Norm, QKLayerNorm, QKRMSNorm, QKRMSNormAcrossHeads
from intently.mechanism.steady.sigma_reparam import SigmaReparam, sigma_reparam

__all__ = [
    "QKL2Norm",
    "QKLayerNorm",
    "QKRMSNorm",
    "QKRMSNormAcrossHeads",
    "SigmaReparam",
    "entropy_bound",
    "row_entropy",
    "sigma_reparam",
]
