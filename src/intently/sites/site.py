"""One attention call found in a running model: where it is, what it computed, and (when kept) its stage tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from intently.report import SiteRecord, Source
from intently.sites.measure import Fit, fit_scale
from intently.sites.projection import Projection
from intently.sites.rotation import Rotation


@dataclass(frozen=True)
class Tensors:
    """The stages of one call in one layout: `[batch, heads, query, key]`, whatever layout the model used.

    `scores` are the bare q·k of the operands at the call (None where no product of queries and keys was found),
    `logits` what entered the softmax, `weights` what multiplied the values. `aggregate` gives the call's output, in
    the model's own layout, for other weights. `query`, `key`, `value` are `[batch, heads, position, width]`.
    """

    scores: Tensor | None
    logits: Tensor | None
    weights: Tensor
    output: Tensor
    aggregate: Callable[[Tensor], Tensor]
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    restore: Callable[[Tensor], Tensor] | None = None  # [batch, heads, query, value width] to the model's layout
    turned: Mapping[str, Callable[[], Rotation | None]] = field(default_factory=dict)  # of query and key, when asked
    uncut: Mapping[str, Tensor] = field(default_factory=dict)  # key and value, where the call got the first ones alone
    projections: Mapping[str, Projection] = field(default_factory=dict)  # behind query, key and value

    @cached_property
    def fit(self) -> Fit:
        """How the logits are made of the scores, which must both be known. Worked out once: many ask."""
        assert self.scores is not None and self.logits is not None
        return fit_scale(self.scores, self.logits)


@dataclass(frozen=True)
class Rows:
    """Whether the rows of the call are tokens: each field names the tensors (query, key, value, output) of which it is untrue.

    `over_batch`: the query axis runs over samples. `scrambled`: a row of one head holds different features at
    different positions, as after a view without the transpose.
    """

    over_batch: tuple[str, ...] = ()
    scrambled: tuple[str, ...] = ()

    @property
    def are_tokens(self) -> bool:
        return not self.over_batch and not self.scrambled


@dataclass(frozen=True)
class Reads:
    """Which head of the keys and of the values each head of the call reads, where heads share them.

    Heads are numbered as their projections (or arguments) hold them: entry h of `keys` and `values` is the own head
    that query head `queries[h]` reads. `summed` is how many query heads were added up into one of the call's heads.
    """

    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    summed: int = 1

    def meant(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The own head that each head of the call is meant to read: ⌊query head / group⌋."""
        group = max(len(self.queries) // max(len(set(own)), 1), 1)
        return tuple(h // group for h in self.queries)

    @property
    def grouped(self) -> bool:
        """Whether heads share keys or values, more than one of them, in groups of one size."""
        counts = [len(set(own)) for own in (self.keys, self.values)]
        return bool(self.queries) and any(1 < n < len(self.queries) and not len(self.queries) % n for n in counts)


@dataclass(frozen=True)
class Scale:
    """The effective factor between q·k and the logits, per head.

    `factors` multiply the product of the unscaled projections; `exact` says that the logits are this multiple plus a
    fixed bias to rounding error. `normed`: queries or keys pass a norm, so that any factor may be meant. `learned`: a
    parameter takes part.
    """

    factors: tuple[float, ...]
    exact: bool
    normed: bool = False
    learned: bool = False
    softcap: float | None = None
    inside: float = 1.0  # the part of the factor that was put on q or k before the product

    @property
    def value(self) -> float | None:
        """The one factor, or None where heads differ."""
        first = self.factors[0] if self.factors else None
        same = first is not None and all(abs(f - first) <= 1e-3 * max(abs(first), 1e-12) for f in self.factors)
        return first if same else None


@dataclass(frozen=True)
class Site:
    """One attention call. `visible` is the mask it really used, `[batch, heads, query, key]`, True = seen.

    `side` are the model's arguments that reach the scores or the weights here, at this call, other than through the
    queries, keys and values: a key mask that was passed on shows up in it.
    """

    path: str
    role: str
    kind: str  # dot | additive | fused | flex
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    queries: int
    keys: int
    scale: Scale | None
    mask: str
    visible: Tensor | None
    bias: str
    kernel: str
    dtype: str
    dropout: float
    side: frozenset[str]
    origins: Mapping[str, frozenset[str]]
    lines: Mapping[str, Source]
    row_sum: Tensor | None  # [batch, heads, query]: sum of the weights over the keys
    normalized_over: str = "keys"
    rows: Rows = field(default_factory=Rows)
    reads: Reads | None = None  # None: heads share nothing, or it cannot be told what they read
    partial: bool = False  # exponentials of one block of keys, brought to sums of 1 somewhere after this call
    deferred: bool = False  # divided by the row sum after the product with the values
    negative: bool = False
    sink: bool = False  # the softmax saw more than the keys that meet values
    made_by: str = "softmax"  # the call that turned logits into weights: softmax, exp, sigmoid, …
    refused: frozenset[str] = frozenset()  # what kept a call of torch's fused attention from a fused kernel
    mask_given: bool = False  # a mask was passed to a fused call, besides or in place of `is_causal`
    repaired: bool = False  # an edit put another output in its place
    key_name: str = ""  # path and number of the call, the name under which an edit finds it
    tensors: Tensors | None = None
    ready: Mapping[frozenset[str], Tensor] = field(default_factory=dict)  # latest hidden states, by what they hold
    sampled_rows: int | None = None

    @property
    def source(self) -> Source | None:
        """The user's line where the weights are made."""
        return self.lines.get("normalize") or self.lines.get("aggregate")

    def line(self, stage: str) -> Source | None:
        """The user's line for one stage, or the nearest known one."""
        return self.lines.get(stage) or self.source

    def rotation(self, name: str) -> Rotation | None:
        """How tables turn the `query` or the `key` on its way here; None where none does, or it cannot be told."""
        asked = self.tensors.turned.get(name) if self.tensors is not None else None
        return asked() if asked is not None else None

    def record(self) -> SiteRecord:
        """This site as plain data for reports."""
        return SiteRecord(
            path=self.path,
            role=self.role,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            queries=self.queries,
            keys=self.keys,
            scale=self.scale.value if self.scale else None,
            mask=self.mask,
            kernel=self.kernel,
            dtype=self.dtype,
            dropout=self.dropout,
            bias=self.bias,
            source=self.source,
        )
