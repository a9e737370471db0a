"""The einsum style: heads stay between position and width, and a decoder of tokens takes `attention_mask` (1 keeps)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from tests.zoo.case import plant
from torch import Tensor, nn

from intently import Intent, Mask, Target

WIDTH, HEADS, VOCABULARY = 24, 3, 19


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = HEADS, WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.heads, self.width)

    def merge(self, x: Tensor) -> Tensor:
        return x.flatten(2)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bqhd,bkhd->bhqk", q, k) / self.width**0.5

    def order(self, scores: Tensor) -> Tensor:
        return torch.ones(scores.shape[-2:], dtype=torch.bool).tril()

    def hide(self, scores: Tensor, attention_mask: Tensor | None) -> Tensor:
        seen = self.order(scores)
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)

    def weigh(self, logits: Tensor) -> Tensor:
        return F.softmax(logits, dim=-1)

    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, 0.2, training=self.training)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        weights = self.drop(self.weigh(self.hide(self.score(q, k), attention_mask)))
        return self.out(self.merge(torch.einsum("bhqk,bkhd->bqhd", weights, v))), weights


class TwoWay(Attention):
    """Self-attention of an encoder."""

    def order(self, scores: Tensor) -> Tensor:
        return torch.ones(scores.shape[-2:], dtype=torch.bool)


class Block(nn.Module):
    """Attention and a perceptron, each after a norm."""

    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.before, self.attn = nn.LayerNorm(WIDTH), attention()
        self.after, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, attention_mask: Tensor | None, output_attentions: bool) -> tuple[Tensor, Tensor]:
        y, weights = self.attn(self.before(x), attention_mask, output_attentions)
        x = x + y
        return x + self.mlp(self.after(x)), weights


class Tokens(nn.Module):
    """Embedded tokens with learned positions through the blocks."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False):
        places = torch.arange(input_ids.shape[1])
        if attention_mask is not None:
            places = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        x = self.embed(input_ids) + self.positions(places)
        maps = []
        for layer in self.layers:
            x, weights = layer(x, attention_mask, output_attentions)
            maps.append(weights)
        return (self.head(x), maps) if output_attentions else self.head(x)


def decoder(*attentions: type[Attention], block: type[Block] = Block, seed: int = 0) -> Target:
    torch.manual_seed(seed)
    return Target(Tokens([block(a) for a in attentions]).eval(), Intent(Mask.causal()))


def encoder(*attentions: type[Attention], seed: int = 1) -> Target:
    torch.manual_seed(seed)
    return Target(Tokens([Block(a) for a in attentions]).eval(), Intent(Mask.full()))


# -- the planted lines: each class differs from the one it inherits by one method -----------------------------------


class SeesOneAhead(Attention):
    def order(self, scores: Tensor) -> Tensor:
        return torch.ones(scores.shape[-2:], dtype=torch.bool).tril(1)


class TriangleOnlyWithMask(Attention):
    def hide(self, scores: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            return scores
        return super().hide(scores, attention_mask)


class TakesNoMask(Attention):
    def hide(self, scores: Tensor, attention_mask: Tensor | None) -> Tensor:
        return scores.masked_fill(~self.order(scores), torch.finfo(scores.dtype).min)


class AddsTheMask(Attention):
    def hide(self, scores: Tensor, attention_mask: Tensor | None) -> Tensor:
        scores = scores.masked_fill(~self.order(scores), torch.finfo(scores.dtype).min)
        return scores if attention_mask is None else scores + attention_mask[:, None, None, :].to(scores.dtype)


class MultipliesTheTriangle(Attention):
    def hide(self, scores: Tensor, attention_mask: Tensor | None) -> Tensor:
        scores = scores * self.order(scores)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, None, :] == 0, torch.finfo(scores.dtype).min)
        return scores


class FillsWhereKept(TwoWay):
    def hide(self, scores: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            return scores
        return scores.masked_fill(attention_mask[:, None, None, :].bool(), torch.finfo(scores.dtype).min)


class NoScale(Attention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bqhd,bkhd->bhqk", q, k)


class ScaledInBothPlaces(Attention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        q = q / self.width**0.5
        return torch.einsum("bqhd,bkhd->bhqk", q, k) / self.width**0.5


class ScaledByTheModelWidth(Attention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5


class MultipliedByTheRoot(Attention):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bqhd,bkhd->bhqk", q, k) * self.width**0.5


class SumsOverHeads(TwoWay):
    def weigh(self, logits: Tensor) -> Tensor:
        return F.softmax(logits, dim=1)


class SumsOverQueries(TwoWay):
    def weigh(self, logits: Tensor) -> Tensor:
        return F.softmax(logits, dim=2)


class AlwaysDrops(Attention):
    def drop(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, 0.2)


class SplitsHeadsFirst(Attention):
    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.heads, x.shape[1], self.width).transpose(1, 2)


class MergesHeadsFirst(Attention):
    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)


class ZeroTimesInfinity(TwoWay):
    def hide(self, scores: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            return scores
        return scores + (1 - attention_mask[:, None, None, :].to(scores.dtype)) * float("-inf")


class LooksWithoutTriangle(Attention):
    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not output_attentions:
            return super().forward(x, attention_mask)
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        weights = self.weigh(self.score(q, k))
        return self.out(self.merge(torch.einsum("bhqk,bkhd->bqhd", weights, v))), weights


class TwoKernels(Attention):
    """Adds a slope by distance; by hand, or in a fused kernel behind a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.use_flash = False
        self.slopes = nn.Parameter(torch.rand(HEADS))

    def bias(self, scores: Tensor) -> Tensor:
        return (
            -self.slopes[:, None, None]
            * (torch.arange(scores.shape[-2])[:, None] - torch.arange(scores.shape[-1])).abs()
        )

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().score(q, k)
        return scores + self.bias(scores)

    def addend(self, scores: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.hide(self.bias(scores).expand(scores.shape), attention_mask)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not self.use_flash:
            return super().forward(x, attention_mask)
        q, k, v = (self.split(p(x)).transpose(1, 2) for p in (self.query, self.key, self.value))
        blank = q.new_zeros(*q.shape[:-1], k.shape[-2])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.addend(blank, attention_mask))
        return self.out(self.merge(y.transpose(1, 2))), blank


class BiasByHandOnly(TwoKernels):
    def addend(self, scores: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.hide(scores, attention_mask)


class CausalConvolution(nn.Conv1d):
    """Mixes a position with the two before it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x.mT, (2, 0))).mT


class CentredConvolution(CausalConvolution):
    def forward(self, x: Tensor) -> Tensor:
        return nn.Conv1d.forward(self, F.pad(x.mT, (1, 1))).mT


class MixingBlock(Block):
    """A block with a convolution before attention."""

    convolution: type[CausalConvolution] = CausalConvolution

    def __init__(self, attention: type[Attention]) -> None:
        super().__init__(attention)
        self.conv = self.convolution()

    def forward(self, x: Tensor, attention_mask: Tensor | None, output_attentions: bool) -> tuple[Tensor, Tensor]:
        return super().forward(x + self.conv(x), attention_mask, output_attentions)


class CentredBlock(MixingBlock):
    convolution = CentredConvolution


def mixing(*blocks: type[Block]) -> Target:
    """A decoder whose keys are all real: a causal convolution may see pads on the left."""
    torch.manual_seed(2)

    class Unpadded(Tokens):
        def forward(self, input_ids: Tensor):
            return super().forward(input_ids)

    return Target(Unpadded([b(Attention) for b in blocks]).eval(), Intent(Mask.causal()))


A, W = Attention, TwoWay
ONE, ALL = ("layers.1.attn",), ("layers.0.attn", "layers.1.attn")

planted = partial(plant, "einsum")

CASES = (
    *planted("causal-leak", "tril(1)", *ONE, build=decoder, bad=(A, SeesOneAhead), good=(A, A)),
    *planted("causal-leak", "an encoder's layer in a decoder", *ALL, build=decoder, bad=(W, W), good=(A, A)),
    *planted(
        "causal-leak",
        "no triangle without a mask",
        "layers.0.attn",
        build=decoder,
        bad=(TriangleOnlyWithMask, A, A),
        good=(A, A, A),
    ),
    *planted("causal-extra", "a decoder's layer in an encoder", *ONE, build=encoder, bad=(W, A), good=(W, W)),
    *planted(
        "padding-leak", "the mask stops at one layer", *ONE, build=decoder, bad=(A, TakesNoMask, A), good=(A, A, A)
    ),
    *planted(
        "padding-leak", "the mask is never used", *ALL, build=decoder, bad=(TakesNoMask, TakesNoMask), good=(A, A)
    ),
    *planted("mask-ignored", "zeros and ones are added", *ONE, build=decoder, bad=(A, AddsTheMask), good=(A, A)),
    *planted(
        "mask-ignored",
        "the triangle is multiplied",
        "layers.0.attn",
        build=decoder,
        bad=(MultipliesTheTriangle, A),
        good=(A, A),
    ),
    *planted("mask-inverted", "fills where kept", *ONE, build=encoder, bad=(W, FillsWhereKept), good=(W, W)),
    *planted("scale-missing", "no factor", *ONE, build=decoder, bad=(A, NoScale), good=(A, A)),
    *planted(
        "scale-twice",
        "on the query and on the scores",
        *ALL,
        build=decoder,
        bad=(ScaledInBothPlaces, ScaledInBothPlaces),
        good=(A, A),
    ),
    *planted(
        "scale-wrong-width", "the width of the model", *ONE, build=decoder, bad=(A, ScaledByTheModelWidth), good=(A, A)
    ),
    *planted(
        "scale-wrong-width", "times the root", "layers.0.attn", build=decoder, bad=(MultipliedByTheRoot, A), good=(A, A)
    ),
    *planted("softmax-wrong-axis", "over heads", *ONE, build=encoder, bad=(W, SumsOverHeads), good=(W, W)),
    *planted(
        "softmax-wrong-axis", "over queries", *ALL, build=encoder, bad=(SumsOverQueries, SumsOverQueries), good=(W, W)
    ),
    *planted("dropout-in-eval", "F.dropout without training=", *ONE, build=decoder, bad=(A, AlwaysDrops), good=(A, A)),
    *planted(
        "heads-interleaved",
        "heads split before positions",
        "layers.0.attn",
        build=decoder,
        bad=(SplitsHeadsFirst, A),
        good=(A, A),
    ),
    *planted(
        "heads-interleaved",
        "heads merged before positions",
        *ONE,
        build=decoder,
        bad=(A, MergesHeadsFirst),
        good=(A, A),
    ),
    *planted("not-finite", "0 × -inf", *ONE, build=encoder, bad=(W, ZeroTimesInfinity), good=(W, W)),
    *planted(
        "not-finite",
        "0 × -inf in every layer",
        *ALL,
        build=encoder,
        bad=(ZeroTimesInfinity, ZeroTimesInfinity),
        good=(W, W),
    ),
    *planted(
        "observer-effect",
        "weights come without the triangle",
        *ONE,
        build=decoder,
        bad=(A, LooksWithoutTriangle),
        good=(A, A),
    ),
    *planted(
        "bias-ignored",
        "the fused kernel gets no bias",
        *ONE,
        build=decoder,
        bad=(TwoKernels, BiasByHandOnly),
        good=(TwoKernels, TwoKernels),
    ),
    *planted(
        "side-channel",
        "a centred convolution",
        "layers.1.conv",
        build=mixing,
        bad=(MixingBlock, CentredBlock),
        good=(MixingBlock, MixingBlock),
    ),
)
