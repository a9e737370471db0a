"""Windows in all four styles: causal and of equal radii, in every layer or every other, as bands, diagonals and chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.case import Case, plant
from torch import Tensor, nn

from intently import Intent, Mask, Target

WIDTH, HEADS, VOCABULARY, WINDOW, RADIUS = 24, 3, 23, 4, 2


def distance(length: int) -> Tensor:
    """How far key j lies before query i."""
    return torch.arange(length)[:, None] - torch.arange(length)


class Layers(nn.Module):
    """Tokens through attention layers, each beside its residual."""

    def __init__(self, *attentions: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.layers, self.head = nn.ModuleList(a() for a in attentions), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(self.norm(x), None if attention_mask is None else attention_mask.bool())
        return self.head(x)


class Einsum(nn.Module):
    """A causal window for every head, filled in before the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def band(self, length: int) -> Tensor:
        back = distance(length)
        return (back >= 0) & (back < WINDOW)

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        seen = self.band(x.shape[1])
        if keep is not None:
            seen = seen & keep[:, None, None, :]
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


class OwnKeyNotCounted(Einsum):
    def band(self, length: int) -> Tensor:
        back = distance(length)
        return (back >= 0) & (back <= WINDOW)


class OneHeadSeesAll(Einsum):
    def band(self, length: int) -> Tensor:
        seen = super().band(length).repeat(HEADS, 1, 1)
        seen[1] = distance(length) >= 0
        return seen


class Matmul(nn.Module):
    """A window of equal radii in an encoder, added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def near(self, length: int) -> Tensor:
        return distance(length).abs() <= RADIUS

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        seen = self.near(x.shape[1])
        if keep is not None:
            seen = seen & keep[:, None, None, :]
        added = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -1e30)
        weights = (torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5 + added).softmax(-1)
        return self.o(torch.matmul(weights, v).transpose(1, 2).flatten(2))


class EdgesLeftOut(Matmul):
    def near(self, length: int) -> Tensor:
        return distance(length).abs() < RADIUS


class BothWaysWithoutLimit(Matmul):
    def near(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool)


class Fused(nn.Module):
    """A causal window in the mask of a fused call, whether pads are told or not."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def seen(self, length: int) -> Tensor:
        return (distance(length) >= 0) & (distance(length) < WINDOW)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        seen = self.seen(q.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen if keep is None else seen & keep[:, None, None])

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.o(self.attend(q, k, v, keep).transpose(1, 2).flatten(2))


class NoWindowWithoutMask(Fused):
    """Nothing to hide, so no mask; and no window with it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        if keep is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().attend(q, k, v, keep)


class OneKeyShort(Fused):
    def seen(self, length: int) -> Tensor:
        return (distance(length) >= 0) & (distance(length) < WINDOW - 1)


class Everything(Fused):
    """The other layer of a model in which windows alternate."""

    def seen(self, length: int) -> Tensor:
        return distance(length) >= 0


class Chunked(Fused):
    def seen(self, length: int) -> Tensor:
        chunk = torch.arange(length) // WINDOW
        return (chunk[:, None] == chunk) & (distance(length) >= 0)


class PreviousChunkToo(Chunked):
    def seen(self, length: int) -> Tensor:
        chunk = torch.arange(length) // WINDOW
        return (chunk[:, None] - chunk <= 1) & (distance(length) >= 0)


class Multihead(nn.Module):
    """nn.MultiheadAttention whose mask hides later keys and those before the window."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def hidden(self, length: int) -> Tensor:
        ones = torch.ones(length, length, dtype=torch.bool)
        return ones.triu(1) | ones.tril(-WINDOW)

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        pads = None if keep is None else ~keep
        mask = self.hidden(x.shape[1])
        return self.attn(x, x, x, attn_mask=mask, key_padding_mask=pads, need_weights=False)[0]


class DiagonalOffByOne(Multihead):
    def hidden(self, length: int) -> Tensor:
        ones = torch.ones(length, length, dtype=torch.bool)
        return ones.triu(1) | ones.tril(-WINDOW - 1)


class TriangleAlone(Multihead):
    def hidden(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(1)


def windowed(*attentions: type[nn.Module]) -> Target:
    torch.manual_seed(31)
    return Target(Layers(*attentions).eval(), Intent(Mask.causal() & Mask.window(WINDOW)), tokens=VOCABULARY)


def chunked(*attentions: type[nn.Module]) -> Target:
    torch.manual_seed(32)
    return Target(Layers(*attentions).eval(), Intent(Mask.causal() & Mask.chunks(WINDOW)), tokens=VOCABULARY)


def near(*attentions: type[nn.Module]) -> Target:
    torch.manual_seed(33)
    return Target(Layers(*attentions).eval(), Intent(Mask.window(RADIUS, RADIUS)), tokens=VOCABULARY)


def alternating(*attentions: type[nn.Module]) -> Target:
    torch.manual_seed(34)
    masks = (Mask.causal() & Mask.window(WINDOW), Mask.causal()) * 2
    return Target(Layers(*attentions).eval(), Intent(layers=masks[: len(attentions)]), tokens=VOCABULARY)


E, M, S, H = Einsum, Matmul, Fused, Multihead

CASES: tuple[Case, ...] = (
    *plant("einsum", "window-off-by-one", "the own key is not counted", "layers.1", build=windowed,
           bad=(E, OwnKeyNotCounted), good=(E, E)),
    *plant("einsum", "window-ignored", "one head sees all", "layers.0", build=windowed,
           bad=(OneHeadSeesAll, E), good=(E, E)),
    *plant("matmul", "window-off-by-one", "the edges are left out", "layers.1", build=near,
           bad=(M, EdgesLeftOut), good=(M, M)),
    *plant("matmul", "window-ignored", "no limit", "layers.0", build=near,
           bad=(BothWaysWithoutLimit, M), good=(M, M)),
    *plant("sdpa", "window-ignored", "no mask, so no window", "layers.0", "layers.1", build=windowed,
           bad=(NoWindowWithoutMask, NoWindowWithoutMask), good=(S, S)),
    *plant("sdpa", "window-off-by-one", "a key short", "layers.2", build=alternating,
           bad=(S, Everything, OneKeyShort, Everything), good=(S, Everything, S, Everything)),
    *plant("sdpa", "window-ignored", "the layers' order is lost", "layers.0", build=alternating,
           bad=(Everything, Everything), good=(S, Everything)),
    *plant("sdpa", "window-ignored", "the chunk before is seen, too", "layers.1", build=chunked,
           bad=(Chunked, PreviousChunkToo), good=(Chunked, Chunked)),
    *plant("multihead", "window-off-by-one", "the diagonal", "layers.0.attn", build=windowed,
           bad=(DiagonalOffByOne, H), good=(H, H)),
    *plant("multihead", "window-ignored", "a triangle alone", "layers.1.attn", build=windowed,
           bad=(H, TriangleAlone), good=(H, H)),
)  # fmt: skip
