"""Sinusoidal positions: a fixed vector for every position, added to the representations before the first layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from intently._typing import Float, Shaped
from intently.mechanism.positions.rotary import check_positions, widest

Order = Literal["interleaved", "concatenated"]


def sinusoidal(
    positions: Shaped[Tensor, "*batch length"],
    width: int,
    *,
    base: float = 10000.0,
    order: Order = "interleaved",
    inclusive: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*batch length width"]:
    """Sine and cosine of the position at width/2 frequencies.

    `PE(m, 2p) = sin(m θ_p)`, `PE(m, 2p + 1) = cos(m θ_p)`, `θ_p = base ** (-2p / width)`

    The vector of position m + k is that of m rotated by fixed angles, whatever m: a linear map can look k tokens back.
    Two choices differ between code bases and raise nothing when mixed up: where sines and cosines go, and whether the
    slowest frequency is `base ** (2/width - 1)` (the paper) or exactly `1 / base`.

    Args:
        positions: `[*batch, length]`, whole numbers or float32 at least; computed in float64 where it exists.
        width: of a representation, even.
        base: 10 000 in the paper.
        order: `"interleaved"`, sin cos sin cos (the paper), or `"concatenated"`, all sines, then all cosines (Marian,
            fairseq, Whisper, tensor2tensor).
        inclusive: frequencies from 1 to `1 / base` with both ends, `base ** (-p / (width/2 - 1))` (fairseq, Whisper,
            tensor2tensor).
        dtype: of the result.

    Returns:
        `[*batch, length, width]`.

    Raises:
        TypeError: positions in half precision, or boolean.
        ValueError: an odd width, or one too small; an unknown order.

    Symbols: positions = pos, p = i, width = d_model.

    Equals / differs: torch `scaled_dot_product_attention`, `nn.MultiheadAttention`, ONNX `Attention` and FlexAttention
    know nothing of it; it is part of what they are given. Unlike rotary positions it enters the values as well.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.5.

    Four tokens, one pair: sine and cosine of 0, 1, 2, 3.

    >>> import torch
    >>> sinusoidal(torch.arange(4), 2)
    tensor([[ 0.0000,  1.0000],
            [ 0.8415,  0.5403],
            [ 0.9093, -0.4161],
            [ 0.1411, -0.9900]])
    """
    check_positions("sinusoidal", positions)
    if width % 2 or width < (4 if inclusive else 2):
        raise ValueError(f"sinusoidal: width is {width}; sines and cosines come in pairs, so an even number is needed")
    if order not in ("interleaved", "concatenated"):
        raise ValueError(f'sinusoidal: order is {order!r}; "interleaved" or "concatenated" is needed')
    exact = widest(positions.device)
    steps = width // 2 - 1 if inclusive else width // 2
    frequencies = base ** -(torch.arange(width // 2, device=positions.device, dtype=exact) / steps)
    turns = positions.to(exact).unsqueeze(-1) * frequencies
    if order == "concatenated":
        return torch.cat([turns.sin(), turns.cos()], dim=-1).to(dtype)
    return torch.stack([turns.sin(), turns.cos()], dim=-1).flatten(-2).to(dtype)
