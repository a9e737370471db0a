"""Local attention: on a line, each query sees the keys nearby."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from intently._typing import Float
from intently.masks import Mask
from intently.mechanism.attention import attention
from intently.mechanism.options import Backend, LocalOptions


def local_attention(
    query: Float[Tensor, "*lead query width"],
    key: Float[Tensor, "*kv_lead key width"],
    value: Float[Tensor, "*kv_lead key value_width"],
    *,
    left: int,
    right: int,
    mask: Mask | None = None,
    backend: Backend = "blocked",
    **options: Unpack[LocalOptions],
) -> Float[Tensor, "*lead query value_width"]:
    """A sliding window: each query sees the `left` keys before its position, the one at it, and `right` after it.

        output_i = Σ_j softmax_j( q_i · k_j / √width ) v_j,   i - left ≤ j ≤ i + right

    `left=w - 1, right=0` is the causal window of w keys (Mistral's `sliding_window=w`); `left=right=w // 2` is Longformer's
    and ModernBERT's.

    Args:
        query: `[*batch, heads, query, width]`; with fewer than 4 axes `[*batch, query, width]`, a single head.
        key, value: `[*batch, kv_heads, key, width]`; query i and key i stand at the same position.
        left, right: how many keys on each side, besides the own.
        mask: hides further pairs: documents, padding.
        backend: `"blocked"` visits only the keys in reach; others build the whole matrix.
        options: `bias` (a function of positions costs no matrix), `scale`, `softcap`, `sink`, `dropout`, as in `attention`.

    Returns:
        `[*batch, heads, query, value_width]`. Time and memory grow with length · (left + 1 + right).

    Raises:
        TypeError, ValueError: a radius that is no whole number from 0 on, or arguments as in `attention`.

    Symbols: Longformer's w is `left + right`; Mistral's W is `left + 1`.

    Equals / differs:
        torch `scaled_dot_product_attention`: equal with `Mask.window(left, right)` as mask, at length² cost.
        `nn.MultiheadAttention`: its core with the inverse of that mask (True = hidden there).
        ONNX `Attention`: equal with that mask as `attn_mask`.
        FlexAttention: equal with a `mask_mod`, which skips blocks outside of the window too.
        flash-attention: its `window_size=(left, right)`; where lengths differ it is aligned bottom-right, this top-left.

    Source: Beltagy et al. 2020, *Longformer*, arXiv 2004.05150, section 3.1 (sliding window); Jiang et al. 2023, *Mistral
    7B*, arXiv 2310.06825, section 2.

    Four tokens, one key to the left, every score 0: the means of what is seen.

    >>> import torch
    >>> nothing, value = torch.zeros(4, 1), torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    >>> local_attention(nothing, nothing, value, left=1, right=0).flatten()
    tensor([  1.0000,   5.5000,  55.0000, 550.0000])
    """
    window = Mask.window(left, right)
    seen = window if mask is None else window & mask
    return attention(query, key, value, mask=seen, backend=backend, **options)
