"""An ONNX graph run node by node in torch, so that its attention is found, described and edited like any other model's."""

from __future__ import annotations

from intently.sites.onnx.replay import Replay, Unreplayed

__all__ = ["Replay", "Unreplayed"]
