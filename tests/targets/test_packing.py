"""How a model is told of packed documents, held against rows written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import intently
from intently import Intent, Mask, Target
from intently.targets.packing import split
from intently.targets.signature import form_of_telling
from intently.targets.stream import Telling

ROW = (0, 0, 1, 1, 1)


@pytest.mark.parametrize(
    ("telling", "value"),
    [
        (Telling("document_ids", "numbers"), [[1, 1, 2, 2, 2], [1, 1, 2, 2, 2]]),
        (Telling("position_ids", "positions"), [[0, 1, 0, 1, 2], [0, 1, 0, 1, 2]]),
        (Telling("positions", "positions", rank=1), [0, 1, 0, 1, 2]),
        (Telling("cu_seqlens", "bounds"), [0, 2, 5, 7, 10]),
    ],
)
def test_what_is_told_of_a_row(telling: Telling, value: list) -> None:
    assert telling.value(2, ROW).tolist() == value


def test_arguments_are_known_by_name() -> None:
    names = ("document_ids", "doc_ids", "segment_ids", "seq_idx", "sequence_ids", "cu_seqlens", "position_ids")
    forms = ["numbers"] * 5 + ["bounds", "positions"]
    assert [form_of_telling(n) for n in names] == forms
    assert [form_of_telling(n) for n in ("input_ids", "x", "attention_mask", "token_type_ids", "seq_len")] == [None] * 5


@pytest.mark.parametrize("length", range(4, 20))
def test_rows_are_split_whole(length: int) -> None:
    numbers = split(length)
    assert len(numbers) == length
    assert list(numbers) == sorted(numbers)
    assert min(numbers.count(n) for n in set(numbers)) >= 2


class Pairs(nn.Module):
    """Two sentences, told apart by an embedding or by a mask."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.embed, self.kind, self.qkv = nn.Embedding(19, 16), nn.Embedding(8, 16), nn.Linear(16, 48)
        self.apart = apart

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if segment_ids is not None and not self.apart:
            x = x + self.kind(segment_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / 4
        if segment_ids is not None and self.apart:
            scores = scores.masked_fill(segment_ids[:, :, None] != segment_ids[:, None, :], float("-inf"))
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("apart", [False, True])
def test_sentence_types_are_no_documents(*, apart: bool) -> None:
    torch.manual_seed(0)
    report = intently.check(Target(Pairs(apart=apart).eval(), Intent(Mask.full())), select=["documents-isolated"])
    verdicts = {c.verdict for c in report.grid if c.promise == "documents-isolated"}
    assert [f for f in report.findings if f.severity == "error"] == []
    assert verdicts == ({"not-applicable", "kept"} if apart else {"not-applicable"})


def test_stated_documents_that_the_model_knows_nothing_of_are_told() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    stated = Intent(Mask.parse("causal & documents(5, 7)"))
    report = intently.check(Target(attention, stated), select=["documents-isolated"])
    assert [(f.fault, f.severity, f.proof) for f in report.findings] == [("documents-leak", "error", "proven")]
    # By hand: queries of the second document, 7, each see the 5 keys of the first; 2 samples, 3 heads.
    assert f"{7 * 5 * 2 * 3} keys of other documents" in report.findings[0].message
