"""The zoo: small hand-written models in four styles, each with one planted fault or with none."""

from __future__ import annotations

from tests.zoo import caches, documents, einsum, heads, matmul, memory, multihead, numerics, positions, sdpa, windows
from tests.zoo.case import STYLES, Case, Outcome, judge

# Faults planted in one model share its clean twin, which is checked once.
CASES: tuple[Case, ...] = tuple(
    {
        str(c): c
        for c in (
            *documents.CASES,
            *einsum.CASES,
            *matmul.CASES,
            *memory.CASES,
            *multihead.CASES,
            *numerics.CASES,
            *positions.CASES,
            *sdpa.CASES,
            *heads.CASES,
            *caches.CASES,
            *windows.CASES,
        )
    }.values()
)

# Where a fault cannot exist in a style, and why.
IMPOSSIBLE: dict[tuple[str, str], str] = {
    **multihead.IMPOSSIBLE,
    **numerics.IMPOSSIBLE,
    **positions.IMPOSSIBLE,
    **sdpa.IMPOSSIBLE,
}

__all__ = ["CASES", "IMPOSSIBLE", "STYLES", "Case", "Outcome", "judge"]
