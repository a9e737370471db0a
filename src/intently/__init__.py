"""Intently: does the attention in a PyTorch model do what you intend? Names load on first use, so importing is free."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["CannotCheck", "Intent", "Mask", "Report", "Target", "__version__", "check", "sites"]

if TYPE_CHECKING:
    from intently.check import check
    from intently.errors import CannotCheck
    from intently.intent import Intent
    from intently.masks import Mask
    from intently.report import Report
    from intently.sites import find as sites
    from intently.targets import Target

# Where each public name lives. `check` and `sites` are absent: they are modules that can be called, see `_verbs`.
_HOMES = {
    "CannotCheck": "intently.errors",
    "Intent": "intently.intent",
    "Mask": "intently.masks",
    "Report": "intently.report",
    "Target": "intently.targets",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in {"check", "sites"}:
        return import_module(f"intently.{name}")
    raise AttributeError(f"module 'intently' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
