"""Folding of repeated paths: nothing is lost, order is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from intently.reports.folding import fold


def test_interleaved_sites_of_one_layer():
    paths = [(f"decoder.{layer}.{kind}", kind) for layer in range(3) for kind in ("self", "cross")]
    assert fold(paths) == [("decoder.0–2.self", 3, 0), ("decoder.0–2.cross", 3, 1)]


def test_the_number_that_counts_layers_is_found():
    paths = [(f"block.{layer}.layer.{part}.attn", part) for layer in range(4) for part in (0, 1)]
    assert fold(paths) == [("block.0–3.layer.0.attn", 4, 0), ("block.0–3.layer.1.attn", 4, 1)]


def test_several_calls_in_one_module_stay_apart():
    assert fold([("attn#0", "a"), ("attn#1", "a")]) == [("attn#0", 1, 0), ("attn#1", 1, 1)]


def test_nothing_to_fold():
    assert fold([]) == []


parts = st.sampled_from(["layers", "attn", "0", "1", "2", "10"])
paths = st.lists(st.tuples(st.lists(parts, min_size=1, max_size=4).map(".".join), st.sampled_from("ab")), max_size=12)


@given(paths)
def test_every_path_is_counted_once_and_the_first_leads(entries):
    folded = fold(entries)
    assert sum(count for _, count, _ in folded) == len(entries)
    firsts = [first for _, _, first in folded]
    assert firsts == sorted(set(firsts))
