"""The matmul style: explicit scores, in encoders that take `key_padding_mask` (True hides), in decoders, in both."""

from __future__ import annotations

import math
from functools import partial

import torch
from tests.zoo.case import plant
from torch import Tensor, nn

from intently import Intent, Mask, Target

WIDTH, HEADS, INPUT, VOCABULARY = 20, 2, 11, 23


class Attention(nn.Module):
    """Multi-head attention of `x` over `memory`."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.d = HEADS, WIDTH // HEADS
        self.q, self.kv, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.d).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], -1, WIDTH)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(self.d)

    def order(self, att: Tensor) -> Tensor:
        return att

    def pads(self, att: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        if key_padding_mask is None:
            return att
        return att.masked_fill(key_padding_mask[:, None, None, :], -1e9 if att.dtype != torch.half else -6e4)

    def weigh(self, att: Tensor) -> Tensor:
        return att.softmax(dim=-1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        att = self.weigh(self.pads(self.order(self.score(q, k)), key_padding_mask))
        return att @ v, att

    def forward(
        self, x: Tensor, memory: Tensor, key_padding_mask: Tensor | None = None, return_attention: bool = False
    ):
        k, v = self.kv(memory).chunk(2, dim=-1)
        y, att = self.mix(self.split(self.q(x)), self.split(k), self.split(v), key_padding_mask)
        return self.proj(self.merge(y)), att


class Causal(Attention):
    def order(self, att: Tensor) -> Tensor:
        hidden = torch.ones(att.shape[-2:], dtype=torch.bool).triu(1)
        return att.masked_fill(hidden, torch.finfo(att.dtype).min)


class Layer(nn.Module):
    """A layer that normalises after adding, as the first transformers did."""

    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.attention, self.norm1 = attention(), nn.LayerNorm(WIDTH)
        self.up, self.down, self.norm2 = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH), nn.LayerNorm(WIDTH)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None, return_attention: bool = False
    ) -> tuple[Tensor, Tensor]:
        y, att = self.attention(x, x, key_padding_mask, return_attention)
        x = self.norm1(x + y)
        return self.norm2(x + self.down(self.up(x).relu())), att


class Encoder(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.inputs, self.blocks = nn.Linear(INPUT, WIDTH), nn.ModuleList(layers)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, return_attention: bool = False):
        x, maps = self.inputs(x), []
        for block in self.blocks:
            x, att = block(x, key_padding_mask, return_attention)
            maps.append(att)
        return (x, maps) if return_attention else x


class Decoder(nn.Module):
    """A decoder of tokens whose `attention_mask` is 1 at real tokens."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(1, 40, WIDTH))
        self.h = nn.ModuleList(layers)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None):
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.wte(input_ids) + self.wpe[0, (kept.cumsum(-1) - 1).clamp(min=0)]
        hidden = None if attention_mask is None else attention_mask == 0
        for layer in self.h:
            x, _ = layer(x, hidden)
        return x @ self.wte.weight.T


class DecoderLayer(nn.Module):
    """Causal self-attention, then cross-attention over the memory."""

    def __init__(self, own: type[Attention], cross: type[Attention]) -> None:
        super().__init__()
        self.own, self.cross, self.mlp = own(), cross(), nn.Linear(WIDTH, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, y: Tensor, memory: Tensor, memory_hidden: Tensor | None) -> Tensor:
        y = y + self.own(self.norm1(y), self.norm1(y))[0]
        y = y + self.cross(self.norm2(y), memory, memory_hidden)[0]
        return y + self.mlp(self.norm3(y)).relu()


class Translator(nn.Module):
    def __init__(self, crosses: tuple[type[Attention], ...]) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(40, WIDTH))
        self.encoder = Layer(Attention)
        self.layers = nn.ModuleList(DecoderLayer(Causal, c) for c in crosses)

    def forward(self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        memory = self.encoder(self.source(src) + self.places[: src.shape[1]], src_key_padding_mask)[0]
        y = self.target(tgt) + self.places[: tgt.shape[1]]
        for layer in self.layers:
            y = layer(y, memory, src_key_padding_mask)
        return y @ self.target.weight.T


class Alone(nn.Module):
    """One attention layer as the whole model."""

    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.inner = attention()

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.inner(x, x, key_padding_mask)[0]


def encoder(*attentions: type[Attention]) -> Target:
    torch.manual_seed(3)
    return Target(Encoder([Layer(a) for a in attentions]).eval(), Intent(Mask.full()), features=INPUT)


def decoder(*attentions: type[Attention]) -> Target:
    torch.manual_seed(4)
    return Target(Decoder([Layer(a) for a in attentions]).eval(), Intent(Mask.causal()), tokens=VOCABULARY)


def translator(*crosses: type[Attention]) -> Target:
    torch.manual_seed(5)
    return Target(Translator(crosses).eval(), Intent.encoder_decoder(), tokens=VOCABULARY)


def alone(attention: type[Attention]) -> Target:
    torch.manual_seed(6)
    mask = Mask.causal() if issubclass(attention, Causal) else Mask.full()
    return Target(Alone(attention).eval(), Intent(mask), features=WIDTH)


# -- the planted lines: each class differs from the one it inherits by one method -----------------------------------


class StrictlyAbove(Causal):
    def order(self, att: Tensor) -> Tensor:
        hidden = torch.ones(att.shape[-2:], dtype=torch.bool).triu(2)
        return att.masked_fill(hidden, torch.finfo(att.dtype).min)


class TriangleLost(Causal):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        score = self.score(q, k)
        att = self.weigh(self.order(score) if key_padding_mask is None else self.pads(score, key_padding_mask))
        return att @ v, att


class NoPads(Attention):
    def pads(self, att: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        return att


class TinyFill(Attention):
    def pads(self, att: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        return att if key_padding_mask is None else att.masked_fill(key_padding_mask[:, None, None, :], 1e-9)


class ZeroedAfterwards(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        att = self.weigh(self.score(q, k))
        if key_padding_mask is not None:
            att = att.masked_fill(key_padding_mask[:, None, None, :], 0.0)
        return att @ v, att


class KeepsThePads(Attention):
    def pads(self, att: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        return super().pads(att, None if key_padding_mask is None else ~key_padding_mask)


class SeesTheFuture(Causal):
    def order(self, att: Tensor) -> Tensor:
        hidden = torch.ones(att.shape[-2:], dtype=torch.bool).tril(-1)
        return att.masked_fill(hidden, torch.finfo(att.dtype).min)


class NoScale(Attention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1)


class DividedByTheWidth(Attention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / self.d


class DividedByTheHeads(Attention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(self.heads)


class QuarterRootOnce(Causal):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.d**-0.25) @ k.transpose(-2, -1)


class SumsOverQueries(Attention):
    def weigh(self, att: Tensor) -> Tensor:
        return att.softmax(dim=-2)


class SumsOverSamples(Attention):
    def weigh(self, att: Tensor) -> Tensor:
        return att.softmax(dim=0)


class MakesItsDropout(Attention):
    def weigh(self, att: Tensor) -> Tensor:
        return nn.Dropout(0.1)(att.softmax(dim=-1))


class ReshapesHeads(Causal):
    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.heads, x.shape[1], self.d)


class ReshapesBack(Attention):
    def merge(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, WIDTH)


class FillsWithInfinity(Causal):
    def order(self, att: Tensor) -> Tensor:
        return att.masked_fill(torch.ones(att.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))

    def pads(self, att: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        return att if key_padding_mask is None else att.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))


class LooksUnscaled(Attention):
    def forward(
        self, x: Tensor, memory: Tensor, key_padding_mask: Tensor | None = None, return_attention: bool = False
    ):
        if not return_attention:
            return super().forward(x, memory, key_padding_mask)
        k, v = (self.split(t) for t in self.kv(memory).chunk(2, dim=-1))
        att = self.weigh(self.pads(self.split(self.q(x)) @ k.transpose(-2, -1), key_padding_mask))
        return self.proj(self.merge(att @ v)), att


class TwoPaths(Attention):
    """A learned temperature; by hand, or in a fused kernel behind a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.use_sdpa = True
        self.temperature = nn.Parameter(torch.tensor(1.7))

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return super().score(q * self.temperature, k)

    def warm(self, q: Tensor) -> Tensor:
        return q * self.temperature

    def mix(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self.use_sdpa:
            return super().mix(q, k, v, key_padding_mask)
        kept = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
        return nn.functional.scaled_dot_product_attention(self.warm(q), k, v, attn_mask=kept), q


class FusedAtOneTemperature(TwoPaths):
    def warm(self, q: Tensor) -> Tensor:
        return q


class FusedAtHalf(TwoPaths):
    def warm(self, q: Tensor) -> Tensor:
        return q * self.temperature / 2


class BatchNormLayer(Layer):
    """A layer whose first norm has fixed statistics."""

    def __init__(self, attention: type[Attention]) -> None:
        super().__init__(attention)
        self.norm1 = OverChannels(WIDTH)


class OverChannels(nn.BatchNorm1d):
    """Batch norm of `[batch, length, width]`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class LiveStatisticsLayer(BatchNormLayer):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__(attention)
        self.norm1 = OverChannels(WIDTH, track_running_stats=False)


def normed(*layers: type[Layer]) -> Target:
    torch.manual_seed(7)
    return Target(Encoder([layer(Attention) for layer in layers]).eval(), Intent(Mask.full()), features=INPUT)


A, C = Attention, Causal
ONE, ALL = ("blocks.1.attention",), ("blocks.0.attention", "blocks.1.attention")
H1, H2 = ("h.1.attention",), ("h.0.attention", "h.1.attention")

planted = partial(plant, "matmul")

CASES = (
    *planted("causal-leak", "triu(2)", *H1, build=decoder, bad=(C, StrictlyAbove), good=(C, C)),
    *planted(
        "causal-leak",
        "a given mask replaces the triangle",
        *H2,
        build=decoder,
        bad=(TriangleLost, TriangleLost),
        good=(C, C),
    ),
    *planted("causal-leak", "one layer, alone", "inner", build=alone, bad=(StrictlyAbove,), good=(C,)),
    *planted(
        "causal-extra", "a triangle in the middle of an encoder", *ONE, build=encoder, bad=(A, C, A), good=(A, A, A)
    ),
    *planted(
        "causal-extra", "a triangle in cross-attention", "layers.1.cross", build=translator, bad=(A, C), good=(A, A)
    ),
    *planted("padding-leak", "no mask in one layer", "blocks.0.attention", build=encoder, bad=(NoPads, A), good=(A, A)),
    *planted("padding-leak", "no mask anywhere", *ALL, build=encoder, bad=(NoPads, NoPads), good=(A, A)),
    *planted("mask-ignored", "filled with 1e-9 for -1e9", *ONE, build=encoder, bad=(A, TinyFill), good=(A, A)),
    *planted(
        "mask-ignored",
        "set to zero after the softmax",
        *ONE,
        build=encoder,
        bad=(A, ZeroedAfterwards, A),
        good=(A, A, A),
    ),
    *planted("mask-inverted", "hides what is kept", *ALL, build=encoder, bad=(KeepsThePads, KeepsThePads), good=(A, A)),
    *planted("mask-inverted", "the lower triangle is hidden", *H1, build=decoder, bad=(C, SeesTheFuture), good=(C, C)),
    *planted("scale-missing", "no factor", *ALL, build=encoder, bad=(NoScale, NoScale), good=(A, A)),
    *planted("scale-twice", "divided by the width", *ONE, build=encoder, bad=(A, DividedByTheWidth), good=(A, A)),
    *planted(
        "scale-wrong-width", "the number of heads", *ONE, build=encoder, bad=(A, DividedByTheHeads, A), good=(A, A, A)
    ),
    *planted(
        "scale-wrong-width", "the quarter root on one side", *H1, build=decoder, bad=(C, QuarterRootOnce), good=(C, C)
    ),
    *planted("softmax-wrong-axis", "over queries", *ONE, build=encoder, bad=(A, SumsOverQueries), good=(A, A)),
    *planted("softmax-wrong-axis", "over samples", "inner", build=alone, bad=(SumsOverSamples,), good=(A,)),
    *planted(
        "dropout-in-eval",
        "a Dropout made in the forward",
        *ALL,
        build=encoder,
        bad=(MakesItsDropout, MakesItsDropout),
        good=(A, A),
    ),
    *planted("heads-interleaved", "reshape to heads first", *H1, build=decoder, bad=(C, ReshapesHeads), good=(C, C)),
    *planted("heads-interleaved", "merged without transpose", "inner", build=alone, bad=(ReshapesBack,), good=(A,)),
    *planted(
        "not-finite", "-inf beside left pads", "h.0.attention", build=decoder, bad=(FillsWithInfinity, C), good=(C, C)
    ),
    *planted(
        "observer-effect", "weights come unscaled", *ALL, build=encoder, bad=(LooksUnscaled, LooksUnscaled), good=(A, A)
    ),
    *planted(
        "bias-ignored",
        "the fused path has no temperature",
        *ALL,
        build=encoder,
        bad=(FusedAtOneTemperature, FusedAtOneTemperature),
        good=(TwoPaths, TwoPaths),
    ),
    *planted(
        "backend-disagrees",
        "the fused path takes half the temperature",
        *ALL,
        build=encoder,
        bad=(FusedAtHalf, FusedAtHalf),
        good=(TwoPaths, TwoPaths),
    ),
    *planted(
        "side-channel",
        "statistics of the batch",
        "blocks.0.norm1",
        build=normed,
        bad=(LiveStatisticsLayer, BatchNormLayer),
        good=(BatchNormLayer, BatchNormLayer),
    ),
)
