"""Streams that meet at the end alone are towers; a memory that is ignored is none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intently
from intently import Intent, Mask, Target


def attended(x: Tensor) -> Tensor:
    return x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


class TwoTowers(nn.Module):
    """Two encoders, and a table of how much each of one batch is like each of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, text: Tensor, image: Tensor) -> dict[str, Tensor]:
        text, image = attended(self.text(text)), attended(self.image(image))
        return {"logits_per_text": text.mean(1) @ image.mean(1).mT, "text_states": text, "image_states": image}


class Forgetful(nn.Module):
    """An encoder and a decoder that does not read it; both give their states."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"logits": attended(self.decoder(target)), "encoder_states": attended(self.encoder(source))}


def target(model: nn.Module) -> Target:
    torch.manual_seed(0)
    return Target(model.eval(), Intent(Mask.full()), features=8)


def test_a_tower_of_its_own_is_put_aside_and_told() -> None:
    ready = target(TwoTowers()).ready()
    assert len(ready.streams) == 1 and len(ready.aside) == 1
    report = intently.check(target(TwoTowers()))
    assert report.verdict == "kept"
    assert any("a tower of its own" in n for n in report.notes)
    assert not [c for c in report.grid if c.promise == "memory-respected" and c.verdict != "not-applicable"]


class Masked(TwoTowers):
    """The same, where the text may be padded."""

    def __init__(self, heeds: bool = True) -> None:
        super().__init__()
        self.heeds = heeds

    def forward(self, text: Tensor, image: Tensor, text_mask: Tensor | None = None) -> dict[str, Tensor]:
        q = self.text(text)[:, None]
        mask = text_mask[:, None, None].bool() if text_mask is not None and self.heeds else None
        text = text + F.scaled_dot_product_attention(q, q, q, attn_mask=mask)[:, 0]
        image = attended(self.image(image))
        return {"logits_per_text": text.mean(1) @ image.mean(1).mT, "text_states": text, "image_states": image}


def test_of_two_towers_the_one_that_is_told_of_pads_is_judged() -> None:
    ready = target(Masked()).ready()
    assert (ready.main.argument, [s.argument for s in ready.aside]) == ("text", ["image"])
    report = intently.check(target(Masked(heeds=False)))
    assert report.verdict == "broken"
    assert not [f for f in intently.check(target(Masked())).findings if f.severity != "note"]


def test_a_memory_that_is_ignored_is_no_tower() -> None:
    ready = target(Forgetful()).ready()
    assert len(ready.streams) == 2 and not ready.aside
    report = intently.check(target(Forgetful()))
    assert report.verdict == "broken"
    assert any(c.promise == "memory-respected" and c.verdict == "broken" for c in report.grid)


class Strided(nn.Module):
    """A convolution whose stride leaves the last step of an odd number over, before attention."""

    def __init__(self, hide: int = 0) -> None:
        super().__init__()
        self.conv, self.hide = nn.Conv1d(8, 8, 2, stride=2), hide

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.mT).mT
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        if self.hide:
            mask[:, -self.hide :] = False
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)[:, 0, 0]


def test_what_is_cut_off_before_attention_is_not_hidden_by_it() -> None:
    for hide, verdict in ((0, "kept"), (1, "broken")):
        report = intently.check(target(Strided(hide)))
        found = {c.verdict for c in report.grid if c.promise == "sees-all"}
        assert found == {verdict}, hide


class Chosen(nn.Module):
    """Reads a source only through the index of its largest value."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.own = nn.Embedding(5, 8), nn.Linear(8, 8)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        pooled = attended(source).mean(1)[:, :5]
        return attended(self.own(target)) + self.table(pooled.argmax(-1))[:, None]


def test_a_choice_shows_no_small_change() -> None:
    report = intently.check(target(Chosen()))
    assert "broken" not in {c.verdict for c in report.grid if c.promise == "sees-all"}


class Keeping(nn.Module):
    """Gives back, besides its output, what it keeps for the next call: states that turn with their positions."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.own, self.name = nn.Linear(8, 8), name

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> dict[str, Any]:
        q = self.own(x)[:, None]
        mask = None if key_padding_mask is None else ~key_padding_mask[:, None, None]
        out = x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask)[:, 0]
        places = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return {"logits": out, self.name: x * torch.cos(places)}


def test_what_is_kept_for_the_next_call_is_no_output() -> None:
    for name, verdict in (("index_cache", "kept"), ("index_states", "broken")):
        report = intently.check(target(Keeping(name)))
        assert {c.verdict for c in report.grid if c.promise == "position-shift"} - {"not-applicable"} == {verdict}
