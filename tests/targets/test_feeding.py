"""How a model takes its cache is found by trying; fed in pieces, it gives what feeding it by hand gives."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.targets.cached_models import MODELS, VOCABULARY, ByHand, Inside
from torch import nn

from intently import Intent, Mask, Target
from intently.sites import Settings
from intently.targets.feeding import Feed, Way, pieces, unremembered
from intently.targets.huggingface import tiny
from intently.targets.running import Runner
from intently.targets.stream import Padding, Stream
from intently.targets.ways import ways_of


def runner_of(model: nn.Module) -> Runner:
    return Runner(Target(model.eval(), Intent(Mask.causal()), tokens=VOCABULARY).ready(), torch.float64)


@pytest.mark.parametrize("cuts", [(4, 1, 1, 1), (3, 3, 1), (1,) * 7], ids=str)
@pytest.mark.parametrize("by_hand", MODELS, ids=str)
def test_fed_as_by_hand(by_hand: ByHand, cuts: tuple[int, ...]) -> None:
    model = by_hand.build()
    runner = runner_of(model)
    (way, *_) = ways_of(runner)
    assert (way.cache, way.start) == (by_hand.cache, by_hand.start)
    main = runner.target.main.argument
    batch = runner.target.batch(2, {main: 7})
    with torch.no_grad():
        hand = copy.deepcopy(model).double().eval()
        wanted = torch.cat(list(by_hand.feed(hand, batch.arguments[main], cuts)), 1)
        whole = by_hand.whole(copy.deepcopy(model).double().eval(), batch.arguments[main])
    fed = runner.fed(batch, Feed(way, "", cuts))
    assert torch.allclose(fed.output, wanted, atol=1e-12)
    assert torch.allclose(wanted, whole, atol=1e-12)  # the models themselves are right
    assert [(p.first, p.lengths[main]) for p in fed.pieces] == [(sum(cuts[:i]), n) for i, n in enumerate(cuts)]


@pytest.mark.parametrize("by_hand", MODELS, ids=str)
def test_a_feed_leaves_nothing_behind(by_hand: ByHand) -> None:
    runner = runner_of(by_hand.build())
    (way, *_) = ways_of(runner)
    before = {n: copy.deepcopy(vars(m)) for n, m in runner.model.named_modules()}
    main = runner.target.main.argument
    runner.fed(runner.target.batch(2, {main: 7}), Feed(way, "", (4, 3)))
    for name, module in runner.model.named_modules():
        assert vars(module).keys() == before[name].keys()
        for n, tensor in module.named_buffers(recurse=False):
            assert torch.equal(tensor, before[name]["_buffers"][n])
    assert getattr(runner.model, "cache", None) is None


@pytest.mark.parametrize("by_hand", MODELS, ids=str)
def test_what_comes_out_of_a_cache_is_not_taken_for_hidden_code(by_hand: ByHand) -> None:
    runner = runner_of(by_hand.build())
    (way, *_) = ways_of(runner)
    batch = runner.target.batch(2, {runner.target.main.argument: 7})
    runner.fed(batch, Feed(way, "", (4, 3)), settings=lambda piece: Settings(True))
    assert not runner.opaque


def test_what_a_module_makes_or_loses_is_put_back() -> None:
    model = Inside()
    with pytest.raises(ZeroDivisionError), unremembered(model):
        model.cache, model.more = "full", 1  # type: ignore[assignment]
        model.place.weight.data.add_(0)
        raise ZeroDivisionError
    assert model.cache is None
    assert not hasattr(model, "more")


class Sharing(nn.Module):
    """Two parts hold one setting, and one of them holds the other in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Identity(), nn.Identity()
        self.one.setting = self.other.setting = {"name": "first"}  # type: ignore[assignment]
        self.other.beside = [self.one]  # type: ignore[assignment]


def test_what_modules_share_they_share_afterwards() -> None:
    model = Sharing()
    with unremembered(model):
        model.one.setting["name"] = "second"  # type: ignore[index]
    assert model.one.setting == {"name": "first"}
    assert model.one.setting is model.other.setting
    assert model.other.beside[0] is model.one  # type: ignore[index]


class Plain(nn.Module):
    """Takes a `state` that is no cache: nothing comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.embed = nn.Embedding(VOCABULARY, 16)

    def forward(self, tokens: torch.Tensor, state: torch.Tensor | None = None, offset: int = 0) -> torch.Tensor:
        return self.layer(self.embed(tokens))


def test_a_model_without_a_cache_has_no_way() -> None:
    assert ways_of(runner_of(Plain())) == ()


def test_a_model_that_takes_one_token_at_a_time_has_one() -> None:
    def one_at_a_time(model: nn.Module, given: tuple[object, ...], named: dict[str, object]) -> None:
        ids, past = given[0] if given else named["input_ids"], named.get(by_hand.cache)
        if past is not None and ids.shape[1] != 1:  # type: ignore[union-attr]
            raise ValueError("one token at a time")

    by_hand = next(m for m in MODELS if m.cache and not m.start)
    model = by_hand.build()
    model.register_forward_pre_hook(one_at_a_time, with_kwargs=True)
    (way, *_) = ways_of(runner_of(model))
    assert way.cache == by_hand.cache


def test_a_function_of_queries_keys_and_values_has_no_way() -> None:
    target = Target(nn.functional.scaled_dot_product_attention, Intent(Mask.full())).ready()
    assert ways_of(Runner(target, torch.float64)) == ()


def test_the_mask_grows_or_speaks_of_the_new_tokens() -> None:
    stream = Stream("x", "tokens", vocab=9, padding=Padding("keep", keep=True, form="batch query key"))
    target = Target(nn.Identity(), streams=(stream,))
    kept = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    batch = target.batch(2, {"x": 5}, kept={"x": kept})
    grown = [p.arguments["keep"] for p in pieces(target, batch, Feed(Way(cache="c"), "", (2, 3)), {})]
    assert [g.shape for g in grown] == [(2, 2, 2), (2, 3, 5)]
    assert grown[1][0].tolist() == [[0, 1, 1, 1, 1]] * 3
    new = [p.arguments["keep"] for p in pieces(target, batch, Feed(Way(cache="c", whole_mask=False), "", (2, 3)), {})]
    assert [g.shape for g in new] == [(2, 2, 2), (2, 3, 3)]


def test_positions_are_counted_over_the_real_tokens() -> None:
    target = Target(nn.Identity(), streams=(Stream("x", "tokens", vocab=9),))
    kept = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    batch = target.batch(2, {"x": 5}, kept={"x": kept})
    feed = Feed(Way(cache="c", positions="at"), "", (3, 1, 1), positions=True)
    assert [p.arguments["at"].tolist() for p in pieces(target, batch, feed, {})] == [
        [[0, 0, 0], [0, 1, 2]],
        [[1], [3]],
        [[2], [4]],
    ]


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_transformers_fed_as_by_hand(name: str) -> None:
    target = tiny(name)
    runner = Runner(target, torch.float64)
    (way, *_) = ways_of(runner)
    main = target.main.argument
    lengths = {s.argument: 9 if s is not target.main else 7 for s in target.streams}
    batch = target.batch(2, lengths)
    fed = runner.fed(batch, Feed(way, "", (5, 1, 1))).output
    model = copy.deepcopy(target.model).double().eval()
    others = {k: v for k, v in batch.arguments.items() if k != main}
    with torch.no_grad():
        whole = model(**batch.arguments, use_cache=False).logits
        first = model(**others, **{main: batch.arguments[main][:, :5]}, use_cache=True)
        cache = first[way.cache]
        second = model(**others, **{main: batch.arguments[main][:, 5:6], way.cache: cache}, use_cache=True)
    assert torch.allclose(fed[:, 4], first.logits[:, -1], atol=1e-10)
    assert torch.allclose(fed[:, 5], second.logits[:, -1], atol=1e-10)
    assert torch.allclose(fed, whole, atol=1e-8)
