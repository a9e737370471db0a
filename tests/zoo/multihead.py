"""The nn.MultiheadAttention style: a layer of torch's own, told by arguments what to hide."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from tests.zoo.case import plant
from torch import Tensor, nn

from intently import Intent, Mask, Target

WIDTH, HEADS, INPUT, VOCABULARY = 24, 3, 10, 21

IMPOSSIBLE = {
    ("multihead", fault): why
    for fault, why in {
        "scale-missing": "nn.MultiheadAttention multiplies by 1/√width itself and takes no factor",
        "scale-twice": "a second factor could only be put on its inputs, where it is part of the projection",
        "scale-wrong-width": "nn.MultiheadAttention takes the width from its own arguments",
        "softmax-wrong-axis": "the softmax is made inside, over keys",
        "backend-disagrees": "torch chooses the kernel, and no line of a user's stands in either path",
    }.items()
}


def triangle(length: int) -> Tensor:
    """True above the diagonal: the keys that nn.MultiheadAttention is to hide."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


class Layer(nn.Module):
    """A layer with nn.MultiheadAttention, before which it normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def order(self, x: Tensor) -> Tensor | None:
        return None

    def attend(self, x: Tensor, pads: Tensor | None, need_weights: bool) -> Tensor:
        return self.self_attn(x, x, x, key_padding_mask=pads, attn_mask=self.order(x), need_weights=need_weights)[0]

    def forward(self, x: Tensor, pads: Tensor | None = None, need_weights: bool = False) -> Tensor:
        x = x + self.attend(self.norm1(x), pads, need_weights)
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class Causal(Layer):
    def order(self, x: Tensor) -> Tensor | None:
        return triangle(x.shape[1])


class Encoder(nn.Module):
    """Features in, and `src_key_padding_mask` True at pads."""

    def __init__(self, layers: tuple[type[Layer], ...]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(INPUT, WIDTH), nn.ModuleList(layer() for layer in layers)

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.embed(src)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask)
        return x


class Language(nn.Module):
    """Tokens in, and `attention_mask` 1 at real tokens."""

    def __init__(self, layers: tuple[type[Layer], ...]) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(40, WIDTH)
        self.layers, self.head = nn.ModuleList(layer() for layer in layers), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        pads = None if attention_mask is None else attention_mask == 0
        places = torch.arange(input_ids.shape[1])
        if attention_mask is not None:
            places = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        x = self.embed(input_ids) + self.place(places)
        for layer in self.layers:
            x = layer(x, pads)
        return self.head(x)


class Unpadded(Encoder):
    """An encoder of batches of one length."""

    def forward(self, src: Tensor) -> Tensor:
        return super().forward(src)


class Showing(Encoder):
    """One that can be asked for the weights."""

    def forward(self, src: Tensor, need_weights: bool = False) -> Tensor:
        x = self.embed(src)
        for layer in self.layers:
            x = layer(x, None, need_weights)
        return x


def encoder(*layers: type[Layer]) -> Target:
    torch.manual_seed(8)
    return Target(Encoder(layers).eval(), Intent(Mask.full()), features=INPUT)


def language(*layers: type[Layer]) -> Target:
    torch.manual_seed(9)
    return Target(Language(layers).eval(), Intent(Mask.causal()), tokens=VOCABULARY)


def showing(*layers: type[Layer]) -> Target:
    torch.manual_seed(9)
    return Target(Showing(layers).eval(), Intent(Mask.causal()), features=INPUT)


def masked_language(*layers: type[Layer]) -> Target:
    torch.manual_seed(10)
    return Target(Language(layers).eval(), Intent(Mask.full()), tokens=VOCABULARY)


def unpadded(*layers: type[Layer]) -> Target:
    torch.manual_seed(11)
    return Target(Unpadded(layers).eval(), Intent(Mask.full()), features=INPUT)


def unpadded_causal(*layers: type[Layer]) -> Target:
    torch.manual_seed(12)
    return Target(Unpadded(layers).eval(), Intent(Mask.causal()), features=INPUT)


# -- the planted lines: each class differs from the one it inherits by one method -----------------------------------


class HidesFromTheSecond(Causal):
    def order(self, x: Tensor) -> Tensor | None:
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(2)


class MaskReplacesTheTriangle(Causal):
    def attend(self, x: Tensor, pads: Tensor | None, need_weights: bool) -> Tensor:
        if pads is not None:
            return self.self_attn(x, x, x, key_padding_mask=pads, need_weights=need_weights)[0]
        return self.self_attn(x, x, x, attn_mask=self.order(x), need_weights=need_weights)[0]


class DropsThePads(Layer):
    def attend(self, x: Tensor, pads: Tensor | None, need_weights: bool) -> Tensor:
        return self.self_attn(x, x, x, attn_mask=self.order(x), need_weights=need_weights)[0]


class FloatsThePads(Layer):
    def attend(self, x: Tensor, pads: Tensor | None, need_weights: bool) -> Tensor:
        pads = None if pads is None else pads.to(x.dtype)
        return self.self_attn(x, x, x, key_padding_mask=pads, need_weights=need_weights)[0]


class PassesKeptForHidden(Layer):
    def attend(self, x: Tensor, pads: Tensor | None, need_weights: bool) -> Tensor:
        kept = None if pads is None else ~pads
        return self.self_attn(x, x, x, key_padding_mask=kept, need_weights=need_weights)[0]


class HidesThePast(Causal):
    def order(self, x: Tensor) -> Tensor | None:
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)


class FunctionalDefaults(Layer):
    """Calls the function instead of the module."""

    def attend(self, x: Tensor, pads: Tensor | None, need_weights: bool) -> Tensor:
        m, x = self.self_attn, x.transpose(0, 1)
        y, _ = F.multi_head_attention_forward(
            x, x, x, WIDTH, HEADS, m.in_proj_weight, m.in_proj_bias, None, None, False, m.dropout,
            m.out_proj.weight, m.out_proj.bias, self.training, key_padding_mask=pads, need_weights=need_weights,
        )  # fmt: skip
        return y.transpose(0, 1)


class TrainsByDefault(FunctionalDefaults):
    def attend(self, x: Tensor, pads: Tensor | None, need_weights: bool) -> Tensor:
        m, x = self.self_attn, x.transpose(0, 1)
        y, _ = F.multi_head_attention_forward(
            x, x, x, WIDTH, HEADS, m.in_proj_weight, m.in_proj_bias, None, None, False, m.dropout,
            m.out_proj.weight, m.out_proj.bias, key_padding_mask=pads, need_weights=need_weights,
        )  # fmt: skip
        return y.transpose(0, 1)


class SequenceFirst(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1)


class AsksForWeights(Causal):
    """Rows of left pads see nothing: with the weights asked for torch leaves NaN there, and its fused call 0."""

    def attend(self, x: Tensor, pads: Tensor | None, need_weights: bool) -> Tensor:
        return self.self_attn(x, x, x, key_padding_mask=pads, attn_mask=self.order(x), need_weights=True)[0]


class LooksWithoutTriangle(Layer):
    def attend(self, x: Tensor, pads: Tensor | None, need_weights: bool) -> Tensor:
        if need_weights:
            return self.self_attn(x, x, x)[0]
        return self.self_attn(x, x, x, attn_mask=triangle(x.shape[1]), need_weights=False)[0]


class LooksWithTriangle(Layer):
    def attend(self, x: Tensor, pads: Tensor | None, need_weights: bool) -> Tensor:
        if need_weights:
            return self.self_attn(x, x, x, attn_mask=triangle(x.shape[1]))[0]
        return self.self_attn(x, x, x, attn_mask=triangle(x.shape[1]), need_weights=False)[0]


class Recurrent(Causal):
    """A recurrent layer runs before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, pads: Tensor | None = None, need_weights: bool = False) -> Tensor:
        return super().forward(x + self.rnn(x)[0], pads, need_weights)


class BothDirections(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)


E, C = Layer, Causal
ONE, ALL = ("layers.1.self_attn",), ("layers.0.self_attn", "layers.1.self_attn")

planted = partial(plant, "multihead")

CASES = (
    *planted("causal-leak", "triu(2)", *ONE, build=language, bad=(C, HidesFromTheSecond), good=(C, C)),
    *planted("causal-leak", "no attn_mask", *ALL, build=unpadded_causal, bad=(E, E), good=(C, C)),
    *planted(
        "causal-leak",
        "a key mask replaces the triangle",
        *ONE,
        build=language,
        bad=(C, MaskReplacesTheTriangle),
        good=(C, C),
    ),
    *planted("causal-extra", "an attn_mask in an encoder", *ONE, build=unpadded, bad=(E, C, E), good=(E, E, E)),
    *planted("causal-extra", "an attn_mask in every layer", *ALL, build=unpadded, bad=(C, C), good=(E, E)),
    *planted("padding-leak", "one layer gets no key mask", *ONE, build=encoder, bad=(E, DropsThePads), good=(E, E)),
    *planted(
        "padding-leak",
        "no layer gets the key mask",
        *ALL,
        build=masked_language,
        bad=(DropsThePads, DropsThePads),
        good=(E, E),
    ),
    *planted(
        "mask-ignored", "a float mask of zeros and ones", *ONE, build=encoder, bad=(E, FloatsThePads), good=(E, E)
    ),
    *planted(
        "mask-inverted",
        "kept keys passed as hidden",
        *ALL,
        build=masked_language,
        bad=(PassesKeptForHidden, PassesKeptForHidden),
        good=(E, E),
    ),
    *planted(
        "mask-inverted", "the lower triangle is hidden", *ONE, build=unpadded_causal, bad=(C, HidesThePast), good=(C, C)
    ),
    *planted(
        "dropout-in-eval",
        "training=True by default",
        "layers.1",
        build=encoder,
        bad=(E, TrainsByDefault),
        good=(E, FunctionalDefaults),
    ),
    *planted("heads-interleaved", "batch_first left out", *ONE, build=unpadded, bad=(E, SequenceFirst), good=(E, E)),
    *planted(
        "heads-interleaved",
        "batch_first left out everywhere",
        *ALL,
        build=unpadded,
        bad=(SequenceFirst, SequenceFirst),
        good=(E, E),
    ),
    *planted(
        "not-finite",
        "left pads see nothing",
        "layers.0.self_attn",
        build=language,
        bad=(AsksForWeights, C),
        good=(C, C),
    ),
    *planted(
        "observer-effect",
        "weights come without the triangle",
        *ONE,
        build=showing,
        bad=(C, LooksWithoutTriangle),
        good=(C, LooksWithTriangle),
    ),
    *planted(
        "side-channel",
        "a recurrent layer runs both ways",
        "layers.0.rnn",
        build=unpadded_causal,
        bad=(BothDirections, Recurrent),
        good=(Recurrent, Recurrent),
    ),
)
