"""The demo: an honest and a faulty decoder, as targets to check."""

from __future__ import annotations

import torch

from intently.demo.decoder import Attention, Decoder, InvertedMask, SeesTheFuture, WithoutScale
from intently.intent import Intent
from intently.masks import Mask
from intently.targets import Target

__all__ = ["faulty", "honest"]


def honest() -> Target:
    """Four layers that do what they are meant to."""
    return _target("the honest decoder", [Attention, Attention, Attention, Attention])


def faulty() -> Target:
    """The same decoder with three silent faults, in layers 1, 2 and 3."""
    return _target("the faulty decoder", [Attention, WithoutScale, SeesTheFuture, InvertedMask])


def _target(name: str, layers: list[type[Attention]]) -> Target:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Target(Decoder(layers), Intent(Mask.causal()), name=name)
