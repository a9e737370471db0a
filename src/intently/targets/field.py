"""A field of a configuration, read so that one which cannot be read counts as one that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def field_of(holder: Any, name: str) -> Any:
    """What `holder`, an object or a mapping, says under `name`; None where it says nothing.

    A property may raise anything: of layers that differ from each other, the whole configuration says nothing.
    """
    if isinstance(holder, Mapping):
        return holder.get(name)
    try:
        return getattr(holder, name, None)
    except Exception:
        return None
