"""The F.scaled_dot_product_attention style: fused calls, grouped heads, rotary positions, `attention_mask`."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from tests.zoo.case import plant
from torch import Tensor, nn

from intently import Intent, Mask, Target

WIDTH, HEADS, KV_HEADS, VOCABULARY, INPUT = 32, 4, 2, 29, 13

IMPOSSIBLE = {("sdpa", "softmax-wrong-axis"): "the softmax is made inside the call, over keys"}


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on `[batch, heads, position, width]`."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 100 ** (torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Attention(nn.Module):
    """Causal attention with fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.d = WIDTH // HEADS
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KV_HEADS * self.d, bias=False) for _ in range(2))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.d).transpose(1, 2)

    def merge(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).reshape(y.shape[0], -1, WIDTH)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() & attention_mask[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    def shown(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The same by hand, for callers that ask for the weights."""
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        scores = (q @ k.mT / self.d**0.5).masked_fill(~seen, torch.finfo(q.dtype).min)
        return scores.softmax(-1) @ v

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False) -> Tensor:
        q, k, v = rotate(self.split(self.q_proj(x))), rotate(self.split(self.k_proj(x))), self.split(self.v_proj(x))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        y = self.shown(q, k, v, attention_mask) if output_attentions else self.fused(q, k, v, attention_mask)
        return self.o_proj(self.merge(y))


class TwoWay(Attention):
    """The same for an encoder."""

    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        seen = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class Block(nn.Module):
    """Attention and a gated perceptron."""

    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(WIDTH), attention()
        self.post_layernorm, self.down = nn.RMSNorm(WIDTH), nn.Linear(44, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 44), nn.Linear(WIDTH, 44)

    def forward(self, x: Tensor, attention_mask: Tensor | None, output_attentions: bool = False) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), attention_mask, output_attentions)
        h = self.post_layernorm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(blocks)
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.through(input_ids, attention_mask, False)

    def through(self, input_ids: Tensor, attention_mask: Tensor | None, output_attentions: bool) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask, output_attentions)
        return self.lm_head(self.norm(x))


class Showing(Llama):
    """One that can be asked for the weights, which a fused call does not give."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> Tensor:
        return self.through(input_ids, attention_mask, output_attentions)


class Features(nn.Module):
    """An encoder of features."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.project, self.layers = nn.Linear(INPUT, WIDTH), nn.ModuleList(blocks)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.project(hidden_states)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


class Reader(nn.Module):
    """One module with two fused calls: causal over itself, then over the whole memory."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.ask, self.told = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
        )

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (self.split(t) for t in self.own(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        k, v = (self.split(t) for t in self.told(memory).chunk(2, -1))
        return x + self.read(self.split(self.ask(x)), k, v).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self, readers: tuple[type[Reader], ...]) -> None:
        super().__init__()
        self.embed, self.encode = nn.Linear(INPUT, WIDTH), nn.Linear(INPUT, WIDTH)
        self.layers = nn.ModuleList(r() for r in readers)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x, memory = self.embed(x), self.encode(memory)
        for layer in self.layers:
            x = layer(x, memory)
        return x


class Single(nn.Module):
    """An attention layer that is the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def factor(self) -> float | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.factor())
        return y.transpose(1, 2).flatten(2)


def decoder(*attentions: type[Attention]) -> Target:
    torch.manual_seed(13)
    return Target(Llama([Block(a) for a in attentions]).eval(), Intent(Mask.causal()), tokens=VOCABULARY)


def showing(*attentions: type[Attention]) -> Target:
    torch.manual_seed(13)
    return Target(Showing([Block(a) for a in attentions]).eval(), Intent(Mask.causal()), tokens=VOCABULARY)


def encoder(*attentions: type[Attention]) -> Target:
    torch.manual_seed(14)
    return Target(Features([Block(a) for a in attentions]).eval(), Intent(Mask.full()), features=INPUT)


def stack(*readers: type[Reader]) -> Target:
    torch.manual_seed(15)
    return Target(Stack(readers).eval(), Intent(Mask.causal()), features=INPUT)


def single(model: type[Single]) -> Target:
    torch.manual_seed(16)
    return Target(model().eval(), Intent(Mask.causal()), features=WIDTH)


# -- the planted lines: each class differs from the one it inherits by one method -----------------------------------


class MaskReplacesTheTriangle(Attention):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


class CausalInTraining(Attention):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.training)
        return super().fused(q, k, v, attention_mask)


class CausalWithoutMask(TwoWay):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        seen = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None and q.shape[2] > 1)


class ReadsCausally(Reader):
    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class OnlyCausal(Attention):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class FloatsTheMask(TwoWay):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        mask = None if attention_mask is None else attention_mask[:, None, None, :].to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class TrueForHidden(TwoWay):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        mask = None if attention_mask is None else (attention_mask == 0)[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class HidesThePast(Attention):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class ScaleOfOne(Single):
    def factor(self) -> float | None:
        return 1.0


class ScaledBefore(TwoWay):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        return super().fused(q * self.d**-0.5, k, v, attention_mask)


class ScaleOfTheModel(Single):
    def factor(self) -> float | None:
        return WIDTH**-0.5


class AlwaysDrops(Attention):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=0.1)


class ViewsHeads(Attention):
    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, x.shape[1], self.d)


class MergesHeadsFirst(Attention):
    def merge(self, y: Tensor) -> Tensor:
        return y.reshape(y.shape[0], -1, WIDTH)


class ZeroTimesInfinity(TwoWay):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        mask = None if attention_mask is None else (1 - attention_mask[:, None, None, :].to(q.dtype)) * float("-inf")
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class LooksWithoutPads(Attention):
    def shown(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return (q @ k.mT / self.d**0.5).masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1) @ v


class PadsOnBothPaths(OnlyCausal, LooksWithoutPads):
    """Pads are seen whether weights are asked for or not; what stands in them then differs, for a clean layer before it
    gives rows that see nothing a mean here and zeros there."""


class LooksWithoutTriangle(Attention):
    def shown(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        return (q @ k.mT / self.d**0.5).softmax(-1) @ v


class SoftCapped(Attention):
    """Caps the logits, which a fused kernel cannot do."""

    cap = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.fused_attn = False

    def shown(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        scores = self.cap * torch.tanh(q @ k.mT / self.d**0.5 / self.cap)
        return scores.masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1) @ v

    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.shown(q, k, v, attention_mask)


class CapLostWhenFused(SoftCapped):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        return (
            Attention.fused(self, q, k, v, attention_mask)
            if self.fused_attn
            else super().fused(q, k, v, attention_mask)
        )


class HalfTheCapWhenFused(SoftCapped):
    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        self.cap = 0.25 if self.fused_attn else 0.5
        return super().fused(q, k, v, attention_mask)


class RunningMean(nn.Module):
    """The mean of a position and all before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).to(x)[:, None]


class WholeMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


class SummaryBlock(Block):
    """A block that adds a summary of the sequence."""

    summary: type[nn.Module] = RunningMean

    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__(attention)
        self.context = self.summary()

    def forward(self, x: Tensor, attention_mask: Tensor | None, output_attentions: bool = False) -> Tensor:
        return super().forward(x + self.context(x), attention_mask, output_attentions)


class WholeSummaryBlock(SummaryBlock):
    summary = WholeMean


class Unpadded(Llama):
    """For batches of one length: a running mean would count pads on the left."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def summarised(*blocks: type[SummaryBlock]) -> Target:
    torch.manual_seed(17)
    return Target(Unpadded([b() for b in blocks]).eval(), Intent(Mask.causal()), tokens=VOCABULARY)


A, W, R = Attention, TwoWay, Reader
ONE, ALL = ("layers.1.self_attn",), ("layers.0.self_attn", "layers.1.self_attn")

planted = partial(plant, "sdpa")

CASES = (
    *planted(
        "causal-leak",
        "a given mask replaces the triangle",
        *ALL,
        build=decoder,
        bad=(MaskReplacesTheTriangle, MaskReplacesTheTriangle),
        good=(A, A),
    ),
    *planted(
        "causal-leak", "is_causal=self.training", *ONE, build=decoder, bad=(A, CausalInTraining, A), good=(A, A, A)
    ),
    *planted(
        "causal-extra", "is_causal where no mask is given", *ONE, build=encoder, bad=(W, CausalWithoutMask), good=(W, W)
    ),
    *planted(
        "causal-extra", "is_causal over the memory", "layers.1#1", build=stack, bad=(R, ReadsCausally), good=(R, R)
    ),
    *planted("padding-leak", "is_causal alone", *ONE, build=decoder, bad=(A, OnlyCausal), good=(A, A)),
    *planted(
        "padding-leak",
        "on two paths, before which pads differ",
        *ONE,
        build=showing,
        bad=(A, PadsOnBothPaths),
        good=(A, A),
    ),
    *planted(
        "padding-leak", "is_causal alone, everywhere", *ALL, build=decoder, bad=(OnlyCausal, OnlyCausal), good=(A, A)
    ),
    *planted(
        "mask-ignored", "a float mask of zeros and ones", *ONE, build=encoder, bad=(W, FloatsTheMask), good=(W, W)
    ),
    *planted(
        "mask-ignored", "a float mask, everywhere", *ALL, build=encoder, bad=(FloatsTheMask, FloatsTheMask), good=(W, W)
    ),
    *planted("mask-inverted", "True taken for hidden", *ONE, build=encoder, bad=(W, TrueForHidden), good=(W, W)),
    *planted(
        "mask-inverted",
        "the lower triangle is hidden",
        "layers.0.self_attn",
        build=decoder,
        bad=(HidesThePast, A),
        good=(A, A),
    ),
    *planted("scale-missing", "scale=1.0", "(root)", build=single, bad=(ScaleOfOne,), good=(Single,)),
    *planted(
        "scale-twice", "queries scaled before the call", *ONE, build=encoder, bad=(W, ScaledBefore, W), good=(W, W, W)
    ),
    *planted(
        "scale-wrong-width", "the width of the model", "(root)", build=single, bad=(ScaleOfTheModel,), good=(Single,)
    ),
    *planted("dropout-in-eval", "dropout_p whatever the mode", *ONE, build=decoder, bad=(A, AlwaysDrops), good=(A, A)),
    *planted(
        "dropout-in-eval", "dropout_p, everywhere", *ALL, build=decoder, bad=(AlwaysDrops, AlwaysDrops), good=(A, A)
    ),
    *planted("heads-interleaved", "view without transpose", *ONE, build=decoder, bad=(A, ViewsHeads), good=(A, A)),
    *planted(
        "heads-interleaved",
        "merged without transpose",
        "layers.0.self_attn",
        build=decoder,
        bad=(MergesHeadsFirst, A),
        good=(A, A),
    ),
    *planted("not-finite", "0 × -inf", *ONE, build=encoder, bad=(W, ZeroTimesInfinity), good=(W, W)),
    *planted(
        "observer-effect", "weights come without the pads", *ONE, build=showing, bad=(A, LooksWithoutPads), good=(A, A)
    ),
    *planted(
        "observer-effect",
        "weights come without the triangle",
        *ALL,
        build=showing,
        bad=(LooksWithoutTriangle, LooksWithoutTriangle),
        good=(A, A),
    ),
    *planted(
        "bias-ignored",
        "the fused kernel drops the cap",
        *ONE,
        build=decoder,
        bad=(SoftCapped, CapLostWhenFused),
        good=(SoftCapped, SoftCapped),
    ),
    *planted(
        "backend-disagrees",
        "another cap on the fused path",
        *ONE,
        build=decoder,
        bad=(SoftCapped, HalfTheCapWhenFused),
        good=(SoftCapped, SoftCapped),
    ),
    *planted(
        "side-channel",
        "the mean of the whole sequence",
        "layers.0.context",
        build=summarised,
        bad=(WholeSummaryBlock, SummaryBlock),
        good=(SummaryBlock, SummaryBlock),
    ),
)
