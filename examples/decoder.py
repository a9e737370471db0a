"""A decoder block written by hand, with one fault planted; `mended` has it mended. Checked in docs/quickstart.md."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention. `attention_mask` is 1 at real tokens and 0 at pads, as tokenizers give it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.hidden(length, attention_mask), -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))

    def hidden(self, length: int, attention_mask: Tensor | None) -> Tensor:
        """True where a query must not look. Whoever gives a mask has said it all, says this line: the fault."""
        if attention_mask is not None:
            return (attention_mask == 0)[:, None, None, :]
        return torch.ones(length, length, dtype=torch.bool).triu(1)


class Mended(Attention):
    """The same, but for the triangle: it hides later keys also when a mask is given."""

    def hidden(self, length: int, attention_mask: Tensor | None) -> Tensor:
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        return later if attention_mask is None else later | (attention_mask == 0)[:, None, None, :]


class Decoder(nn.Module):
    """Token ids in, one logit a word of the vocabulary out."""

    def __init__(self, attention: type[Attention], vocab: int = 50, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(64, width)
        self.attention = attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        if attention_mask is not None:  # counted from the first real token, wherever the pads lie
            places = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        x = self.tokens(input_ids) + self.places(places)
        return self.head(x + self.attention(self.norm(x), attention_mask))


def build() -> nn.Module:
    """The one with the fault."""
    torch.manual_seed(0)
    return Decoder(Attention)


def mended() -> nn.Module:
    """The one without."""
    torch.manual_seed(0)
    return Decoder(Mended)
