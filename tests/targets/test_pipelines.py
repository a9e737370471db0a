"""A pipeline of transformers stands for its model."""

from __future__ import annotations

import pytest

import intently
from intently.targets.huggingface import tiny

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


def test_the_model_of_a_pipeline_is_checked_and_its_padding_told() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", pad_token="b")
    pipeline = transformers.TextGenerationPipeline(model=tiny("gpt2").model, tokenizer=tokenizer)
    report = intently.check(pipeline, select=["cache-equal"])
    assert report.target == "GPT2LMHeadModel"
    assert "the model of a pipeline was checked; its tokenizer pads on the left" in report.notes
    assert any(c.promise == "cache-equal" and c.verdict == "kept" for c in report.grid)
