"""Routing as a layer: what a model fixes once about who sees whom, without any projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from intently._typing import Bool, Float
from intently.masks import Mask
from intently.mechanism.attention import attention, stages
from intently.mechanism.backends.stages import Stages
from intently.mechanism.door import Bias
from intently.mechanism.options import Backend

CAUSAL = Mask.causal()


class Attend(nn.Module):
    """The five stages after the projection, holding what a layer fixes once; every call may add a mask and a bias.

    Masks of the kind `Mask` and biases that are functions speak of the *whole sequence*. A call that brings only part
    of it (a step that continues a cache) says where its part begins, and the layer cuts its piece out, so one mask
    serves training, prefill and steps alike. Tensors speak of the queries and keys that are given.

    Args:
        mask: who may see whom in this layer; a mask given to the call hides further pairs (the two are joined by &).
        bias: function of positions added to the logits (`alibi(heads)`, a `RelativeBias`), added to that of the call.
        scale: factor on q·k; `1 / sqrt(width)` when left out.
        softcap: c squeezes the scaled scores into (-c, c).
        sink: a logit that joins the denominator: a number, a tensor `[heads]`, or a learned `nn.Parameter` of that shape.
        dropout: probability of dropping a weight, in training mode only.
        backend: as in `attention`.

    Source: Vaswani et al. 2017, section 3.2.1.

    >>> import torch
    >>> attend = Attend(mask=Mask.causal())
    >>> scores_alike, value = torch.zeros(1, 1, 4, 2), torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 1, 4, 1)
    >>> attend(scores_alike, scores_alike, value).flatten()                  # means of ever more values
    tensor([  1.0000,   5.5000,  37.0000, 277.7500])
    >>> step = scores_alike[:, :, 3:]                                        # the last query alone, as with a cache
    >>> attend(step, scores_alike, value, query_start=3).flatten()
    tensor([277.7500])
    """

    def __init__(
        self,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | float | None = None,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ):
        super().__init__()
        self.mask = mask
        self.bias = bias
        self.scale = scale
        self.softcap = softcap
        self.dropout = dropout
        self.backend: Backend = backend
        if isinstance(sink, Tensor) and not isinstance(sink, nn.Parameter):
            self.register_buffer("sink", sink)
        else:
            self.sink = sink

    def forward(
        self,
        query: Float[Tensor, "*batch heads query width"],
        key: Float[Tensor, "*batch kv_heads key width"],
        value: Float[Tensor, "*batch kv_heads key value_width"],
        *,
        mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
        bias: Bias | Float[Tensor, "*bias_axes"] | None = None,
        query_start: int = 0,
        key_start: int = 0,
    ) -> Float[Tensor, "*batch heads query value_width"]:
        """Route the values to the queries.

        Args:
            query: `[*batch, heads, query, width]`; a head axis is always there, a batch axis need not be.
            key: `[*batch, kv_heads, key, width]`.
            value: `[*batch, kv_heads, key, value_width]`.
            mask: a `Mask` of the whole sequence, or bool that broadcasts to `[*batch, heads, query, key]`.
            bias: a function of positions in the whole sequence, or float that broadcasts likewise.
            query_start: position of the first query in the whole sequence.
            key_start: position of the first key; above 0 when a cache has dropped earlier keys.

        Raises:
            TypeError, ValueError: those of `attention`; a mask that shows a key which is no longer there.
        """
        arguments = self._arguments(query, key, value, mask, bias, query_start, key_start)
        dropout = self.dropout if self.training else 0.0
        return attention(*arguments.pop("tensors"), **arguments, dropout=dropout, backend=self.backend).reshape(
            *query.shape[:-1], value.shape[-1]
        )

    def stages(
        self,
        query: Float[Tensor, "*batch heads query width"],
        key: Float[Tensor, "*batch kv_heads key width"],
        value: Float[Tensor, "*batch kv_heads key value_width"],
        *,
        mask: Mask | Bool[Tensor, "*mask_axes"] | None = None,
        bias: Bias | Float[Tensor, "*bias_axes"] | None = None,
        query_start: int = 0,
        key_start: int = 0,
    ) -> Stages:
        """Scores, logits, weights and output for the arguments of a call, dropout left out.

        >>> import torch
        >>> states = torch.zeros(1, 1, 2, 4)
        >>> Attend(mask=Mask.causal()).stages(states, states, states).weights
        tensor([[[[1.0000, 0.0000],
                  [0.5000, 0.5000]]]])
        """
        arguments = self._arguments(query, key, value, mask, bias, query_start, key_start)
        seen = stages(*arguments.pop("tensors"), **arguments)
        return Stages(*(each.reshape(*query.shape[:-1], each.shape[-1]) for each in seen))

    def _arguments(self, query, key, value, mask, bias, query_start: int, key_start: int) -> dict[str, Any]:
        tensors = query, key, value
        if query.dim() == key.dim() == value.dim() == 3:  # three axes mean a batch to `attention`; here they are heads
            tensors = tuple(each.unsqueeze(0) for each in tensors)
        queries, keys = range(query_start, query_start + query.shape[-2]), range(key_start, key_start + key.shape[-2])
        return {
            "tensors": tensors,
            "mask": _joined_masks(self.mask, mask, queries, keys, query.device),
            "bias": _joined_biases(self.bias, bias, queries, keys, query.device),
            "scale": self.scale,
            "softcap": self.softcap,
            "sink": self.sink,
        }

    def extra_repr(self) -> str:
        said = {"mask": self.mask, "scale": self.scale, "softcap": self.softcap, "dropout": self.dropout or None}
        return ", ".join(f"{name}={what}" for name, what in said.items() if what is not None)


def _joined_masks(
    own: Mask | None, given: Mask | Tensor | None, queries: range, keys: range, device: torch.device
) -> Mask | Tensor | None:
    """Both masks as one; a `Mask` stays one as long as the call brings the whole sequence, for kernels know some by name."""
    if isinstance(given, Mask):
        whole = given if own is None or own == given else own & given
    else:
        whole = own
    if whole is None:
        if given is None and keys.start:
            raise ValueError(f"Attend: keys 0 to {keys.start - 1} are not here, yet no mask hides them. {_ADVICE}")
        return given
    if queries.start == keys.start == 0:
        cut: Mask | Tensor | None = whole
    else:
        cut = _cut(whole, queries, keys, device)
    if not isinstance(given, Tensor):
        return cut
    if isinstance(cut, Mask):
        cut = cut.matrix(len(queries), len(keys), device=device)
    return given if cut is None else cut & given


def _cut(whole: Mask, queries: range, keys: range, device: torch.device) -> Tensor | None:
    if whole == CAUSAL and keys.start == 0 and queries.start + 1 >= keys.stop:
        return None  # the newest query sees all that is there, and kernels are fastest without a mask
    _check_what_is_gone(whole, queries, keys)
    return whole.tile(queries, keys, queries.stop, keys.stop, device)


def _check_what_is_gone(whole: Mask, queries: range, keys: range) -> None:
    reach = whole.reach(queries, queries.stop, keys.stop) if keys.start else range(0)
    if not reach or reach.start >= keys.start:
        return
    # The reach is a bound: only a mask that it does not clear is looked at pair by pair.
    gone = whole.tile(queries, range(keys.start), queries.stop, keys.stop)
    if gone.any():
        row, column = gone.nonzero()[0, -2:].tolist()
        raise ValueError(
            f"Attend: the mask {whole} lets query {queries.start + row} see key {column}, but keys 0 to "
            f"{keys.start - 1} are not here. {_ADVICE}"
        )


_ADVICE = (
    "A cache that keeps the last w keys needs a mask that looks no further back: Mask.causal() & Mask.window(w); "
    "for a mask that does, keep all keys"
)


def _joined_biases(
    own: Bias | None, given: Bias | Tensor | None, queries: range, keys: range, device: torch.device
) -> Bias | Tensor | None:
    """Both biases as one; a rule stays one, for backends that ask it piece by piece, unless a tensor joins it."""
    if own is None and (given is None or isinstance(given, Tensor)):
        return given
    rules = [each for each in (own, given) if each is not None and not isinstance(each, Tensor)]

    def rule(query: Tensor, key: Tensor) -> Tensor:
        first, *others = [each(query + queries.start, key + keys.start) for each in rules]
        return sum(others, first)

    if not isinstance(given, Tensor):
        return rule
    query, key = torch.arange(len(queries), device=device), torch.arange(len(keys), device=device)
    return rule(query[:, None], key) + given
