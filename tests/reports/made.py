"""Reports made by hand, so that rendering is tested without a model."""

from __future__ import annotations

import math
from dataclasses import replace

from intently.report import Cell, Finding, Report, SiteRecord, Source, Table, Witness

LEAK = Finding(
    fault="causal-leak",
    promise="causal",
    stage="mask",
    severity="error",
    site="layers.1.attn",
    message="query 2 gives weight 0.31 to key 3, which lies after it.",
    witness=Witness(
        "overwriting token 3 moved the output at 2 by 0.31; the noise floor is 2.2e-16",
        Table(
            corner="query\\key",
            columns=("0", "1", "2", "3"),
            rows=(("1", (0.5, 0.5, 0.0, 0.0)), ("2", (0.2, 0.2, 0.29, 0.31))),
            marked=((1, 3),),
        ),
        {"moved": 0.31, "at": 2, "shape": (1, 4)},
    ),
    proof="proven",
    fix="Pass `is_causal=True`, or a lower triangle of [query, key].",
    heads=(0, 3),
    source=Source(__file__, 1),
    condition="eager",
    proof_note="adding the triangle at layers.1.attn restored causal",
)

SITE = SiteRecord(
    path="layers.0.attn",
    role="self",
    heads=8,
    kv_heads=2,
    head_dim=16,
    value_dim=16,
    queries=7,
    keys=7,
    scale=0.25,
    mask="causal & window(5)",
    kernel="sdpa: math",
    dtype="float64",
    dropout=0.0,
    bias="none",
    source=Source("/models/net.py", 42),
)

KEPT = Report(
    target="net.py:build [tiny]",
    verdict="kept",
    intent="causal & window(5), from config.sliding_window",
    grid=(
        Cell("causal", "eager", "kept", 0.0, 2.2e-16),
        Cell("causal", "sdpa", "kept", 1e-17, 2.2e-16),
        Cell("cache-equal", "eager", "not-applicable", note="the model has no cache"),
        Cell("padding-inert", "eager", "not-tried", note="the model takes no key mask"),
    ),
    findings=(),
    sites=tuple(replace(SITE, path=f"layers.{layer}.attn") for layer in range(4)),
    environment={"torch": "2.13.0", "python": "3.11.7"},
    forwards=62,
    seconds=3.42,
    notes=("The model cannot ignore pads: it takes no key mask.",),
)

BROKEN = replace(
    KEPT,
    verdict="broken",
    grid=(Cell("causal", "eager", "broken", 0.31, 2.2e-16), *KEPT.grid[1:]),
    findings=(replace(LEAK, severity="note", fault="slow-path", promise="affordable", proof="suspected"), LEAK),
)

# What JSON has no numbers for, and what terminal markup would eat.
HARD = replace(
    BROKEN,
    grid=(
        Cell("finite", "bfloat16 [left pad]", "broken", math.nan, 0.0),
        Cell("causal", "α → β", "broken", math.inf, None),
    ),
    findings=(replace(LEAK, site="blocks[0].attn[/bold]", message="weight ≥ 0.5 at ⌊h/2⌋ [red]really[/red]"),),
    sites=(replace(SITE, scale=None, source=None),),
)

UNCHECKED = replace(KEPT, verdict="unchecked", grid=(), sites=(), notes=("the model has no parameters",))
ALL = (KEPT, BROKEN, HARD, UNCHECKED)
