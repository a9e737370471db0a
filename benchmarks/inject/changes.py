"""What is planted: one change of an attention call, made inside the call's own module while everything else stays as released."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from intently.report import SiteRecord

# A logit below this hides its key.
HIDDEN = -1e4


@dataclass(frozen=True)
class Change:
    """One fault to plant, by the name under which a check should tell it.

    `names` are the right names, `sees` turns the bool mask `[..., query, key]` of a call into a faulty one, `ratio`
    multiplies q·k, `heads` reorders keys and values, `axis` is the softmax's, `drop` a dropout probability,
    `uncapped` takes a softcap away, `swap` feeds the call's own stream in place of the memory.
    """

    name: str
    names: frozenset[str]
    applies: Callable[[SiteRecord], bool]
    sees: Callable[[Tensor], Tensor] | None = None
    ratio: Callable[[SiteRecord], float] | None = None
    tiled: bool = False
    axis: int = -1
    drop: float = 0.0
    uncapped: bool = False
    swap: bool = False
    least: int = 2  # calls with fewer queries are left alone
    masked: bool = False  # only where the model takes a key mask
    stepping: bool = False  # only calls with fewer queries than keys are changed
    also: frozenset[str] = field(default_factory=frozenset)  # names that are as true of the same change


def _any(site: SiteRecord) -> bool:
    return True


def _self(site: SiteRecord) -> bool:
    return site.role == "self"


def _causal(site: SiteRecord) -> bool:
    return site.role == "self" and "causal" in site.mask


def _both_ways(site: SiteRecord) -> bool:
    return site.role == "self" and site.mask == "full"


def _unwindowed(site: SiteRecord) -> bool:
    return _causal(site) and "window" not in site.mask


def _windowed(site: SiteRecord) -> bool:
    return site.role == "self" and "causal" in site.mask and "window" in site.mask


def _cross(site: SiteRecord) -> bool:
    return site.role == "cross"


def _scaled(site: SiteRecord) -> bool:
    return site.scale is not None and site.head_dim > 1 and abs(site.scale - 1) > 0.05


def _grouped(site: SiteRecord) -> bool:
    return 1 < site.kv_heads < site.heads


def _tril(visible: Tensor, diagonal: int = 0) -> Tensor:
    return torch.ones(visible.shape[-2:], dtype=torch.bool).tril(diagonal)


def _order(visible: Tensor, diagonal: int = 0) -> Tensor:
    """The triangle of a call, placed by the latest key that a query sees: behind it there may be room for more."""
    queries, keys = visible.shape[-2:]
    numbers = torch.where(visible, torch.arange(keys), -keys).amax(-1) - torch.arange(queries)
    return _tril(visible, int(numbers.amax()) + diagonal)


def _real(visible: Tensor) -> Tensor:
    """Keys that some query sees: the real ones."""
    return visible.any(-2, keepdim=True).expand(visible.shape)


def _one_more(visible: Tensor) -> Tensor:
    return (visible | (_order(visible, 1) & ~_order(visible))) & _real(visible)


def _wider(visible: Tensor) -> Tensor:
    """Every row also sees the key before its first one."""
    earlier = torch.zeros_like(visible)
    earlier[..., :-1] = visible[..., 1:]
    return (visible | earlier) & _order(visible) & _real(visible)


def _top_left(visible: Tensor) -> Tensor:
    return visible & _tril(visible)


def _times(factor: Callable[[SiteRecord], float]) -> Callable[[SiteRecord], float]:
    """The ratio that turns a site's own factor into another."""
    return lambda site: factor(site) / (site.scale or 1.0)


PADDING = frozenset({"padding-leak", "mask-ignored"})

CHANGES = (
    Change("triangle dropped", frozenset({"causal-leak"}), _causal, sees=_real),
    Change("triangle shifted by one", frozenset({"causal-leak"}), _causal, sees=_one_more),
    Change("triangle added", frozenset({"causal-extra"}), _both_ways, sees=lambda v: v & _tril(v)),
    Change("key mask dropped", PADDING, _unwindowed, sees=lambda v: _order(v).expand(v.shape), least=1, masked=True),
    Change("key mask dropped, both ways", PADDING, _both_ways, sees=torch.ones_like, masked=True),
    Change("mask inverted", frozenset({"mask-inverted"}), _self, sees=torch.logical_not, masked=True),
    Change("window dropped", frozenset({"window-ignored"}), _windowed, sees=lambda v: _order(v) & _real(v)),
    Change("window widened", frozenset({"window-off-by-one"}), _windowed, sees=_wider),
    Change("scale removed", frozenset({"scale-missing"}), _scaled, ratio=_times(lambda s: 1.0)),
    Change("scale doubled", frozenset({"scale-twice"}), _scaled, ratio=_times(lambda s: (s.scale or 1.0) ** 2)),
    Change(
        "scale of another width", frozenset({"scale-wrong-width"}), _scaled,
        ratio=_times(lambda s: 1 / math.sqrt(s.head_dim * s.heads)),
    ),
    Change("heads tiled", frozenset({"kv-heads-misordered"}), _grouped, tiled=True),
    Change("softmax over queries", frozenset({"softmax-wrong-axis"}), _self, axis=-2),
    Change("dropout", frozenset({"dropout-in-eval"}), _any, drop=0.2),
    Change("memory mask dropped", frozenset({"memory-mask-ignored"}), _cross, sees=torch.ones_like, least=1, masked=True),
    Change("memory swapped", frozenset({"cross-miswired"}), _cross, swap=True, least=1),
    Change("cache offset", frozenset({"cache-misaligned"}), _causal, sees=_top_left, least=1, stepping=True),
    Change("softcap dropped", frozenset({"bias-ignored"}), _self, uncapped=True, least=1),
)  # fmt: skip


def lowest(dtype: torch.dtype) -> float:
    """A fill that stays a number where a softmax rounds its logits to float32: a row that sees nothing is then even."""
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)


def spread(mask: Any, causal: bool, queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a fused call sees, bool, and what is added to its logits, both broadcastable to `[..., query, key]`."""
    visible, bias = torch.ones(queries, keys, dtype=torch.bool), torch.zeros((), dtype=dtype)
    if causal:
        visible = visible.tril()
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        visible = visible & (mask > HIDDEN)
        bias = torch.where(mask > HIDDEN, mask, torch.zeros_like(mask))
    return visible, bias
