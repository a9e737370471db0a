"""Masks hold what they say: hand-written rules in a double loop, torch's own helpers, and the laws of the algebra."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from intently.masks import Mask, MaskSyntaxError, to_mask_mod


def by_rule(rule, queries, keys):
    """The independent source: a plain double loop over (i, j)."""
    return torch.tensor([[bool(rule(i, j)) for j in range(keys)] for i in range(queries)]).reshape(queries, keys)


def grid(position, shape):
    row, column = divmod(position, shape[1])
    return row, column


RULES = [
    (Mask.full(), lambda i, j: True),
    (Mask.none(), lambda i, j: False),
    (Mask.causal(), lambda i, j: j <= i),
    (Mask.causal(2), lambda i, j: j <= i + 2),
    (Mask.causal(-1), lambda i, j: j <= i - 1),
    (Mask.window(3), lambda i, j: j > i - 3),
    (Mask.causal() & Mask.window(4), lambda i, j: i - 4 < j <= i),
    (Mask.window(2, 1), lambda i, j: i - 2 <= j <= i + 1),
    (Mask.chunks(3), lambda i, j: i // 3 == j // 3),
    (Mask.prefix(3), lambda i, j: j < 3 or j <= i),
    (Mask.keys(0, range(2, 4)), lambda i, j: j in (0, 2, 3)),
    (Mask.documents(3, 5), lambda i, j: (i < 3) == (j < 3)),
    (Mask.documents(ids=[7, 1, 7, 7, 1, 2, 2, 7]), lambda i, j: "71771227"[i] == "71771227"[j]),
    (Mask.neighborhood(8, 2), lambda i, j: abs(i - j) <= 2),
    (
        Mask.neighborhood((2, 4), 1),
        lambda i, j: all(abs(a - b) <= 1 for a, b in zip(grid(i, (2, 4)), grid(j, (2, 4)), strict=True)),
    ),
    (
        Mask.neighborhood((2, 4), (0, 2)),
        lambda i, j: i // 4 == j // 4 and abs(i % 4 - j % 4) <= 2,
    ),
    (Mask.causal() & (Mask.window(2) | Mask.keys(0)), lambda i, j: j <= i and (j > i - 2 or j == 0)),
    (~Mask.causal(), lambda i, j: j > i),
]


@pytest.mark.parametrize(("mask", "rule"), RULES, ids=lambda value: str(value) if isinstance(value, Mask) else "")
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (3, 7), (7, 3), (1, 1), (1, 8)])
def test_matrix_is_the_rule(mask, rule, queries, keys):
    assert torch.equal(mask.matrix(queries, keys), by_rule(rule, queries, keys))


@pytest.mark.parametrize(("mask", "rule"), RULES, ids=lambda value: str(value) if isinstance(value, Mask) else "")
def test_offset_places_the_first_query(mask, rule):
    assert torch.equal(mask.matrix(3, 8, offset=5), by_rule(rule, 8, 8)[5:])


def test_the_harness_can_fail():
    assert not torch.equal(Mask.causal().matrix(4), by_rule(lambda i, j: j < i, 4, 4))


def test_causal_is_tril():
    ones = torch.ones(4, 6, dtype=torch.bool)
    assert torch.equal(Mask.causal().matrix(4, 6), ones.tril())
    assert torch.equal(Mask.causal(align="bottom-right").matrix(4, 6), ones.tril(2))
    assert torch.equal(Mask.causal(1, align="bottom-right").matrix(4, 6), ones.tril(3))
    assert torch.equal(Mask.causal(align="bottom-right").matrix(6, 4), torch.ones(6, 4, dtype=torch.bool).tril(-2))


def test_causal_agrees_with_torch_bias_classes():
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    eye = torch.eye(6)[None, None]
    for built, mask in (
        (causal_lower_right(3, 6), Mask.causal(align="bottom-right")),
        (causal_upper_left(3, 6), Mask.causal()),
    ):
        query = torch.zeros(1, 1, 3, 6)
        out = torch.nn.functional.scaled_dot_product_attention(query, eye, eye, attn_mask=built)
        assert torch.equal(out[0, 0] > 0, mask.matrix(3, 6))


def test_bottom_right_ignores_offset():
    mask = Mask.causal(align="bottom-right")
    assert torch.equal(mask.matrix(2, 5, offset=1), mask.matrix(2, 5))


def test_bottom_right_moves_windows_and_documents_too():
    window = (Mask.causal() & Mask.window(2)).bottom_right()
    assert window.matrix(2, 5).int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert Mask.documents(2, 3).bottom_right().matrix(1, 5).int().tolist() == [[0, 0, 1, 1, 1]]
    with pytest.raises(ValueError, match="query positions -1"):
        Mask.documents(2, 3).bottom_right().matrix(5, 4)


def test_padding_by_hand():
    assert Mask.padding([1, 3]).matrix(2, 3)[:, 0, 0].int().tolist() == [[1, 0, 0], [1, 1, 1]]
    assert Mask.padding([1, 3], side="left").matrix(2, 3)[:, 0, 1].int().tolist() == [[0, 0, 1], [1, 1, 1]]
    keep = torch.tensor([[True, False, True]])
    assert torch.equal(Mask.padding(keep=keep).matrix(2, 3), keep[:, None, None].expand(1, 1, 2, 3))


def test_rank_rule():
    assert Mask.causal().matrix(3).shape == (3, 3)
    assert (Mask.causal() & Mask.padding([1, 2])).matrix(3).shape == (2, 1, 3, 3)
    assert Mask.explicit(torch.ones(1, 4, 3, 3).bool()).matrix(3).shape == (1, 4, 3, 3)
    assert Mask.per_head(Mask.causal(), Mask.full()).matrix(3).shape == (1, 2, 3, 3)
    both = Mask.padding([1, 2, 3]) & Mask.per_head(Mask.causal(), Mask.full())
    assert both.matrix(3).shape == (3, 2, 3, 3)
    assert (both.batch, both.heads, Mask.causal().batch) == (3, 2, None)
    assert torch.equal(both.matrix(3)[2, 0], Mask.causal().matrix(3))


def test_documents_per_sample():
    matrix = Mask.documents(ids=torch.tensor([[0, 0, 1], [0, 1, 1]])).matrix(3)
    assert torch.equal(matrix[0, 0], Mask.documents(2, 1).matrix(3))
    assert torch.equal(matrix[1, 0], Mask.documents(1, 2).matrix(3))


def test_per_sample_and_size_one_broadcast():
    mask = Mask.per_sample(Mask.causal()) & Mask.padding([2, 3])
    assert torch.equal(mask.matrix(3), (Mask.causal() & Mask.padding([2, 3])).matrix(3))


def test_a_mask_is_a_value():
    keep = torch.tensor([[True, False]])
    mask = Mask.padding(keep=keep)
    keep[0, 1] = True  # the mask keeps its own copy
    assert mask == Mask.padding(keep=torch.tensor([[True, False]])) != Mask.padding(keep=keep)
    assert hash(mask) == hash(Mask.padding(keep=torch.tensor([[True, False]])))
    assert Mask.documents(ids=[4, 4, 9]) == Mask.documents(2, 1)
    assert Mask.causal() & Mask.full() == Mask.causal() == ~~Mask.causal()
    assert (Mask.causal() & Mask.window(2)) & Mask.prefix(1) == Mask.causal() & (Mask.window(2) & Mask.prefix(1))
    with pytest.raises(AttributeError):
        mask.expression = None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Mask.window(0), ValueError, "width is at least 1, not 0"),
        (lambda: Mask.window(2.0), TypeError, "whole number, not 2.0"),
        (lambda: Mask.causal(align="left"), ValueError, "'top-left' or 'bottom-right'"),
        (lambda: Mask.documents(), ValueError, "either lengths"),
        (lambda: Mask.documents(ids=torch.rand(3)), TypeError, r"float32\[3\]"),
        (lambda: Mask.padding([2], side="top"), ValueError, "where the pads lie"),
        (lambda: Mask.padding(keep=torch.ones(2, 3)), TypeError, r"not float32\[2, 3\].*from_hf"),
        (lambda: Mask.neighborhood((2, 2), (1, 1, 1)), ValueError, "one radius, or one per axis"),
        (lambda: Mask.explicit(torch.ones(3)), TypeError, r"not float32\[3\]"),
        (lambda: Mask.keys(), ValueError, "at least one"),
        (lambda: Mask.documents(2, 1).matrix(4), ValueError, "0 to 2; asked about query positions 0 to 3"),
        (lambda: Mask.padding([5]).matrix(4), ValueError, "keeps 5 keys of a sample, but there are only 4"),
        (lambda: (Mask.padding([1, 2]) & Mask.padding([1, 2, 3])).matrix(3), ValueError, "disagree.*samples: 2, 3"),
        (lambda: Mask.causal().matrix(-1), ValueError, "queries is at least 0"),
    ],
)
def test_errors_say_the_fact(build, error, message):
    with pytest.raises(error, match=message):
        build()


# ------------------------------------------------------------------------------------------------ laws of the algebra

SIZE = 6
BATCH = 2
counts = st.integers(0, SIZE)


def split(cuts):
    edges = [0, *sorted(set(cuts)), SIZE]
    return [right - left for left, right in itertools.pairwise(edges)]


bits = st.lists(st.booleans(), min_size=SIZE, max_size=SIZE)
leaves = st.one_of(
    st.just(Mask.full()),
    st.just(Mask.none()),
    st.builds(Mask.causal, st.integers(-SIZE, SIZE), align=st.sampled_from(["top-left", "bottom-right"])),
    st.builds(Mask.window, st.integers(1, SIZE)),
    st.builds(Mask.window, counts, counts),
    st.builds(Mask.prefix, counts),
    st.builds(Mask.chunks, st.integers(1, 5)),
    st.builds(lambda keys: Mask.keys(*keys), st.sets(st.integers(0, SIZE - 1), min_size=1)),
    st.builds(lambda cuts: Mask.documents(*split(cuts)), st.lists(st.integers(1, SIZE - 1))),
    st.builds(lambda ids: Mask.documents(ids=ids), st.lists(st.integers(-2, 2), min_size=SIZE, max_size=SIZE)),
    st.builds(Mask.padding, st.lists(counts, min_size=BATCH, max_size=BATCH), side=st.sampled_from(["left", "right"])),
    st.builds(
        lambda rows: Mask.padding(keep=torch.tensor(rows)),
        st.lists(bits, min_size=BATCH, max_size=BATCH),
    ),
    st.builds(
        lambda shape, radius: Mask.neighborhood(shape, radius),
        st.sampled_from([(6,), (2, 3), (3, 2)]),
        st.integers(0, 2),
    ),
    st.builds(lambda rows: Mask.explicit(torch.tensor(rows)), st.lists(bits, min_size=SIZE, max_size=SIZE)),
)
masks = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
        st.builds(Mask.bottom_right, inner),
        st.builds(Mask.per_sample, inner, inner),
        st.builds(Mask.per_head, inner, inner, inner),
    ),
    max_leaves=5,
)


def whole(mask, heads=3):
    return mask.matrix(SIZE).expand(BATCH, heads, SIZE, SIZE)


@given(masks, masks)
@settings(max_examples=60, deadline=None)
def test_de_morgan(a, b):
    assert torch.equal(whole(~(a & b)), whole(~a | ~b))
    assert torch.equal(whole(~(a | b)), whole(~a & ~b))


@given(masks, masks, masks)
@settings(max_examples=60, deadline=None)
def test_and_or_commute_associate_distribute(a, b, c):
    assert torch.equal(whole(a & b), whole(b & a))
    assert torch.equal(whole(a | b), whole(b | a))
    assert torch.equal(whole((a & b) & c), whole(a & (b & c)))
    assert torch.equal(whole(a & (b | c)), whole((a & b) | (a & c)))


@given(masks, masks)
@settings(max_examples=60, deadline=None)
def test_operators_are_the_tensor_operators(a, b):
    assert torch.equal(whole(~~a), whole(a))
    assert torch.equal(whole(~a), ~whole(a))
    assert torch.equal(whole(a & b), whole(a) & whole(b))
    assert torch.equal(whole(a | b), whole(a) | whole(b))


@given(masks)
@settings(max_examples=150, deadline=None)
def test_the_phrase_reads_back(mask):
    read = Mask.parse(str(mask))
    assert read == mask
    assert hash(read) == hash(mask)
    assert torch.equal(whole(read), whole(mask))


@given(masks, st.integers(0, SIZE - 1))
@settings(max_examples=80, deadline=None)
def test_mask_mod_is_the_matrix(mask, offset):
    queries = SIZE - offset
    mod = to_mask_mod(mask, queries, SIZE, offset=offset)
    made = create_mask(mod, BATCH, 3, queries, SIZE, device="cpu")
    assert torch.equal(made, mask.matrix(queries, SIZE, offset=offset).expand_as(made))


def test_mask_mod_under_plain_vmap_and_block_mask():
    mask = Mask.causal() & Mask.documents(100, 156) & Mask.padding([256, 100])
    mod = to_mask_mod(mask)
    zero = torch.tensor(0)
    index = torch.arange(256)
    over_keys = torch.vmap(mod, in_dims=(None, None, None, 0))
    over_both = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    assert torch.equal(over_both(zero, zero, index, index), mask.matrix(256)[0, 0])
    blocks = create_block_mask(mod, 2, 1, 256, 256, device="cpu", BLOCK_SIZE=64)
    needed = mask.matrix(256).unflatten(3, (4, 64)).unflatten(2, (4, 64)).any(-1).any(3)
    assert torch.equal(blocks.to_dense().bool(), needed)


def test_mask_mod_asks_for_sizes_it_needs():
    for mask, name in ((Mask.causal(align="bottom-right"), "keys="), (Mask.padding([1], side="left"), "keys=")):
        with pytest.raises(ValueError, match=name):
            to_mask_mod(mask)(*[torch.tensor(0)] * 4)


# --------------------------------------------------------------------------------------------------------------- parse


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", Mask.causal()),
        (" CAUSAL( 2 ) ", Mask.causal(2)),
        ("causal, offset 2", Mask.causal(2)),
        ("causal, offset -2 & window(3)", Mask.causal(-2) & Mask.window(3)),
        ("bottom-right causal", Mask.causal(align="bottom-right")),
        ("top-left causal", Mask.causal()),
        ("bidirectional", Mask.full()),
        ("full", Mask.full()),
        ("none", Mask.none()),
        ("causal & window(4)", Mask.causal() & Mask.window(4)),
        ("window(2, 2)", Mask.window(2, 2)),
        ("chunks(3)", Mask.chunks(3)),
        ("prefix(3)", Mask.prefix(3)),
        ("documents(5, 7)", Mask.documents(5, 7)),
        ("causal & documents of 3, 5", Mask.causal() & Mask.documents(3, 5)),
        ("padding(5, 7)", Mask.padding([5, 7])),
        ("left padding(5, 7)", Mask.padding([5, 7], side="left")),
        ("padding(5, 7, side=left)", Mask.padding([5, 7], side="left")),
        ("padding(keep=[110, 011])", Mask.padding(keep=torch.tensor([[1, 1, 0], [0, 1, 1]]).bool())),
        ("neighborhood(4x4, 1)", Mask.neighborhood((4, 4), 1)),
        ("neighborhood(9, 1)", Mask.neighborhood(9, 1)),
        ("neighborhood(2x3x4, 0x1x2)", Mask.neighborhood((2, 3, 4), (0, 1, 2))),
        ("keys(0, 2-4)", Mask.keys(0, range(2, 5))),
        ("a | b".replace("a", "causal").replace("b", "keys(0) & full"), Mask.causal() | Mask.keys(0)),
        ("(causal | keys(0)) & window(2)", (Mask.causal() | Mask.keys(0)) & Mask.window(2)),
        ("~(causal & window(2))", ~(Mask.causal() & Mask.window(2))),
        ("per_head(causal, full & window(2))", Mask.per_head(Mask.causal(), Mask.window(2))),
        ("explicit([[10, 11], [01, 11]])", Mask.explicit(torch.tensor([[[1, 0], [1, 1]], [[0, 1], [1, 1]]]).bool())),
    ],
)
def test_parse(text, mask):
    assert Mask.parse(text) == mask


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("causl & window(4)", r"position 0, 'causl' is not a word.*the nearest word is 'causal'.*Known: causal"),
        ("causal & windw(4)", r"position 9, 'windw'.*'window'"),
        ("causal window(4)", r"position 7, expected &, \| or the end but read 'window'"),
        ("causal &", r"position 8, expected a word but read 'the end'"),
        ("", r"position 0, expected a word"),
        ("(causal", r"position 7, expected '\)' but read 'the end'"),
        ("window(", r"position 7, expected a value"),
        ("window()", "window is written window"),
        ("window(1, 2, 3)", "window is written window"),
        ("window(0)", "width is at least 1"),
        ("window(4x4)", "expected a whole number but read '4x4'"),
        ("causal(x)", "expected a whole number but read 'x'"),
        ("left causal", "'left' goes with padding"),
        ("causal + full", r"position 7, '\+' does not belong"),
        ("prefix(3, radius=2)", "prefix is written prefix"),
        ("padding(keep=[11, 1])", "different lengths"),
        ("padding(keep=[12])", "rows of 0 and 1"),
        ("documents(ids=[0, [1]])", "different lengths"),
        (f"{Mask.explicit(torch.ones(65, 65).bool())}", "cannot be read back"),
    ],
)
def test_parse_errors(text, message):
    with pytest.raises(MaskSyntaxError, match=message):
        Mask.parse(text)


@given(st.text(alphabet="causlwindo(&|~)[]=,-x 0123 of", max_size=24))
@settings(max_examples=200, deadline=None)
def test_parse_never_crashes(text):
    with contextlib.suppress(MaskSyntaxError):
        Mask.parse(text)


# ---------------------------------------------------------------------------------------------------------- the rest


def test_the_page_runs():
    page = Path(__file__).parents[1] / "docs" / "mask.md"
    outcome = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 15
    assert outcome.failed == 0


@pytest.mark.parametrize("name", ["mask", "convert", "recognise"])
def test_the_docstrings_run(name):
    outcome = doctest.testmod(importlib.import_module(f"intently.masks.{name}"))
    assert outcome.attempted > 3
    assert outcome.failed == 0


def test_annotations_stand_in_without_jaxtyping(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxtyping", None)  # an import of it now fails
    source = Path(importlib.import_module("intently._typing").__file__)
    spec = importlib.util.spec_from_file_location("typing_without_jaxtyping", source)
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    for name in alone.__all__:
        assert getattr(alone, name)[torch.Tensor, "batch query"] is torch.Tensor
