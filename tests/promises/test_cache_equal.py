"""The promise `cache-equal`: broken where pieces give something else, told with the position; silent where it says nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.targets.cached_models import MODELS, VOCABULARY, Base, ByHand
from tests.zoo.caches import Attention, Pair, TopLeft, aligned, decoder
from torch import Tensor, nn

import intently
from intently import Intent, Mask, Report, Target
from intently.faults.cached import spans
from intently.report import Cell
from intently.targets import Stream
from intently.targets.generating import beside, generation
from intently.targets.huggingface import tiny
from intently.targets.running import Runner
from intently.targets.ways import ways_of

check = partial(intently.check, select=["cache-equal"])


def cells(report: Report) -> dict[str, Cell]:
    return {c.condition: c for c in report.grid if c.promise == "cache-equal"}


def errors(report: Report) -> list[tuple[str, str, str]]:
    return [(f.fault, f.severity, f.proof) for f in report.findings]


@pytest.mark.parametrize("by_hand", MODELS, ids=str)
def test_kept_whatever_way_a_model_remembers(by_hand: ByHand) -> None:
    torch.manual_seed(1)
    report = check(Target(by_hand.build().eval(), Intent(Mask.causal()), tokens=VOCABULARY))
    assert {c.verdict for c in cells(report).values()} == {"kept"}
    assert {"cached: prefill and steps", "cached: chunks of 3", "cached: one by one, batch 1"} <= cells(report).keys()
    assert report.findings == ()


def test_the_first_wrong_position_and_by_how_much() -> None:
    target = decoder(Attention, TopLeft)
    report = check(target)
    cell = cells(report)["cached: chunks of 3"]
    assert cell.verdict == "broken"
    assert cell.note.startswith("first at position 3 of sample 0, by ")
    model, ids = target.model.double(), target.ready().batch(2, {"input_ids": 7}).arguments["input_ids"]
    with torch.no_grad():
        whole, past, parts = model(ids)[0], None, []
        for first, last in ((0, 3), (3, 6), (6, 7)):
            output, past = model(ids[:, first:last], past_key_values=past)
            parts.append(output)
    apart = (torch.cat(parts, 1) - whole).abs().amax(-1)
    assert apart[:, :3].max() < 1e-12
    assert float(apart[0, 3]) > 1e-3
    assert cell.error is not None
    assert cells(report)["cached: one by one, batch 1"].note.startswith("first at position 1 ")


class Leaky(Base):
    """Without a triangle no pieces can give what the whole gives."""

    def forward(self, tokens: Tensor, cache: tuple[Tensor, Tensor] | None = None):
        x = self.start(tokens, 0 if cache is None else cache[0].shape[2])
        q, k, v = self.split(x)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        return self.end(x, q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)), (k, v)


def test_a_leak_is_told_once_and_by_its_own_name() -> None:
    report = intently.check(Target(Leaky().eval(), Intent(Mask.causal()), tokens=VOCABULARY))
    assert errors(report) == [("causal-leak", "error", "proven")]
    assert {c.verdict for c in cells(report).values()} == {"not-tried"}


def test_an_intent_that_lets_the_future_in_says_nothing_of_a_cache() -> None:
    report = check(Target(Leaky().eval(), Intent(Mask.full()), tokens=VOCABULARY))
    assert {c.verdict for c in cells(report).values()} == {"not-applicable"}


class FromZero(Base):
    """Counts the positions of every piece from 0 unless they are given."""

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cache: tuple[Tensor, Tensor] | None = None,
    ):  # fmt: skip
        places = torch.arange(tokens.shape[1])[None] if position_ids is None else position_ids
        x = self.embed(tokens) + self.place(places)
        q, k, v = self.split(x)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        seen = aligned(q.shape[2], k.shape[2])
        seen = seen if attention_mask is None else seen & attention_mask[:, None, None].bool()
        return self.end(x, q, k, v, seen), (k, v)


def test_positions_that_the_caller_may_pass_make_a_warning() -> None:
    report = check(Target(FromZero().eval(), Intent(Mask.causal()), tokens=VOCABULARY))
    assert cells(report)["cached: prefill and steps, pads left"].verdict == "broken"
    assert cells(report)["cached: prefill and steps, pads left, positions given"].verdict == "kept"
    (found,) = [f for f in report.findings if f.promise == "cache-equal"]
    assert (found.fault, found.severity, found.proof) == ("side-channel", "warning", "proven")
    assert "with position_ids passed" in found.message


class Unplaced(FromZero):
    """The same for one that takes no positions: it is wrong whoever calls it."""

    def forward(self, tokens: Tensor, cache: tuple[Tensor, Tensor] | None = None):  # type: ignore[override]
        return super().forward(tokens, None, None, cache)


def test_positions_that_nobody_can_pass_make_an_error() -> None:
    report = check(Target(Unplaced().eval(), Intent(Mask.causal()), tokens=VOCABULARY))
    assert [f.severity for f in report.findings if f.promise == "cache-equal"] == ["error"]


class OneByOne(FromZero):
    """Takes a state up in steps of one token alone, as some recurrent layers do."""

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cache: tuple[Tensor, Tensor, Tensor] | None = None,
    ):  # fmt: skip
        before = 0 if cache is None else cache[0].shape[2]
        places = torch.arange(before, before + tokens.shape[1])[None] if position_ids is None else position_ids
        mixed = self.embed(tokens).cumsum(1)
        if cache is not None and tokens.shape[1] == 1:
            mixed = mixed + cache[2]
        logits, held = super().forward(tokens, attention_mask, places, None if cache is None else cache[:2])
        return logits + mixed @ self.embed.weight.T, (*held, mixed[:, -1:])


def test_positions_are_blamed_only_where_passing_them_helps() -> None:
    report = check(Target(OneByOne().eval(), Intent(Mask.causal()), tokens=VOCABULARY))
    assert cells(report)["cached: prefill and steps"].verdict == "kept"
    assert cells(report)["cached: chunks of 3"].verdict == "broken"
    found = [f for f in report.findings if f.promise == "cache-equal"]
    assert [f.severity for f in found] == ["error"]
    assert "position_ids" not in found[0].message


class HalfWindowed(Base):
    """Keeps to a window of 3 in steps and chunks, and sees everything before in a whole forward."""

    def forward(self, tokens: Tensor, cache: tuple[Tensor, Tensor] | None = None):
        before = 0 if cache is None else cache[0].shape[2]
        x = self.start(tokens, before)
        q, k, v = self.split(x)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        seen = aligned(q.shape[2], k.shape[2])
        return self.end(x, q, k, v, seen if cache is None else seen.triu(before - 2)), (k, v)


def test_what_a_named_fault_brings_about_needs_no_other_name() -> None:
    report = intently.check(Target(HalfWindowed().eval(), Intent(Mask.causal() & Mask.window(3)), tokens=VOCABULARY))
    assert cells(report)["cached: prefill and steps"].verdict == "broken"
    assert errors(report) == [("window-ignored", "error", "proven")]
    assert not [n for n in report.notes if "no fault known" in n]


@pytest.mark.parametrize("name", ["llama", "mistral", "bloom"])
def test_released_models_keep_it_with_every_cache(name: str) -> None:
    report = check(tiny(name))
    found = cells(report)
    assert report.findings == ()
    assert {c.verdict for c in found.values()} <= {"kept", "not-tried"}
    assert {"cached: prefill and steps", "cached: one by one, batch 1", "static cache: chunks of 3"} <= found.keys()
    assert ("eager · cached: chunks of 3" in found) == (name != "bloom")
    assert ("cache without a window: chunks of 3" in found) == (name == "mistral")


def test_encoder_decoders_are_fed_in_the_decoder() -> None:
    found = cells(check(tiny("bart")))
    assert found["cached: prefill and steps, input_ids: pads right"].verdict == "kept"
    assert found["cached: prefill and steps, decoder_input_ids: pads left"].verdict == "kept"


def test_waived_with_a_reason() -> None:
    target = decoder(Attention, TopLeft)
    waived = replace(target, intent=Intent(Mask.causal(), waived={"cache-equal": "nobody decodes with it"}))
    assert "cache-equal" not in {f.promise for f in intently.check(waived).findings}


def test_spans_in_words() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
    assert spans([]) == "none"


def test_what_generate_gives_is_held_against_a_forward() -> None:
    found = cells(check(tiny("gpt2")))
    assert found["generate: greedy"].verdict == found["generate: greedy, pads left"].verdict == "kept"
    assert cells(check(tiny("t5")))["generate: greedy, input_ids: pads right"].verdict == "kept"


def test_a_generate_that_drops_the_mask_is_broken() -> None:
    target = tiny("gpt2")
    prepare = type(target.model).prepare_inputs_for_generation

    def without_mask(self, *args, **kwargs):
        return {**prepare(self, *args, **kwargs), "attention_mask": None}

    target.model.__class__ = type("Dropping", (type(target.model),), {"prepare_inputs_for_generation": without_mask})
    report = check(target)
    assert cells(report)["generate: greedy"].verdict == "kept"
    assert cells(report)["generate: greedy, pads left"].verdict == "broken"
    assert cells(report)["cached: prefill and steps, pads left"].verdict == "kept"
    assert [(f.fault, f.severity, f.proof) for f in report.findings] == [("side-channel", "error", "suspected")]


def test_the_logits_of_generate_are_those_of_transformers() -> None:
    target = tiny("gpt2")
    model = target.model.double().eval()
    ids = target.batch(2, {"input_ids": 7}).arguments["input_ids"]
    (way, *_) = ways_of(Runner(target, torch.float64))
    feed = generation(model, target, way)
    assert feed is not None
    with torch.no_grad():
        generated, forward = beside(model, target, target.batch(2, {"input_ids": 7}), feed)
        for number in range(feed.new):
            logits = model(ids).logits[:, -1]
            assert torch.allclose(generated[:, number], logits, atol=1e-5)
            assert torch.allclose(forward[:, number], logits, atol=1e-8)
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)


def test_positions_that_generate_hands_over_are_told() -> None:
    """RoBERTa counts from the pad's id plus 1, and is handed positions from 0; BERT counts from 0 itself."""
    found = check(tiny("roberta/RobertaForCausalLM?is_decoder=true"))
    told = [f for f in found.findings if f.severity == "error"]
    assert [(f.fault, f.proof, f.condition) for f in told] == [("side-channel", "proven", "generate: greedy")]
    assert "position_ids" in told[0].message
    assert check(tiny("bert/BertLMHeadModel?is_decoder=true")).verdict == "kept"


def test_a_model_of_ones_own_has_no_generate() -> None:
    target = decoder(Attention, Attention).ready()
    (way, *_) = ways_of(Runner(target, torch.float64))
    assert generation(target.model, target, way) is None


class Call(nn.Module):
    """One head over what it is given, besides what is held before it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor, states: Tensor, held: Pair | None, seen: Tensor | None) -> tuple[Tensor, Pair]:
        k, v = self.k(states), self.v(states)
        if held is not None:
            k, v = torch.cat([held[0], k], 1), torch.cat([held[1], v], 1)
        scores = self.q(x) @ k.mT / 12**0.5
        if seen is None:
            seen = aligned(x.shape[1], k.shape[1])
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v, (k, v)


class Listener(nn.Module):
    """Words about a context; with `one` the call over the context finds the words' keys in its cache, too."""

    def __init__(self, *, one: bool) -> None:
        super().__init__()
        self.one = one
        self.embed, self.own, self.cross = nn.Embedding(VOCABULARY, 12), Call(), Call()
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor, context: Tensor, cache: Pair | None = None) -> tuple[Tensor, Pair]:
        x = self.embed(tokens)
        y, present = self.own(x, x, cache, None)
        x = x + y
        shared = present if self.one and cache is not None else None
        y, _ = self.cross(x, context, shared, torch.ones(1, dtype=torch.bool))
        return self.head(x + y), present


@pytest.mark.parametrize("one", [True, False])
def test_a_call_that_finds_the_keys_of_another_in_its_cache_is_told(one: bool) -> None:
    torch.manual_seed(5)
    streams = Stream("context", "features", width=12, length=6), Stream("tokens", "tokens", vocab=VOCABULARY)
    report = check(Target(Listener(one=one).eval(), Intent(Mask.causal()), streams=streams, output="tokens"))
    assert cells(report)["cached: prefill and steps"].verdict == ("broken" if one else "kept")
    assert [(f.fault, f.site) for f in report.findings] == [("cache-misaligned", "cross")] * one
    if one:
        (found,) = report.findings
        fed = int(found.message.split("with ")[1].split()[0])
        assert found.witness.values == {"keys": fed + 1 + 6, "in the whole forward": 6}


def test_a_decoder_that_generates_with_one_cache_for_both_is_told_where() -> None:
    report = check(tiny("trocr"))
    told = {(f.fault, f.site) for f in report.findings if f.fault != "side-channel"}
    calls = ("self_attn", "encoder_attn")
    assert told == {("cache-misaligned", f"model.decoder.layers.{n}.{call}") for n in (0, 1) for call in calls}
    assert "(root)" not in {f.site for f in report.findings}
    assert cells(report)["cached: chunks of 3"].verdict == "kept"
