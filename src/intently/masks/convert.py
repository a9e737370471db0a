"""Masks to and from the conventions of other libraries. Each function names its convention; none guesses a polarity.

| convention          | true entry means | shape                                      |
|---------------------|------------------|--------------------------------------------|
| sdpa                | take part        | [query, key] or [batch, heads, query, key] |
| mha                 | hidden           | [query, key] or [batch·heads, query, key]  |
| mha key padding     | hidden           | [batch, key]                               |
| hf                  | keep (1)         | [batch, key]                               |
| additive            | 0 = seen         | as sdpa, floating                          |
| onnx                | take part, or additive | broadcasts to [batch, heads, query, key], keys may be short |
| mask_mod            | take part        | a function of four indices                 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from intently._typing import Bool, Float, Int
from intently.masks.expression import Place
from intently.masks.mask import Mask, _named

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Device = torch.device | str | None

_MATRIX = "[query, key], [batch, query, key] or [batch, heads, query, key]"


# ------------------------------------------------------------------------------------------------------------ sdpa


def to_sdpa(
    mask: Mask, queries: int, keys: int | None = None, *, offset: int = 0, device: Device = None
) -> Bool[Tensor, "*batch_heads query key"]:
    """`attn_mask` of `F.scaled_dot_product_attention`: bool, True = take part. The same tensor as `mask.matrix`.

    >>> to_sdpa(Mask.causal(), 2).tolist()
    [[True, False], [True, True]]
    """
    return mask.matrix(queries, keys, offset=offset, device=device)


def from_sdpa(
    attn_mask: Bool[Tensor, "*batch_heads query key"], *, queries: int | None = None, keys: int | None = None
) -> Mask:
    """Read a bool `attn_mask`, True = take part: [query, key], [batch, query, key] or [batch, heads, query, key].

    Axes of size 1 that stand for every query or key are widened to `queries` and `keys` where these are given.
    Raises TypeError on any dtype but bool; a float mask is additive (`from_additive`).
    """
    _expect_bool("attn_mask of scaled_dot_product_attention", attn_mask, "from_additive() reads float masks")
    _expect_rank("attn_mask", attn_mask, (2, 3, 4), _MATRIX)
    return Mask.explicit(_widen("attn_mask", attn_mask, queries, keys))


# ------------------------------------------------------------------------------------------- nn.MultiheadAttention


def to_mha(
    mask: Mask,
    queries: int,
    keys: int | None = None,
    *,
    heads: int | None = None,
    offset: int = 0,
    device: Device = None,
) -> Bool[Tensor, "*batchheads query key"]:
    """`attn_mask` of `nn.MultiheadAttention`: bool, True = hidden.

    [query, key]; or [batch·heads, query, key] where the mask distinguishes samples or heads, and then `heads`, the
    module's `num_heads`, is needed. The batch is the mask's own (1 where it distinguishes heads only).

    >>> to_mha(Mask.causal(), 2).tolist()
    [[False, True], [False, False]]
    """
    hidden = ~mask.matrix(queries, keys, offset=offset, device=device)
    if hidden.ndim == 2:
        return hidden
    if heads is None:
        raise ValueError(f"{mask} distinguishes samples or heads, which MultiheadAttention wants flat; pass heads=")
    if hidden.shape[1] not in (1, heads):
        raise ValueError(f"{mask} has {hidden.shape[1]} heads, but heads={heads}")
    return hidden.expand(-1, heads, -1, -1).flatten(0, 1)


def from_mha(attn_mask: Bool[Tensor, "*batchheads query key"], *, heads: int | None = None) -> Mask:
    """Read a bool `attn_mask` of `nn.MultiheadAttention`, True = hidden: [query, key] or [batch·heads, query, key]."""
    _expect_bool("attn_mask of MultiheadAttention", attn_mask, "from_additive() reads float masks")
    _expect_rank("attn_mask", attn_mask, (2, 3), "[query, key] or [batch·heads, query, key]")
    if attn_mask.ndim == 2:
        return Mask.explicit(~attn_mask)
    if heads is None or heads < 1 or attn_mask.shape[0] % heads:
        raise ValueError(f"attn_mask {_named(attn_mask)} is [batch·heads, query, key]; heads={heads} does not fit")
    return Mask.explicit(~attn_mask.unflatten(0, (-1, heads)))


def to_key_padding(
    mask: Mask, keys: int, *, queries: int | None = None, device: Device = None
) -> Bool[Tensor, "batch key"]:
    """`key_padding_mask` of `nn.MultiheadAttention` and `src_key_padding_mask` of `nn.Transformer`: True = hidden.

    >>> to_key_padding(Mask.padding([1, 2]), 2).tolist()
    [[False, True], [False, False]]
    """
    return ~_per_key(mask, keys, queries, device, "key_padding_mask")


def from_key_padding(key_padding_mask: Bool[Tensor, "batch key"]) -> Mask:
    """Read a bool[batch, key] `key_padding_mask`, True = hidden."""
    _expect_bool("key_padding_mask", key_padding_mask, "from_hf() reads 0/1 masks in which 1 = keep")
    _expect_rank("key_padding_mask", key_padding_mask, (2,), "[batch, key]")
    return Mask.padding(keep=~key_padding_mask)


# ------------------------------------------------------------------------------------------------------ transformers


def to_hf(
    mask: Mask, keys: int, *, queries: int | None = None, device: Device = None, dtype: torch.dtype = torch.long
) -> Int[Tensor, "batch key"]:
    """`attention_mask` of transformers' models: 1 = keep, 0 = pad, [batch, key] (batch 1 if no sample is special).

    Only a mask that says the same for every query and head can be written so (compared over `queries`, default
    `keys`, queries); ValueError otherwise. The causal part is not given: the model makes it itself.

    >>> to_hf(Mask.padding([1, 2]), 2).tolist()
    [[1, 0], [1, 1]]
    """
    return _per_key(mask, keys, queries, device, "attention_mask of transformers").to(dtype)


def from_hf(attention_mask: Int[Tensor, "batch key"]) -> Mask:
    """Read a 0/1 (or bool) [batch, key] `attention_mask`, 1 = keep."""
    if attention_mask.dtype.is_floating_point or attention_mask.dtype.is_complex:
        raise TypeError(
            f"attention_mask is int or bool [batch, key], not {_named(attention_mask)}; a float mask is usually"
            " additive (from_additive)"
        )
    _expect_rank("attention_mask", attention_mask, (2,), "[batch, key]; a 4-D mask is read by from_sdpa/from_additive")
    values = attention_mask.unique().tolist()
    if set(values) - {0, 1}:
        raise ValueError(
            f"attention_mask {_named(attention_mask)} holds {_listed(values)}, not just 0 and 1. Document numbers of a"
            " packed batch? Then Mask.documents(ids=...)"
        )
    return Mask.padding(keep=attention_mask.bool())


# ---------------------------------------------------------------------------------------------------------- additive


def lowest_score(dtype: torch.dtype, lowest: str = "min") -> float:
    """The number an additive mask puts where a key is hidden.

    - ``"min"``: `finfo(dtype).min`, as transformers. Plus a usual score it stays finite in float32, float64 and
      bfloat16 (the score is rounded away; in float16 a score of -16 or less already overflows to -inf). A row hidden
      throughout becomes uniform, not NaN. Two of them added give -inf, and such a row NaN.
    - ``"half"``: half of it. Two added are exactly `finfo.min`, still finite: safe where a causal and a padding mask
      are summed. In float16 room for scores is left only when one is added.
    - ``"inf"``: -inf. Exact, but a row hidden throughout is NaN after a plain softmax.

    >>> lowest_score(torch.float16), lowest_score(torch.float16, "half")
    (-65504.0, -32752.0)
    """
    if not dtype.is_floating_point:
        raise TypeError(f"an additive mask is floating, not {str(dtype).removeprefix('torch.')}")
    choices = {"min": torch.finfo(dtype).min, "half": torch.finfo(dtype).min / 2, "inf": float("-inf")}
    if lowest not in choices:
        raise ValueError(f"lowest is one of {', '.join(choices)}, not {lowest!r}")
    return choices[lowest]


def to_additive(
    mask: Mask,
    queries: int,
    keys: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    lowest: str = "min",
    offset: int = 0,
    device: Device = None,
) -> Float[Tensor, "*batch_heads query key"]:
    """A float mask to add to the scores before softmax: 0 = seen, `lowest_score(dtype, lowest)` = hidden.

    >>> to_additive(Mask.causal(), 2, lowest="inf").tolist()
    [[0.0, -inf], [0.0, 0.0]]
    """
    seen = mask.matrix(queries, keys, offset=offset, device=device)
    added = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return added.masked_fill_(~seen, lowest_score(dtype, lowest))


def from_additive(
    bias: Float[Tensor, "*batch_heads query key"],
    *,
    threshold: float | None = None,
    queries: int | None = None,
    keys: int | None = None,
) -> Mask:
    """Read a float mask that is added to the scores.

    Hidden is any value <= `threshold`. Left out, the threshold is half of `finfo(dtype).min` (which takes -inf, the
    minimum and its half) and every other value must be 0: ValueError else. Given, values above it count as seen
    whatever they are, so that a position bias may be part of the tensor. A mask of just 0 and 1 is always refused:
    added to scores it hides nothing, so it is a keep-or-hide mask in the wrong place.
    """
    if not bias.dtype.is_floating_point:
        raise TypeError(
            f"an additive mask is floating, not {_named(bias)}; bool masks are read by from_sdpa or from_mha"
        )
    _expect_rank(
        "the additive mask", bias, (2, 3, 4), "[query, key], [batch, query, key] or [batch, heads, query, key]"
    )
    return Mask.explicit(_widen("the additive mask", _seen_where(bias, threshold), queries, keys))


def _seen_where(bias: Tensor, threshold: float | None) -> Tensor:
    limit = torch.finfo(bias.dtype).min / 2 if threshold is None else threshold
    hidden = bias <= limit
    if bool((bias.isnan() | (bias == float("inf"))).any()):
        raise ValueError(f"the additive mask {_named(bias)} holds NaN or +inf")
    odd = bias[~hidden & (bias != 0)]
    if odd.numel() and bool((odd == 1).all()) and not bool(hidden.any()):
        raise ValueError(
            f"the additive mask {_named(bias)} holds only 0 and 1: added to scores it hides nothing. Likely a"
            " keep (1) or hide (1) mask turned to float; pass its bool form to from_sdpa or from_mha, whichever it is"
        )
    if threshold is None and odd.numel():
        least = odd.min().item()
        raise ValueError(
            f"the additive mask {_named(bias)} holds values between 0 and hidden (<= {limit:.4g}), such as {least:.6g}."
            " A weak fill (-10000, or another dtype's minimum)? Pass threshold= that value. A position bias in it?"
            " Pass a threshold below the bias"
        )
    return ~hidden


# -------------------------------------------------------------------------------------------------------------- onnx


def to_onnx(
    mask: Mask,
    queries: int,
    keys: int | None = None,
    *,
    dtype: torch.dtype = torch.bool,
    offset: int = 0,
    device: Device = None,
) -> Tensor:
    """`attn_mask` of the ONNX Attention operator (opset 23 and later): bool, True = take part, or float (0 and -inf).

    [query, key] or [batch, heads, query, key]; `keys` counts past and present keys (`total_sequence_length`).

    >>> to_onnx(Mask.causal(), 2, dtype=torch.float32).tolist()
    [[0.0, -inf], [0.0, 0.0]]
    """
    if dtype == torch.bool:
        return mask.matrix(queries, keys, offset=offset, device=device)
    return to_additive(mask, queries, keys, dtype=dtype, lowest="inf", offset=offset, device=device)


def from_onnx(attn_mask: Tensor, *, queries: int, keys: int, threshold: float | None = None) -> Mask:
    """Read `attn_mask` of the ONNX Attention operator: bool (True = take part) or additive float.

    Rank 1 to 4, broadcast to [batch, heads, query, key] from the right (rank 3 is [heads, query, key]). A last axis
    shorter than `keys` is padded with hidden, also one of size 1: it is short, not broadcast.
    `threshold` as in `from_additive`.

    >>> print(from_onnx(torch.tensor([True, False]), queries=1, keys=3))
    explicit([100])
    """
    _expect_rank("attn_mask", attn_mask, (1, 2, 3, 4), "one that broadcasts to [batch, heads, query, key]")
    if attn_mask.dtype == torch.bool:
        seen = attn_mask
    elif attn_mask.dtype.is_floating_point:
        seen = _seen_where(attn_mask, threshold)
    else:
        raise TypeError(f"attn_mask of ONNX Attention is bool or float, not {_named(attn_mask)}")
    if seen.shape[-1] > keys:
        raise ValueError(f"attn_mask {_named(attn_mask)} speaks of {seen.shape[-1]} keys, but there are {keys}")
    seen = torch.nn.functional.pad(seen, (0, keys - seen.shape[-1]), value=False)
    if seen.ndim == 1:
        seen = seen[None]
    if seen.ndim == 3:
        seen = seen[None]
    return Mask.explicit(_widen("attn_mask", seen, queries, keys))


# ----------------------------------------------------------------------------------------------------- FlexAttention


def to_mask_mod(
    mask: Mask, queries: int | None = None, keys: int | None = None, *, offset: int = 0, device: Device = None
) -> MaskMod:
    """A FlexAttention `mask_mod(batch, head, query, key)` of index tensors, True = take part.

    Works under `torch.vmap`, `create_mask` and `create_block_mask`. The sizes are needed where the mask depends on
    them (bottom-right, left padding); `device` where it carries tables (documents, padding, explicit) and does not run
    on the CPU.

    >>> from torch.nn.attention.flex_attention import create_mask
    >>> create_mask(to_mask_mod(Mask.causal()), 1, 1, 2, 2, device="cpu")[0, 0].tolist()
    [[True, False], [True, True]]
    """
    expression = mask.expression if device is None else mask.expression.to(device)
    if queries is not None and keys is not None:
        expression.require(offset, offset + queries, keys)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return expression.at(Place(batch, head, query + offset if offset else query, key, queries, keys, offset))

    return mask_mod


def from_mask_mod(
    mask_mod: MaskMod,
    queries: int,
    keys: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: Device = "cpu",
) -> Mask:
    """Read a FlexAttention `mask_mod` by asking it everywhere: [query, key], or all four axes where a count is given.

    >>> print(from_mask_mod(lambda batch, head, query, key: query >= key, 2))
    explicit([10, 11])
    """
    from torch.nn.attention.flex_attention import create_mask

    keys = queries if keys is None else keys
    seen: Any = create_mask(mask_mod, batch or 1, heads or 1, queries, keys, device=device or "cpu")
    if seen.dtype != torch.bool:
        raise TypeError(f"a mask_mod returns bool, not {_named(seen)}; a score_mod is no mask")
    return Mask.explicit(seen[0, 0] if batch is None and heads is None else seen)


# ----------------------------------------------------------------------------------------------------------- helpers


def _per_key(mask: Mask, keys: int, queries: int | None, device: Device, name: str) -> Tensor:
    seen = mask.matrix(keys if queries is None else queries, keys, device=device)
    seen = seen[None, None] if seen.ndim == 2 else seen
    kept = seen[:, :1, :1]
    if not torch.equal(kept.expand_as(seen), seen):
        raise ValueError(
            f"{name} is [batch, key] and says the same for every query and head, which {mask} does not over"
            f" {seen.shape[2]} queries. Give its padding part alone, Mask.padding(...); the model makes the rest"
        )
    return kept[:, 0, 0] if seen.shape[2] else seen.new_ones(seen.shape[0], keys)


def _expect_bool(name: str, tensor: Tensor, elsewhere: str) -> None:
    if tensor.dtype != torch.bool:
        raise TypeError(f"{name} is read as bool, not {_named(tensor)}; {elsewhere}")


def _expect_rank(name: str, tensor: Tensor, ranks: tuple[int, ...], shape: str) -> None:
    if tensor.ndim not in ranks:
        raise ValueError(f"{name} is {shape}, not {_named(tensor)}")


def _widen(name: str, seen: Tensor, queries: int | None, keys: int | None) -> Tensor:
    wanted = (queries or seen.shape[-2], keys or seen.shape[-1])
    for axis, have, want in zip(("queries", "keys"), seen.shape[-2:], wanted, strict=True):
        if have not in (1, want):
            raise ValueError(f"{name} {_named(seen)} speaks of {have} {axis}, but there are {want}")
    return seen.expand(*seen.shape[:-2], *wanted)


def _listed(values: list[Any]) -> str:
    return ", ".join(map(str, values[:6])) + (", …" if len(values) > 6 else "")
