"""Models that read a memory, in several styles: what its mask hides, and where keys and values come from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo import matmul
from tests.zoo.case import plant
from torch import Tensor, nn

from intently import Intent, Mask, Target
from intently.targets import Stream

WIDTH, HEADS, INPUT, VOCABULARY = 24, 3, 10, 27


class Own(nn.Module):
    """Causal attention of a sequence over itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def read(self, x: Tensor, context: Tensor) -> Tensor:
        """What keys and values are made of."""
        return x

    def forward(self, x: Tensor, context: Tensor, context_mask: Tensor | None) -> Tensor:
        states = self.read(x, context)
        q, k, v = (self.qkv(s).chunk(3, -1)[i] for i, s in enumerate((x, states, states)))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=states is x)
        return self.o(attended.transpose(1, 2).flatten(2))


class Cross(nn.Module):
    """Attention over a context, written with einsum; `context_mask` keeps what is true."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Parameter(torch.randn(HEADS, WIDTH, 8) / 5) for _ in range(4))

    def read(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """What keys and values are made of."""
        return context, context

    def hide(self, scores: Tensor, context_mask: Tensor | None) -> Tensor:
        if context_mask is None:
            return scores
        return scores.masked_fill(context_mask[:, None, None, :] == 0, torch.finfo(scores.dtype).min)

    def forward(self, x: Tensor, context: Tensor, context_mask: Tensor | None) -> Tensor:
        keys, values = self.read(x, context)
        q = torch.einsum("bnc,hcd->bhnd", x, self.wq)
        k = torch.einsum("bmc,hcd->bhmd", keys, self.wk)
        v = torch.einsum("bmc,hcd->bhmd", values, self.wv)
        weights = self.hide(torch.einsum("bhnd,bhmd->bhnm", q, k) * 8**-0.5, context_mask).softmax(-1)
        return torch.einsum("bhnd,hcd->bnc", torch.einsum("bhnm,bhmd->bhnd", weights, v), self.wo)


class Fused(Cross):
    """The same through the fused call, with packed keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Tensor, context_mask: Tensor | None) -> Tensor:
        keys, values = self.read(x, context)
        pair = self.kv(keys).chunk(2, -1)[0], self.kv(values).chunk(2, -1)[1]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(x), *pair))
        return self.o(self.attend(q, k, v, self.masked(context_mask)).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def masked(self, context_mask: Tensor | None) -> Tensor | None:
        return None if context_mask is None else context_mask[:, None, None, :].bool()


class Layer(nn.Module):
    def __init__(self, cross: type[nn.Module], own: type[nn.Module] = Own) -> None:
        super().__init__()
        self.own, self.cross = own(), cross()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, context: Tensor, context_mask: Tensor | None) -> Tensor:
        x = x + self.own(self.norm1(x), context, context_mask)
        return x + self.cross(self.norm2(x), context, context_mask)


class Captioner(nn.Module):
    """Words about a context of features."""

    def __init__(self, crosses: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(64, WIDTH))
        self.look = nn.Linear(INPUT, WIDTH)
        self.layers = nn.ModuleList(Layer(c) for c in crosses)

    def forward(self, input_ids: Tensor, context: Tensor, context_mask: Tensor | None = None) -> Tensor:
        x, context = self.words(input_ids) + self.places[: input_ids.shape[1]], self.look(context)
        for layer in self.layers:
            x = layer(x, context, context_mask)
        return x @ self.words.weight.T


class TorchDecoder(nn.Module):
    """torch's own decoder layers behind a projection."""

    def __init__(self, passed: tuple[bool, ...]) -> None:
        super().__init__()
        self.passed = passed
        self.layers = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, HEADS, 32, batch_first=True) for _ in passed)

    def forward(self, tgt: Tensor, memory: Tensor, memory_key_padding_mask: Tensor | None = None) -> Tensor:
        later = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        for layer, passed in zip(self.layers, self.passed, strict=True):
            mask = memory_key_padding_mask if passed else None
            tgt = layer(tgt, memory, tgt_mask=later, memory_key_padding_mask=mask)
        return tgt


def captioner(*crosses: type[nn.Module]) -> Target:
    torch.manual_seed(21)
    return Target(Captioner(crosses).eval(), Intent(Mask.causal()))


def listener(*owns: type[nn.Module]) -> Target:
    """A captioner whose layers differ in the call over its own words."""
    torch.manual_seed(23)
    model = Captioner(())
    model.layers = nn.ModuleList(Layer(Cross, own) for own in owns)
    return Target(model.eval(), Intent(Mask.causal()))


def viewer(*crosses: type[nn.Module]) -> Target:
    """Few words about a long context."""
    torch.manual_seed(24)
    context, words = (
        Stream("context", "features", length=11, width=INPUT),
        Stream("input_ids", "tokens", vocab=VOCABULARY),
    )
    return Target(Captioner(crosses).eval(), Intent(Mask.causal()), streams=(context, words), output="input_ids")


def layers(passed: type) -> Target:
    torch.manual_seed(22)
    return Target(TorchDecoder(passed.layers).eval(), Intent(Mask.causal()), features=WIDTH)


# -- the planted lines ----------------------------------------------------------------------------------------------


class HidesNothing(Cross):
    def hide(self, scores: Tensor, context_mask: Tensor | None) -> Tensor:
        return scores


class AddsTheMask(Cross):
    def hide(self, scores: Tensor, context_mask: Tensor | None) -> Tensor:
        return scores if context_mask is None else scores + context_mask[:, None, None, :]


class FusedWithoutMask(Fused):
    def masked(self, context_mask: Tensor | None) -> Tensor | None:
        return None


class CutWithoutMask(Fused):
    """Without a mask it takes itself for a decoder's first call on an empty cache: causal, over as many keys as queries."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            return super().attend(q, k, v, mask)
        count = q.shape[2]
        return F.scaled_dot_product_attention(q, k[:, :, :count], v[:, :, :count], is_causal=True)


class ReadsItself(Cross):
    def read(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def hide(self, scores: Tensor, context_mask: Tensor | None) -> Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, torch.finfo(scores.dtype).min)


class FusedOverItself(Fused):
    def read(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def masked(self, context_mask: Tensor | None) -> Tensor | None:
        return None


class KeysOfItself(Cross):
    def read(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, : context.shape[1]], context


class OwnOverTheContext(Own):
    def read(self, x: Tensor, context: Tensor) -> Tensor:
        return context


class PassedOn:
    """The mask goes to every layer."""

    layers = (True, True)


class LostAfterTheFirst(PassedOn):
    layers = (True, False)


C, N, A, NoPads = Cross, Fused, matmul.Attention, matmul.NoPads
ONE, ALL = ("layers.1.cross",), ("layers.0.cross", "layers.1.cross")

CASES = (
    *plant(
        "einsum",
        "memory-mask-ignored",
        "no fill in one layer",
        *ONE,
        build=captioner,
        bad=(C, HidesNothing),
        good=(C, C),
    ),
    *plant(
        "einsum",
        "memory-mask-ignored",
        "zeros and ones added",
        "layers.0.cross",
        build=captioner,
        bad=(AddsTheMask, C),
        good=(C, C),
    ),
    *plant(
        "sdpa",
        "memory-mask-ignored",
        "no mask anywhere",
        *ALL,
        build=captioner,
        bad=(FusedWithoutMask, FusedWithoutMask),
        good=(N, N),
    ),
    *plant(
        "einsum", "cross-miswired", "one layer reads itself", *ONE, build=captioner, bad=(C, ReadsItself), good=(C, C)
    ),
    *plant(
        "einsum",
        "cross-miswired",
        "keys of itself, values of the context",
        "layers.0.cross",
        build=captioner,
        bad=(KeysOfItself, C),
        good=(C, C),
    ),
    *plant(
        "sdpa",
        "causal-extra",
        "over a context cut to as many keys as queries",
        "layers.1.cross",
        build=viewer,
        bad=(N, CutWithoutMask),
        good=(N, N),
    ),
    *plant(
        "sdpa",
        "cross-miswired",
        "every layer reads itself",
        *ALL,
        build=captioner,
        bad=(FusedOverItself, FusedOverItself),
        good=(N, N),
    ),
    *plant(
        "sdpa",
        "cross-miswired",
        "self-attention of every layer reads the context",
        "layers.0.own",
        "layers.1.own",
        build=listener,
        bad=(OwnOverTheContext, OwnOverTheContext),
        good=(Own, Own),
    ),
    *plant(
        "einsum",
        "cross-miswired",
        "self-attention of one layer reads the context",
        "layers.1.own",
        build=listener,
        bad=(ReadsItself, Cross),
        good=(ReadsItself, ReadsItself),
    ),
    *plant(
        "multihead",
        "memory-mask-ignored",
        "lost after the first layer",
        "layers.1.multihead_attn",
        build=layers,
        bad=(LostAfterTheFirst,),
        good=(PassedOn,),
    ),
    *plant(
        "matmul",
        "memory-mask-ignored",
        "the encoder alone uses it",
        "layers.0.cross",
        build=matmul.translator,
        bad=(NoPads, A),
        good=(A, A),
    ),
)
