"""Traps: models that look faulty and are not. None may raise an error, while the same shape with a real fault does."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intently
from intently import Intent, Mask, Target
from intently.targets import Padding, Stream

WIDTH, HEADS, VOCABULARY = 24, 3, 19
Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


@dataclass(frozen=True)
class Trap:
    """A model that must pass, and a control of the same shape that must not: it is `faulty` in the named way."""

    name: str
    build: Callable[[], Target]
    control: Callable[[], Target] | None = None
    faulty: str = ""

    def __str__(self) -> str:
        return self.name


# -- the models around the traps ------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Multi-head attention that leaves everything between split and merge to `attend`; adds its input."""

    def __init__(self, attend: Attend, heads: int = HEADS) -> None:
        super().__init__()
        self.attend, self.heads = attend, heads
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(self.attend(q, k, v, keep).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Tokens with learned positions through two layers; `before` and `after` may stand around them."""

    def __init__(self, *layers: nn.Module, before: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.before, self.layers, self.after = before or nn.Identity(), nn.ModuleList(layers), after or nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        keep = None if attention_mask is None else attention_mask.bool()
        x = self.before(self.embed(input_ids) + self.places(input_ids, attention_mask))
        for layer in self.layers:
            x = layer(x, keep)
        return self.after(x)

    def places(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Positions that follow from the mask, so that pads in front change nothing."""
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.place((kept.long().cumsum(-1) - 1).clamp(min=0))


class FromTheFirst(Model):
    """The same with positions that count pads, too: whoever passes others pads as he likes."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        self.given = position_ids
        return super().forward(input_ids, attention_mask)

    def places(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.place(torch.arange(input_ids.shape[1]) if self.given is None else self.given)


class Unpadded(Model):
    """The same for batches of one length."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def two(attend: Attend, intent: Intent, *, model: type[Model] = Model, **around: Any) -> Target:
    torch.manual_seed(0)
    return Target(model(Layer(attend), Layer(attend), **{k: make() for k, make in around.items()}).eval(), intent)


CAUSAL, FULL = Intent(Mask.causal()), Intent(Mask.full())


def seen(q: Tensor, k: Tensor, keep: Tensor | None, *, causal: bool) -> Tensor:
    """bool `[1 or batch, 1, query, key]`."""
    whole = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    whole = (whole.tril() if causal else whole)[None, None]
    return whole if keep is None else whole & keep[:, None, None, :]


def plain(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention as it should be, with finite fills."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~seen(q, k, keep, causal=causal), torch.finfo(q.dtype).min).softmax(-1) @ v


causal = partial(plain, causal=True)


def leaky(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    return plain(q, k, v, keep)


def padded_leaky(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *, causal: bool = False) -> Tensor:
    return plain(q, k, v, None, causal=causal)


# -- masks ----------------------------------------------------------------------------------------------------------


def top_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def bare(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def prefix_lm(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """The first three tokens, an image say, see each other both ways."""
    mask = seen(q, k, keep, causal=True) | (torch.arange(k.shape[-2]) < 3)
    mask = mask if keep is None else mask & keep[:, None, None, :]
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1) @ v


def or_given(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    return plain(q, k, v, keep, causal=keep is None)


def pads_see_pads(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    mask = seen(q, k, None, causal=False)
    mask = mask if keep is None else keep[:, None, :, None] == keep[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def pads_seen(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    mask = seen(q, k, None, causal=False)
    mask = mask if keep is None else keep[:, None, :, None] | keep[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *, fill: float) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen(q, k, keep, causal=True), fill).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *, amount: float) -> Tensor:
    """An additive mask, as shifted windows have it: -100 for the other region."""
    return (q @ k.mT / q.shape[-1] ** 0.5 + amount * ~seen(q, k, keep, causal=True)).softmax(-1) @ v


def banded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *, left: int, right: int) -> Tensor:
    """A window of `left` keys before the query's own and `right` after it."""
    gap = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    mask = seen(q, k, keep, causal=False) & (gap >= -left) & (gap <= right)
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1) @ v


class Windows(nn.Module):
    """Attention inside windows of four positions, which are folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(-1, 4, WIDTH)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(windows).chunk(3, -1))
        return x + self.out(plain(q, k, v, None).transpose(1, 2).flatten(2)).reshape(x.shape)


def windows() -> Target:
    torch.manual_seed(0)
    return Target(Windows().eval(), inputs=torch.randn(2, 8, WIDTH))


# -- scale ----------------------------------------------------------------------------------------------------------


def roots(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *, both: bool) -> Tensor:
    """The fourth root of the width on q and, so that half precision does not overflow, on k."""
    root = q.shape[-1] ** -0.25
    return plain(q * root, k * root if both else k, v, keep, scale=1.0)


def normed(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *, norm: bool) -> Tensor:
    if norm:
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen(q, k, keep, causal=False), scale=1.0)


def prescaled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *, scale: float | None) -> Tensor:
    q = q * q.shape[-1] ** -0.5
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen(q, k, keep, causal=False), scale=scale)


class Latent(nn.Module):
    """Keys and values from one narrow latent, with a rotated part of the key shared by the heads."""

    def __init__(self, counted: int = 12) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * 12)
        self.down, self.up = nn.Linear(WIDTH, 7 + 4), nn.Linear(7, HEADS * (8 + 5))
        self.out, self.counted = nn.Linear(HEADS * 5, WIDTH), counted

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, 12)).transpose(1, 2)
        latent, turned = self.down(x).split((7, 4), -1)
        k, v = self.up(latent).unflatten(-1, (HEADS, 13)).transpose(1, 2).split((8, 5), -1)
        q = torch.cat([q[..., :8], rotated(q[..., 8:])], -1)
        k = torch.cat([k, rotated(turned)[:, None].expand(-1, HEADS, -1, -1)], -1)
        y = plain(q, k, v, keep, causal=True, scale=self.counted**-0.5)
        return x + self.out(y.transpose(1, 2).flatten(2))


def latent(counted: int) -> Target:
    torch.manual_seed(0)
    return Target(Model(Latent(counted), Latent(counted)).eval(), CAUSAL)


# -- normalisation --------------------------------------------------------------------------------------------------


def off_by_one(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """Softmax with one more in the denominator."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen(q, k, keep, causal=True), torch.finfo(q.dtype).min)
    nothing = scores.new_zeros(*scores.shape[:-1], 1)
    return torch.cat([scores, nothing], -1).softmax(-1)[..., :-1] @ v


class Sinks(Layer):
    """A learned logit per head that takes weight and gives no value."""

    def __init__(self) -> None:
        super().__init__(self.sunk)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def sunk(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen(q, k, keep, causal=True), torch.finfo(q.dtype).min)
        sinks = self.sinks[:, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


def sinks() -> Target:
    torch.manual_seed(0)
    return Target(Model(Sinks(), Sinks()).eval(), CAUSAL)


def over_queries(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen(q, k, keep, causal=True), torch.finfo(q.dtype).min)
    return scores.softmax(-2) @ v


class Dropping(Layer):
    """Dropout of weights while training, unless it is forgotten to stop."""

    def __init__(self, *, always: bool = False) -> None:
        super().__init__(self.dropped)
        self.always = always

    def dropped(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen(q, k, keep, causal=True), torch.finfo(q.dtype).min)
        return F.dropout(scores.softmax(-1), 0.3, training=self.training or self.always) @ v


def in_training(always: bool) -> Target:
    torch.manual_seed(0)
    return Target(Model(Dropping(always=always), Dropping(always=always)).train(), CAUSAL)


class Choosing(Layer):
    """Two kernels that differ on rows which see nothing: one gives 0, the other the mean."""

    def __init__(self, *, scale: float | None = None) -> None:
        super().__init__(self.chosen)
        self.use_sdpa, self.scale = True, scale

    def chosen(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        if self.use_sdpa:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen(q, k, keep, causal=True))
        return causal(q, k, v, keep, scale=self.scale)


def choosing(scale: float | None) -> Target:
    torch.manual_seed(0)
    return Target(Model(Choosing(scale=scale), Choosing(scale=scale)).eval(), CAUSAL)


# -- projection and positions ---------------------------------------------------------------------------------------


def rotated(x: Tensor) -> Tensor:
    """Rotary positions 0, 1, … whatever is padded."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 50 ** (torch.arange(half, dtype=x.dtype) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def rope(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    return causal(rotated(q), rotated(k), v, keep)


def rope_padded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    return causal(rotated(q), rotated(k), v, None)


class Folded(nn.Module):
    """Heads folded into the batch by permutations, einsum and baddbmm: the same algebra, written otherwise."""

    def __init__(self, *, permute: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(HEADS, WIDTH, 8) / 5) for _ in range(4))
        self.permute = permute

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (torch.einsum("bnc,hcd->bnhd", x, w) for w in (self.q, self.k, self.v))
        if self.permute:
            q, k, v = (t.permute(0, 2, 1, 3).reshape(batch * HEADS, length, 8) for t in (q, k, v))
        else:
            q, k, v = (t.reshape(batch * HEADS, length, 8) for t in (q, k, v))
        hidden = ~seen(q, k, keep, causal=True).expand(batch, HEADS, length, length).reshape(-1, length, length)
        bias = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)
        y = torch.bmm(torch.baddbmm(bias, q, k.mT, alpha=8**-0.5).softmax(-1), v)
        return x + torch.einsum("bhnd,hcd->bnc", y.view(batch, HEADS, length, 8), self.o)


def folded(permute: bool) -> Target:
    torch.manual_seed(0)
    return Target(Model(Folded(permute=permute), Folded(permute=permute)).eval(), CAUSAL)


class Relative(Model):
    """One table of biases by distance, which all layers add."""

    def __init__(self, *, triangle: bool = True) -> None:
        super().__init__(Layer(self.biased), Layer(self.biased))
        self.table, self.triangle = nn.Embedding(63, HEADS), triangle

    def biased(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        gap = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None] + 31
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.table(gap).permute(2, 0, 1)
        return scores.masked_fill(~seen(q, k, keep, causal=self.triangle), torch.finfo(q.dtype).min).softmax(-1) @ v


def relative(triangle: bool) -> Target:
    torch.manual_seed(0)
    return Target(Relative(triangle=triangle).eval(), CAUSAL)


class Narrow(nn.Module):
    """Values of another width than keys, and keys that are the values' own projection when tied."""

    def __init__(self, *, tied: bool, scale: float | None = None) -> None:
        super().__init__()
        self.tied, self.scale, wide = tied, scale, 8 if tied else 5
        self.q, self.k = nn.Linear(WIDTH, HEADS * 8), nn.Linear(WIDTH, HEADS * 8)
        self.v = nn.Linear(WIDTH, HEADS * wide)
        self.out = nn.Linear(HEADS * wide, WIDTH)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        k = self.k(x)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(x), k, k if self.tied else self.v(x)))
        return x + self.out(causal(q, k, v, keep, scale=self.scale).transpose(1, 2).flatten(2))


def narrow(*, tied: bool, scale: float | None = None) -> Target:
    torch.manual_seed(0)
    return Target(Model(*(Narrow(tied=tied, scale=scale) for _ in range(2))).eval(), CAUSAL)


# -- outside attention ----------------------------------------------------------------------------------------------


class OverTime(nn.GroupNorm):
    """Group norm whose statistics run over time."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class Neighbours(nn.Conv1d):
    """A convolution that sees the neighbours on both sides."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class Hashing(nn.Module):
    """Sorts positions into two buckets by a random direction, drawn anew in each call."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + (x @ torch.randn(WIDTH, 1, dtype=x.dtype) > 0))


class Mean(nn.Module):
    """Mean pooling over everything, pads included."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Experts(nn.Module):
    """Each token goes to its best two of four experts."""

    def __init__(self, *, together: bool = False) -> None:
        super().__init__()
        self.router, self.together = nn.Linear(WIDTH, 4), together
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        asked = x.mean(1, keepdim=True).expand_as(x) if self.together else x
        best, which = self.router(asked).softmax(-1).topk(2, -1)
        every = torch.stack([e(x) for e in self.experts], -2)
        return x + (every.gather(-2, which[..., None].expand(*which.shape, WIDTH)) * best[..., None]).sum(-2)


class Pooled(Model):
    """The mean over real tokens only."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = super().forward(input_ids, attention_mask)
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return (x * keep[..., None].to(x.dtype)).sum(1) / keep.sum(1, keepdim=True)


class Cached(Model):
    """A decoder with a cache that nobody passes."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None) -> Tensor:
        assert past_key_values is None
        return super().forward(input_ids, attention_mask)


class TorchEncoder(nn.Module):
    """torch's own encoder, asked nothing about masks."""

    def __init__(self, *, norm_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src: Tensor) -> Tensor:
        return self.encoder(src)


def torch_encoder(intent: Intent) -> Target:
    torch.manual_seed(0)
    return Target(TorchEncoder().eval(), intent, features=WIDTH)


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self, *, triangle: bool) -> None:
        super().__init__()
        reader = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
        writer = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(reader, 1, enable_nested_tensor=False)
        self.decoder, self.triangle = nn.TransformerDecoder(writer, 2), triangle

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        later = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        return self.decoder(tgt, self.encoder(src), tgt_mask=later if self.triangle else None)


def translator(triangle: bool) -> Target:
    torch.manual_seed(0)
    model = Translator(triangle=triangle).eval()
    return Target(model, Intent.encoder_decoder(), features=WIDTH, length=7)


class Sloped(nn.Module):
    """One head looks at its own key alone, as its slope is so steep; the other sees far. Pads are hidden, or all else is."""

    def __init__(self, inverted: bool) -> None:
        super().__init__()
        self.embed, self.qkv, self.inverted = nn.Embedding(31, 16), nn.Linear(16, 48), inverted

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x, places = self.embed(input_ids), torch.arange(input_ids.shape[1])
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        behind = places[:, None] - places
        hidden = (behind < 0)[None, None]
        if attention_mask is not None:
            hidden = hidden | (attention_mask == int(self.inverted))[:, None, None, :]
        scores = q @ k.mT / 8**0.5 - behind * torch.tensor([64.0, 0.25])[:, None, None]
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
        return x + (weights @ v).transpose(1, 2).flatten(2)


def sloped(*, inverted: bool) -> Target:
    torch.manual_seed(6)
    keep = Padding("attention_mask", keep=True)
    streams = (Stream("input_ids", "tokens", vocab=31, length=40, padding=keep),)
    return Target(Sloped(inverted).eval(), CAUSAL, streams=streams)


TRAPS = (
    Trap(
        "a slope that leaves a query its own key",
        lambda: sloped(inverted=False),
        lambda: sloped(inverted=True),
        "mask-inverted",
    ),
    Trap(
        "top-left causal as a primitive", lambda: Target(top_left, CAUSAL), lambda: Target(bare, CAUSAL), "causal-leak"
    ),
    Trap(
        "a prefix that sees both ways",
        lambda: two(prefix_lm, Intent(Mask.prefix(3))),
        lambda: two(prefix_lm, CAUSAL),
        "causal-leak",
    ),
    Trap(
        "a mask of ones beside a decoder's own triangle",
        lambda: two(causal, CAUSAL),
        lambda: two(or_given, CAUSAL),
        "causal-leak",
    ),
    Trap("pads that see pads", lambda: two(pads_see_pads, FULL), lambda: two(pads_seen, FULL), "mask-ignored"),
    Trap(
        "-100 added",
        lambda: two(partial(added, amount=-100.0), CAUSAL),
        lambda: two(partial(added, amount=-3.0), CAUSAL),
        "mask-ignored",
    ),
    Trap(
        "-1e9 filled",
        lambda: two(partial(filled, fill=-1e9), CAUSAL),
        lambda: two(partial(filled, fill=1e-9), CAUSAL),
        "mask-ignored",
    ),
    Trap("-1e4 filled", lambda: two(partial(filled, fill=-1e4), CAUSAL), lambda: two(leaky, CAUSAL), "causal-leak"),
    Trap(
        "a window that counts the query's own key",
        lambda: two(partial(banded, left=2, right=0), Intent(Mask.causal() & Mask.window(3))),
    ),
    Trap("a window of equal radii", lambda: two(partial(banded, left=2, right=2), Intent(Mask.window(2, 2)))),
    Trap("windows folded into the batch", windows),
    Trap(
        "the fourth root on q and on k",
        lambda: two(partial(roots, both=True), FULL),
        lambda: two(partial(roots, both=False), FULL),
        "scale-wrong-width",
    ),
    Trap(
        "a scale folded into the weights",
        lambda: two(partial(plain, scale=1.0), Intent(Mask.full(), scale_is_free=True)),
        lambda: two(partial(plain, scale=1.0), FULL),
        "scale-missing",
    ),
    Trap(
        "no scale, as stated",
        lambda: two(partial(plain, scale=1.0), Intent(Mask.full(), scale=1.0)),
        lambda: two(plain, Intent(Mask.full(), scale=1.0)),
        "scale-wrong-width",
    ),
    Trap(
        "a width of the scale stated by the author",
        lambda: two(partial(plain, scale=6**-0.5), Intent(Mask.full(), scale=6**-0.5)),
        lambda: two(partial(plain, scale=6**-0.5), FULL),
        "scale-wrong-width",
    ),
    Trap(
        "normed q and k with scale 1",
        lambda: two(partial(normed, norm=True), FULL),
        lambda: two(partial(normed, norm=False), FULL),
        "scale-missing",
    ),
    Trap(
        "queries scaled before a kernel that does not",
        lambda: two(partial(prescaled, scale=1.0), FULL),
        lambda: two(partial(prescaled, scale=None), FULL),
        "scale-twice",
    ),
    Trap("a latent of keys and values", lambda: latent(12), lambda: latent(8), "scale-wrong-width"),
    Trap(
        "one more in the denominator",
        lambda: two(off_by_one, CAUSAL),
        lambda: two(over_queries, CAUSAL),
        "softmax-wrong-axis",
    ),
    Trap("learned sinks", sinks),
    Trap(
        "dropout in a model left in train mode",
        lambda: in_training(False),
        lambda: in_training(True),
        "dropout-in-eval",
    ),
    Trap("kernels that differ where nothing is seen", lambda: choosing(None), lambda: choosing(1.0), "scale-missing"),
    Trap(
        "rotary positions that do not start at the pads",
        lambda: two(rope, CAUSAL),
        lambda: two(rope_padded, CAUSAL),
        "padding-leak",
    ),
    Trap(
        "learned positions that a caller can pass",
        lambda: two(causal, CAUSAL, model=FromTheFirst),
        lambda: two(partial(padded_leaky, causal=True), CAUSAL, model=FromTheFirst),
        "padding-leak",
    ),
    Trap("heads folded into the batch", lambda: folded(True), lambda: folded(False), "heads-interleaved"),
    Trap("a relative bias shared by the layers", lambda: relative(True), lambda: relative(False), "causal-leak"),
    Trap("tied keys and values", lambda: narrow(tied=True), lambda: narrow(tied=True, scale=1.0), "scale-missing"),
    Trap(
        "values of another width",
        lambda: narrow(tied=False),
        lambda: narrow(tied=False, scale=5**-0.5),
        "scale-wrong-width",
    ),
    Trap(
        "a group norm over time in an encoder",
        lambda: two(plain, FULL, before=OverTime),
        lambda: two(causal, CAUSAL, before=OverTime),
        "side-channel",
    ),
    Trap(
        "a convolution over pads in an encoder",
        lambda: two(plain, FULL, before=Neighbours),
        lambda: two(causal, CAUSAL, before=Neighbours),
        "side-channel",
    ),
    Trap("hashing at random", lambda: two(plain, FULL, before=Hashing), lambda: in_training(True), "dropout-in-eval"),
    Trap(
        "mean pooling over pads",
        lambda: two(plain, FULL, after=Mean),
        lambda: two(padded_leaky, FULL, model=Pooled),
        "padding-leak",
    ),
    Trap("mean pooling over real tokens", lambda: two(plain, FULL, model=Pooled)),
    Trap(
        "a router of tokens to experts",
        lambda: two(causal, CAUSAL, before=Experts),
        lambda: two(causal, CAUSAL, before=partial(Experts, together=True)),
        "side-channel",
    ),
    Trap(
        "a cache that is not passed",
        lambda: two(causal, CAUSAL, model=Cached),
        lambda: two(leaky, CAUSAL, model=Cached),
        "causal-leak",
    ),
    Trap("an encoder without any mask", lambda: torch_encoder(FULL), lambda: torch_encoder(CAUSAL), "causal-leak"),
    Trap("a source as long as the target", lambda: translator(True), lambda: translator(False), "causal-leak"),
    Trap(
        "a decoder that sees both ways, as stated",
        lambda: two(plain, FULL, model=Unpadded),
        lambda: two(causal, FULL, model=Unpadded),
        "causal-extra",
    ),
    Trap(
        "nothing stated about the mask",
        lambda: two(causal, Intent()),
        lambda: two(partial(padded_leaky, causal=True), Intent()),
        "padding-leak",
    ),
)


def errors(target: Target) -> list[tuple[str, str]]:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        report = intently.check(target)
    return [(f.fault, f"{f.site}: {f.message}") for f in report.findings if f.severity == "error"]


@pytest.mark.parametrize("trap", TRAPS, ids=str)
def test_trap_raises_no_error(trap: Trap) -> None:
    assert errors(trap.build()) == []


@pytest.mark.parametrize("trap", [t for t in TRAPS if t.control is not None], ids=str)
def test_control_of_the_same_shape_does(trap: Trap) -> None:
    assert trap.control is not None
    assert trap.faulty in {fault for fault, _ in errors(trap.control())}


# What released architectures do by design, and the report must not take for an error.
RELEASED = {
    "t5": "its scale is folded into the weights, and one bias serves all layers",
    "gpt_neo": "it has no scale, and a window in every second layer",
    "modernbert": "its windows have equal radii",
    "wav2vec2": "a group norm over time and a convolution of positions see everything",
    "roberta": "its positions come from ids that are not the pad's",
    "reformer": "it hashes at random",
}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("architecture", RELEASED)
def test_released_architecture_raises_no_error(architecture: str) -> None:
    from intently.targets import load

    assert errors(load(f"hf:{architecture}")) == []


def test_quarter_roots_are_the_plain_scale() -> None:
    """A trap is only one if it is right: fourth roots on both sides, by hand."""
    q, k, v = (
        torch.randn(1, 1, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    by_hand = torch.softmax(q @ k.mT / math.sqrt(16), -1) @ v
    torch.testing.assert_close(roots(q, k, v, None, both=True), by_hand, rtol=1e-12, atol=1e-12)
