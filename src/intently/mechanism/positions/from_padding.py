"""Positions of what is real: counted past the pads, past a cache, and anew in every packed document."""

from __future__ import annotations

import torch
from torch import Tensor

from intently._typing import Int, Shaped
from intently.mechanism.door import show


def positions_from_padding(
    keep: Shaped[Tensor, "*batch length"], *, pad: int = 0, cached: int = 0
) -> Int[Tensor, "*batch new"]:
    """Where each token stands in its own text: the first real token of a row is 0, wherever the pads are.

    `position = (number of real tokens up to and including this one) - 1` where kept, `pad` elsewhere

    Counting columns instead is right for pads on the right alone; with pads on the left every token of a short text is
    shifted by their number, which learned and sinusoidal positions notice and rotary, ALiBi and T5's bias do not.

    Args:
        keep: `[*batch, length]`, True where a token is real; a 0/1 mask of integers is taken too. With a cache it
            covers cached and new tokens, since rows of different length continue at different positions.
        pad: what pads get. Hugging Face's `(mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)` is `pad=1`. Nothing real
            may see a pad, so the number matters only to tables that must have such a row.
        cached: columns already in the cache; positions are given for those after it.

    Returns:
        int64 `[*batch, length - cached]`.

    Raises:
        TypeError: a float mask; 0 and minus infinity mean the opposite of 1 and 0.
        ValueError: no axis, or `cached` beyond the columns.

    Source: Hugging Face Transformers, `prepare_inputs_for_generation` (positions of padded prompts).

    Four columns, with pads on the left, on the right and on both sides:

    >>> import torch
    >>> keep = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]]).bool()
    >>> positions_from_padding(keep).tolist()
    [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]]
    >>> positions_from_padding(keep[:2], cached=3, pad=1).tolist()          # one new token per row
    [[1], [1]]
    """
    _check_ids("positions_from_padding", "keep", keep, "Pass True where a token is real")
    if not 0 <= cached <= keep.shape[-1]:
        raise ValueError(
            f"positions_from_padding: cached is {cached}, keep is {show(keep)}; with a cache, keep covers the cached "
            f"columns and the new ones, so 0 to {keep.shape[-1]} is possible"
        )
    keep = keep.bool()
    return torch.where(keep, keep.cumsum(dim=-1) - 1, pad)[..., cached:]


def positions_from_documents(documents: Int[Tensor, "*batch length"]) -> Int[Tensor, "*batch length"]:
    """Where each token stands in its own document, when several are packed into one row: every document starts at 0.

    Args:
        documents: `[*batch, length]`, an integer per token that names its document. Documents need not be contiguous.

    Returns:
        int64 `[*batch, length]`: how many earlier tokens of the row belong to the same document.

    Raises:
        TypeError: ids that are no integers.

    Source: Hugging Face Transformers, `DataCollatorWithFlattening` (positions that start anew at each document).

    >>> import torch
    >>> positions_from_documents(torch.tensor([7, 7, 7, 9])).tolist()
    [0, 1, 2, 0]
    """
    _check_ids("positions_from_documents", "documents", documents, "Pass an integer per token that names its document")
    order = documents.argsort(dim=-1, stable=True)  # tokens of a document side by side, in the order they had
    grouped = documents.gather(-1, order)
    index = torch.arange(documents.shape[-1], device=documents.device).expand_as(grouped)
    begins = torch.ones_like(grouped, dtype=torch.bool)
    begins[..., 1:] = grouped[..., 1:] != grouped[..., :-1]
    start = torch.where(begins, index, 0).cummax(dim=-1).values if index.numel() else index
    return torch.zeros_like(index).scatter(-1, order, index - start)


def _check_ids(where: str, name: str, ids: Tensor, remedy: str) -> None:
    if ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"{where}: {name} is {show(ids)}; bool or integers are needed. {remedy}")
    if ids.dim() < 1:
        raise ValueError(f"{where}: {name} is {show(ids)}; [*batch, length] is needed")
