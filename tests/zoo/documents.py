"""Packed rows and routed masks: documents told by numbers or by positions, key masks shaped by hand, in all four styles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.case import plant
from torch import Tensor, nn

from intently import Intent, Mask, Target

WIDTH, HEADS, VOCABULARY = 24, 3, 23


class Einsum(nn.Module):
    """Causal attention within documents, which are told by a number for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def apart(self, document_ids: Tensor) -> Tensor:
        return document_ids[:, :, None] == document_ids[:, None, :]

    def forward(self, x: Tensor, document_ids: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None]
        if document_ids is not None:
            seen = seen & self.apart(document_ids)
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


class SeesEarlierDocuments(Einsum):
    def apart(self, document_ids: Tensor) -> Tensor:
        return document_ids[:, :, None] >= document_ids[:, None, :]


class Numbered(nn.Module):
    def __init__(self, *attentions: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.layers, self.head = nn.ModuleList(a() for a in attentions), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(self.norm(x), document_ids)
        return self.head(x)


class Fused(nn.Module):
    """Causal attention over keys that `seen` shows."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def seen(self, seen: Tensor, keep: Tensor | None) -> Tensor:
        return seen if keep is None else seen & keep[:, None, None, :]

    def forward(self, x: Tensor, seen: Tensor, keep: Tensor | None) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen(seen, keep))
        return self.o(y.transpose(1, 2).flatten(2))


class MaskReplacesDocuments(Fused):
    def seen(self, seen: Tensor, keep: Tensor | None) -> Tensor:
        triangle = torch.ones(seen.shape[-2:], dtype=torch.bool).tril()
        return seen if keep is None else triangle & keep[:, None, None, :]


class Restarting(nn.Module):
    """Documents begin where positions do."""

    def __init__(self, *attentions: type[Fused]) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.layers, self.head = nn.ModuleList(a() for a in attentions), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None):
        length = input_ids.shape[1]
        places = torch.arange(length)[None] if position_ids is None else position_ids
        number = (places == 0).cumsum(-1)
        seen = (number[:, :, None] == number[:, None, :])[:, None] & torch.ones(length, length, dtype=torch.bool).tril()
        x = self.embed(input_ids) + self.place(places)
        for layer in self.layers:
            x = x + layer(x, seen, None if attention_mask is None else attention_mask.bool())
        return self.head(x)


class Multihead(nn.Module):
    """nn.MultiheadAttention told which pairs to hide by a mask for each sample and head."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def for_heads(self, hidden: Tensor) -> Tensor:
        return hidden.repeat_interleave(HEADS, 0)

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        mask = None if hidden is None else self.for_heads(hidden)
        return self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]


class RepeatsTheBatch(Multihead):
    def for_heads(self, hidden: Tensor) -> Tensor:
        return hidden.repeat(HEADS, 1, 1)


class HidesNothing(Multihead):
    def for_heads(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(super().for_heads(hidden))


class Padded(nn.Module):
    """An encoder whose layers take pairs to hide."""

    def __init__(self, *attentions: type[Multihead]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(7, WIDTH), nn.ModuleList(a() for a in attentions)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        hidden = None if padding_mask is None else padding_mask[:, None, :].expand(-1, x.shape[1], -1)
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x, hidden)
        return x


class Segmented(Padded):
    """The same for packed rows."""

    def forward(self, x: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        hidden = None if segment_ids is None else segment_ids[:, :, None] != segment_ids[:, None, :]
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x, hidden)
        return x


class Matmul(nn.Module):
    """Two-way attention by hand; `keep` is True at real positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~keep[:, None, None, :], -1e9)

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        weights = (scores if keep is None else self.hide(scores, keep)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class HidesRows(Matmul):
    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(~keep[:, None, :, None], -1e9)


class HidesOneTooLate(Matmul):
    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        return super().hide(scores, F.pad(keep, (1, 0), value=True)[:, :-1])


class OtherSamples(Matmul):
    def hide(self, scores: Tensor, keep: Tensor) -> Tensor:
        return super().hide(scores, keep.flip(0))


class Encoder(nn.Module):
    def __init__(self, *attentions: type[Matmul]) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(a() for a in attentions)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids) + self.place.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = x + layer(x, None if attention_mask is None else attention_mask.bool())
        return x


class AlongSamples(nn.Module):
    """Fused two-way attention with a mask of its own shape."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def shaped(self, keep: Tensor) -> Tensor:
        return keep[:, None, None, :]

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = None if keep is None else self.shaped(keep)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class AlongHeads(AlongSamples):
    """Fits where there are as many samples as heads, or one sample."""

    def shaped(self, keep: Tensor) -> Tensor:
        return keep[:, None, :] if len(keep) in (1, HEADS) else super().shaped(keep)


class StrictlyBefore(Fused):
    """Hides the diagonal too, so that the first query sees nothing."""

    def seen(self, seen: Tensor, keep: Tensor | None) -> Tensor:
        before = ~torch.eye(seen.shape[-1], dtype=torch.bool)
        before[0, 0] = True
        return super().seen(seen & before, keep)


def fits(*attentions: type[AlongSamples]) -> Target:
    torch.manual_seed(26)
    return Target(Encoder(*attentions).eval(), Intent(Mask.full()))  # type: ignore[arg-type]


def numbered(*attentions: type[Einsum]) -> Target:
    torch.manual_seed(21)
    return Target(Numbered(*attentions).eval(), Intent(Mask.causal()))


def restarting(*attentions: type[Fused]) -> Target:
    torch.manual_seed(22)
    return Target(Restarting(*attentions).eval(), Intent(Mask.causal() & Mask.documents(4, 6)))


def segmented(*attentions: type[Multihead]) -> Target:
    torch.manual_seed(23)
    return Target(Segmented(*attentions).eval(), Intent(Mask.full()), features=7)


def padded(*attentions: type[Multihead]) -> Target:
    torch.manual_seed(24)
    return Target(Padded(*attentions).eval(), Intent(Mask.full()), features=7)


def encoder(*attentions: type[Matmul]) -> Target:
    torch.manual_seed(25)
    return Target(Encoder(*attentions).eval(), Intent(Mask.full()))


ONE, TORCH = ("layers.1",), ("layers.1.attn",)

CASES = (
    *plant(
        "einsum", "documents-leak", "compares by order", *ONE,
        build=numbered, bad=(Einsum, SeesEarlierDocuments), good=(Einsum, Einsum),
    ),
    *plant(
        "sdpa", "documents-leak", "a mask replaces the documents", *ONE,
        build=restarting, bad=(Fused, MaskReplacesDocuments), good=(Fused, Fused),
    ),
    *plant(
        "multihead", "documents-leak", "nothing is hidden", *TORCH,
        build=segmented, bad=(Multihead, HidesNothing), good=(Multihead, Multihead),
    ),
    *plant(
        "sdpa", "causal-extra", "the diagonal is hidden", *ONE,
        build=restarting, bad=(Fused, StrictlyBefore), good=(Fused, Fused),
    ),
    *plant(
        "multihead", "mask-misrouted", "the batch is repeated", *TORCH,
        build=padded, bad=(Multihead, RepeatsTheBatch), good=(Multihead, Multihead),
    ),
    *plant(
        "matmul", "mask-misrouted", "rows in place of keys", "layers.0",
        build=encoder, bad=(HidesRows, Matmul), good=(Matmul, Matmul),
    ),
    *plant(
        "matmul", "mask-misrouted", "a position too late", *ONE,
        build=encoder, bad=(Matmul, HidesOneTooLate), good=(Matmul, Matmul),
    ),
    *plant(
        "matmul", "mask-misrouted", "the samples turned round", *ONE,
        build=encoder, bad=(Matmul, OtherSamples), good=(Matmul, Matmul),
    ),
    *plant(
        "sdpa", "mask-misrouted", "samples along the heads", *ONE,
        build=fits, bad=(AlongSamples, AlongHeads), good=(AlongSamples, AlongSamples),
    ),
)  # fmt: skip
