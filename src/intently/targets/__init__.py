"""Targets: load a thing to check, from Python, from transformers or from a folder."""

from __future__ import annotations

from intently.targets.load import load
from intently.targets.stream import Batch, Padding, Stream
from intently.targets.target import Switch, Target

__all__ = ["Batch", "Padding", "Stream", "Switch", "Target", "load"]
