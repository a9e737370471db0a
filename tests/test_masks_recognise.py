"""Recognising: matrices written by hand get the words a person would use, and exact words rebuild their matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from intently.masks import Mask, recognise
from intently.masks.recognise import MOST_LISTED

from .test_masks import BATCH, SIZE, masks


def rows(text):
    return torch.tensor([[bit == "1" for bit in line] for line in text.split()])


@pytest.mark.parametrize(
    ("matrix", "phrase"),
    [
        ("1", "full"),
        ("0", "none: no query sees any key"),
        ("111 111", "full"),
        ("000 000", "none: no query sees any key"),
        ("1000 1100 1110 1111", "causal"),
        ("1110 1111", "bottom-right causal"),
        ("11100 11110 11111 11111 11111", "causal, offset 2"),
        ("0000 1000 1100 1110", "causal, offset -1"),
        ("0111 0011 0001 0000", "anti-causal (only later keys)"),
        ("1000 0100 0010 0001", "own key only"),
        ("10000 11000 11100 01110 00111", "causal & window(3)"),
        ("0110 0011", "bottom-right (causal & window(2))"),
        ("11100 11110 11111 01111 00111", "window(2, 2)"),
        ("11000 11100 11110 01111 00111", "window(2, 1)"),
        ("1110 1110 1110 1111", "prefix(3)"),
        ("11000 11000 00111 00111 00111", "documents of 2, 3"),
        ("10000 11000 00100 00110 00111", "causal & documents of 2, 3"),
        ("100000 110000 011000 000100 000110 000011", "causal & window(2) & documents of 3, 3"),
        ("1010 0101 1010 0101", "documents(ids=[0, 1, 0, 1])"),
        ("100000 110000 111000 101100 100110 100011", "causal & (window(2) | key 0)"),
        ("10000", "only key 0"),
        ("11101", "all but key 3"),
        ("0011 0011 0011", "all but keys 0–1"),
        ("0000 0100 0110 0111", "causal & all but key 0"),
        (
            "110110000 111111000 011011000 110110110 111111111 011011011 000110110 000111111 000011011",
            "neighborhood(3x3, 1)",
        ),
    ],
)
def test_words_for_a_matrix(matrix, phrase):
    found = recognise(rows(matrix))
    assert found.phrase == phrase == str(found)
    assert found.exact
    assert found.exceptions == ()
    assert torch.equal(found.mask.matrix(*rows(matrix).shape), rows(matrix))


def stack(*samples):
    return torch.stack([rows(sample) for sample in samples])


@pytest.mark.parametrize(
    ("matrix", "phrase"),
    [
        (stack("1000 1100 1100 1100", "1000 1100 1110 1111"), "causal & padding: keys kept 2, 4 (right)"),
        (stack("0000 0000 0010 0011", "1000 1100 1110 1111"), "causal & padding: keys kept 2, 4 (left)"),
        (stack("1110 1110", "1100 1100"), "padding: keys kept 3, 2 (right)"),
        (stack("10100 10100", "11000 11000"), "padding: sample 0 only keys 0, 2; sample 1 only keys 0–1"),
        (stack("1110 1110", "1110 1110"), "all but key 3"),
        (stack("100 010 001", "111 111 111", "100 010 001"), "samples 0, 2: own key only; sample 1: full"),
        (
            stack("1000 1100 0010 0011", "1000 0100 0110 0111"),
            "sample 0: causal & documents of 2, 2; sample 1: causal & documents of 1, 3",
        ),
    ],
)
def test_words_for_a_batch(matrix, phrase):
    found = recognise(matrix)
    assert (found.phrase, found.exact) == (phrase, True)
    assert torch.equal(found.mask.matrix(*matrix.shape[1:]).expand(matrix[:, None].shape), matrix[:, None])


def test_heads_that_differ_are_told_apart():
    causal, full = rows("100 110 111"), rows("111 111 111")
    found = recognise(torch.stack([causal, causal, causal, full])[None])
    assert found.phrase == "heads 0–2: causal; head 3: full"
    assert found.mask == Mask.per_head(Mask.causal(), Mask.causal(), Mask.causal(), Mask.full())


def test_exceptions_are_listed():
    odd = rows("10000 11010 11100 11110 11111")
    found = recognise(odd)
    assert found.phrase == "causal except query 1 sees key 3"
    assert found.exceptions == ((0, 0, 1, 3, True),)
    assert (found.exact, found.count, found.mask) == (False, 1, Mask.causal())
    odd[3, 1] = False
    assert recognise(odd).phrase == "causal except query 1 sees key 3, query 3 does not see key 1"


def test_exceptions_in_a_batch_name_sample_and_head():
    matrix = (Mask.causal() & Mask.padding([4, 6])).matrix(6).repeat(1, 3, 1, 1)
    matrix[1, 2, 0, 3] = True
    found = recognise(matrix)
    assert found.phrase == (
        "heads 0–1: causal & padding: keys kept 4, 6 (right);"
        " head 2: causal & padding: keys kept 4, 6 (right) except sample 1 query 0 sees key 3"
    )
    assert found.exceptions == ((1, 2, 0, 3, True),)


def test_equal_samples_each_have_their_exceptions():
    matrix = stack("1 0 1", "1 0 1", "0 0 0")
    found = recognise(matrix, offset=2)
    assert found.phrase == "samples 0–1: full except query 1 does not see key 0; sample 2: none: no query sees any key"
    assert found.exceptions == ((0, 0, 1, 0, False), (1, 0, 1, 0, False))
    assert found.count == 2


def test_a_leaking_pad_is_an_exception_not_a_kept_key():
    matrix = (Mask.causal() & Mask.padding([4, 8])).matrix(8).clone()
    matrix[0, 0, 7, 5] = True
    found = recognise(matrix)
    assert not found.exact or "5" in found.phrase
    rebuilt = found.mask.matrix(8).expand_as(matrix).clone()
    for sample, head, query, key, seen in found.exceptions:
        rebuilt[sample, head, query, key] = seen
    assert torch.equal(rebuilt, matrix)


def test_rows_leave_pad_queries_out():
    matrix = (Mask.causal() & Mask.padding([2, 4], side="left")).matrix(4).clone()
    matrix[0, 0, :2] = True  # what transformers' sdpa path does to rows that would see nothing
    real = torch.tensor([[False, False, True, True], [True] * 4])
    assert recognise(matrix, rows=real).phrase == "causal & padding: keys kept 2, 4 (left)"
    assert recognise(matrix, rows=real).exact


def test_whole_rows_are_told_as_rows():
    matrix = (Mask.causal() & Mask.padding([4, 6], side="left")).matrix(6).clone()
    matrix[0, 0, :2] = True
    found = recognise(matrix)
    assert found.phrase == "causal & padding: keys kept 4, 6 (left) except sample 0 queries 0–1 see every key"
    assert (found.exact, found.count, len(found.exceptions)) == (False, 12, 12)
    matrix = Mask.padding([4, 6]).matrix(6).clone()
    matrix[0, 0, 4:] = False
    assert recognise(matrix).phrase == "padding: keys kept 4, 6 (right) except sample 0 queries 4–5 see no key"


def test_offset_reads_a_cached_step():
    mask = Mask.causal() & Mask.window(3)
    assert recognise(mask.matrix(2, 7, offset=5), offset=5).phrase == "causal & window(3)"
    assert recognise(Mask.causal().matrix(1, 5), offset=4).phrase == "only key 0"
    assert recognise(Mask.causal().matrix(1, 5, offset=4), offset=4).phrase == "full"


def test_noise_has_no_phrase():
    noise = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) > 0.5
    found = recognise(noise)
    assert found.mask is None
    assert not found.exact
    assert found.phrase.startswith("no simple pattern (49%")


def test_listed_exceptions_are_bounded():
    matrix = torch.ones(256, 256, dtype=torch.bool)
    matrix[torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) > 0.95] = False
    found = recognise(matrix)
    assert found.mask == Mask.full()
    assert found.count == int((~matrix).sum()) > MOST_LISTED == len(found.exceptions)


def test_long_matrices():
    for mask in (Mask.causal() & Mask.window(100), Mask.causal() & Mask.documents(100, 212, 200), Mask.prefix(40)):
        assert recognise(mask.matrix(512)).mask == mask
    assert recognise(Mask.neighborhood((16, 32), 3).matrix(512)).mask == Mask.neighborhood((16, 32), 3)


def test_expanded_heads_cost_nothing():
    assert recognise(Mask.causal().matrix(4).expand(2, 1000, 4, 4)).mask == Mask.causal()


def test_empty_is_full():
    assert recognise(torch.ones(0, 3).bool()).phrase == "full"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: recognise(torch.ones(2, 2)), TypeError, r"reads bool.*not float32\[2, 2\]"),
        (lambda: recognise(torch.ones(2).bool()), ValueError, r"not bool\[2\]"),
        (
            lambda: recognise(torch.ones(2, 2).bool(), rows=torch.ones(2).bool()),
            ValueError,
            r"bool\[1, 2\], not bool\[2\]",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


simple = st.one_of(
    st.just(Mask.full()),
    st.just(Mask.none()),
    st.builds(Mask.causal, st.integers(-7, 7)),
    st.builds(Mask.window, st.integers(1, 8)),
    st.builds(Mask.window, st.integers(0, 8), st.integers(0, 8)),
    st.builds(Mask.prefix, st.integers(0, 8)),
    st.builds(lambda lengths: Mask.documents(*lengths), st.sampled_from([(1, 7), (3, 5), (2, 2, 4), (1, 1, 6), (8,)])),
    st.builds(lambda width: Mask.causal() & Mask.window(width), st.integers(1, 8)),
    st.sampled_from([Mask.causal() & Mask.documents(3, 5), Mask.causal() & Mask.window(2) & Mask.documents(5, 3)]),
    st.sampled_from([Mask.neighborhood((2, 4), 1), Mask.neighborhood((4, 2), (1, 0)), Mask.neighborhood((2, 2, 2), 0)]),
    st.builds(lambda keys: Mask.keys(*keys), st.sets(st.integers(0, 7), min_size=1)),
)
padding = st.one_of(
    st.just(Mask.full()),
    st.builds(
        Mask.padding, st.lists(st.integers(0, 8), min_size=2, max_size=2), side=st.sampled_from(["left", "right"])
    ),
)


@given(simple, padding)
@settings(max_examples=120, deadline=None)
def test_the_language_recognises_itself(structure, keys):
    matrix = (structure & keys).matrix(8)
    matrix = matrix.expand(2, 1, 8, 8)
    found = recognise(matrix)
    assume(found.mask is not None or keys != Mask.full())  # of a grid, pads may leave too little to read
    if found.mask is None:
        return
    if keys == Mask.full():  # key masks can hide what tells two structures apart
        assert found.exact, found.phrase
    rebuilt = found.mask.matrix(8).expand_as(matrix).clone()
    for sample, head, query, key, seen in found.exceptions:
        rebuilt[sample, head, query, key] = seen
    assert torch.equal(rebuilt, matrix)


@given(masks)
@settings(max_examples=100, deadline=None)
def test_phrase_plus_exceptions_is_the_matrix(mask):
    matrix = mask.matrix(SIZE).expand(BATCH, 3, SIZE, SIZE)
    found = recognise(matrix)
    assert found.exact == (found.mask is not None and not found.count)
    if found.mask is None:
        return
    rebuilt = found.mask.matrix(SIZE).expand_as(matrix).clone()
    assert int((rebuilt != matrix).sum()) >= found.count == len(found.exceptions)
    for sample, head, query, key, seen in found.exceptions:
        assert bool(matrix[sample, head, query, key]) == seen != bool(rebuilt[sample, head, query, key])
    if found.exact:
        assert torch.equal(rebuilt, matrix)
