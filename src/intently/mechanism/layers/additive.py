"""Additive attention as a layer: the soft search of a recurrent translator, with its three learned weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from intently._typing import Bool, Float
from intently.masks import Mask
from intently.mechanism.attention import stages
from intently.mechanism.backends.stages import Stages
from intently.mechanism.forms.additive import additive_attention


class AdditiveAttention(nn.Module):
    """Each receiving state receives the mean of the source states, weighted by a network with one hidden layer.

    `score = weight · tanh(query(receiving) + key(source))`, one head, no scale; the source states are the values.

    Args:
        model: width of the receiving states.
        hidden: width of the network's hidden layer.
        source_model: width of the source states; `model` when left out.

    Source: Bahdanau, Cho, Bengio 2014, arXiv 1409.0473, appendix A.1.2.

    >>> import torch
    >>> layer = AdditiveAttention(8, hidden=6, source_model=10)
    >>> layer(receiving=torch.randn(2, 1, 8), source=torch.randn(2, 5, 10)).shape
    torch.Size([2, 1, 10])
    """

    def __init__(self, model: int, hidden: int, *, source_model: int | None = None):
        super().__init__()
        self.query = nn.Linear(model, hidden, bias=False)
        self.key = nn.Linear(model if source_model is None else source_model, hidden, bias=False)
        self.weight = nn.Parameter(torch.empty(hidden).uniform_(-1, 1) / hidden**0.5)

    def forward(
        self,
        *,
        receiving: Float[Tensor, "batch query model"],
        source: Float[Tensor, "batch key source_model"],
        mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
    ) -> Float[Tensor, "batch query source_model"]:
        """Search the source for each receiving state.

        Args:
            receiving: `[batch, query, model]`; in a recurrent decoder one state at a time.
            source: `[batch, key, source_model]`.
            mask: which source states may be seen, a `Mask` or bool that broadcasts to `[batch, query, key]`.

        Raises:
            ValueError: weights and states that do not fit, as in `additive_attention`.
        """
        return additive_attention(receiving, source, source, mask=mask, **self._weights())

    def stages(
        self,
        *,
        receiving: Float[Tensor, "batch query model"],
        source: Float[Tensor, "batch key source_model"],
        mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
    ) -> Stages:
        """Scores, logits, weights and output for the arguments of a call.

        >>> import torch
        >>> layer, states = AdditiveAttention(8, hidden=6), torch.randn(2, 5, 8)
        >>> layer.stages(receiving=states[:, :1], source=states).weights.sum(dim=-1).shape
        torch.Size([2, 1])
        """
        hidden = torch.tanh(self.query(receiving).unsqueeze(-2) + self.key(source).unsqueeze(-3))
        scores = hidden @ self.weight
        # As in the form: a dot product of zeros whose bias is the score.
        nothing = receiving.new_zeros(*receiving.shape[:-1], 1), source.new_zeros(*source.shape[:-1], 1)
        return stages(*nothing, source, mask=mask, bias=scores, scale=1.0)._replace(scores=scores)

    def _weights(self) -> dict[str, Any]:
        return {"query_weight": self.query.weight, "key_weight": self.key.weight, "score_weight": self.weight}
