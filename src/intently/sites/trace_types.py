"""What tracing passes from hand to hand: a product that may be scores, a softmax that waits for values, the sizes of the batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from intently.report import Source
from intently.sites.contraction import Contraction
from intently.sites.provenance import Node


@dataclass
class Score:
    """A product of queries and keys that may become attention."""

    contraction: Contraction
    node: Node
    operands: tuple[Node, ...]
    source: Source | None
    fixed_side: bool  # one operand is a parameter: a learned query or a projection


@dataclass
class Pending:
    """A softmax (by any spelling) of something that depends on the input, waiting for its values."""

    scores: tuple[Score, ...]
    logits: Tensor
    logits_node: Node
    node: Node
    how: str
    dim: int | None
    source: Source | None
    dropout: float = 0.0
    dropout_source: Source | None = None
    summed: bool = False  # something sums these weights, so that it may divide by the sum


@dataclass
class Sizes:
    """What is known of the batch: how many samples, and the lengths of its streams."""

    batch: int | None = None
    lengths: frozenset[int] = frozenset()
