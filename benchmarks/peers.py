"""Other packages' windowed attention, each made to compute the same on the same query, key and value."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import metadata

from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

MISSING = "not installed; pip install 'intently[bench]'"


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def local_attention(back: int) -> Attend:
    """`local_attention.LocalAttention`: each query sees its own key and `back` before it. Raises ImportError."""
    from local_attention import LocalAttention

    return LocalAttention(
        window_size=back, causal=True, look_backward=1, exact_windowsize=True, use_rotary_pos_emb=False, autopad=True
    )


def x_transformers(mask: Tensor) -> Attend:
    """`x_transformers.attend.Attend` on torch's kernel. Its window (`max_attend_past`) is a dense mask. Raises ImportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it scripts a function when imported
        from x_transformers.attend import Attend as Core

    core = Core(flash=True)
    return lambda query, key, value: core(query, key, value, mask=mask[None, None])[0]
