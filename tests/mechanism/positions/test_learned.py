"""Learned positions against the tables of OPT and RoBERTa."""

from __future__ import annotations

import pytest
import torch

from intently.mechanism.positions import LearnedPositions, positions_from_padding


def test_reads_the_row_behind_the_offset():
    positions = LearnedPositions(3, 2, offset=2)
    at = torch.tensor([[0, 2], [1, 1]])
    assert positions.weight.shape == (5, 2)
    assert positions(at).equal(positions.weight[at + 2])


def test_equals_opt_where_tokens_are_real():
    pytest.importorskip("transformers")
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

    theirs = OPTLearnedPositionalEmbedding(8, 4)
    ours = LearnedPositions(8, 4, offset=2)
    ours.load_state_dict(theirs.state_dict())
    keep = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    # OPT gives its pads position -1, row 1; with pad=-1 the pads agree as well.
    assert ours(positions_from_padding(keep, pad=-1)).equal(theirs(keep))
    # The control: without the offset every vector is another.
    assert not (ours(positions_from_padding(keep) - 2 + 2)[1, 0].equal(theirs(keep)[1, 1]))


def test_equals_roberta_pads_included():
    pytest.importorskip("transformers")
    from transformers import RobertaConfig
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    config = RobertaConfig(vocab_size=10, hidden_size=4, max_position_embeddings=12, pad_token_id=1)
    theirs = RobertaEmbeddings(config)
    ours = LearnedPositions(10, 4, offset=2, padding=1)
    ours.load_state_dict(theirs.position_embeddings.state_dict())
    tokens = torch.tensor([[5, 6, 7, 1, 1], [1, 1, 5, 6, 7]])
    keep = tokens != 1
    rows = theirs.create_position_ids_from_input_ids(tokens, 1)
    assert ours(positions_from_padding(keep), keep).equal(theirs.position_embeddings(rows))


def test_the_row_of_the_pads_is_zero_and_learns_nothing():
    positions = LearnedPositions(4, 3, offset=2, padding=1)
    assert positions.weight[1].eq(0).all()
    keep = torch.tensor([True, True, False])
    positions(torch.tensor([0, 1, 0]), keep).sum().backward()
    assert positions.weight.grad[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def test_compiles():
    positions = LearnedPositions(4, 3)
    compiled = torch.compile(positions, fullgraph=True, backend="eager")
    assert compiled(torch.arange(4)).equal(positions.weight)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: LearnedPositions(0, 3), ValueError, "length 0"),
        (lambda: LearnedPositions(4, 3, padding=4), ValueError, "padding row 4"),
        (lambda: LearnedPositions(4, 3)(torch.zeros(2)), TypeError, r"float32\[2\]"),
        (lambda: LearnedPositions(4, 3)(torch.ones(2).bool()), TypeError, r"bool\[2\]"),
        (lambda: LearnedPositions(4, 3)(torch.arange(2), torch.ones(2).bool()), ValueError, "no row for pads"),
        (lambda: LearnedPositions(4, 3, offset=2)(torch.arange(5)), IndexError, "positions 0 to 3"),
    ],
)
def test_refusals_say_what_is_wrong(call, error, says):
    with pytest.raises(error, match=says):
        call()
