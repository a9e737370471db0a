"""Rotary positions: turn each pair of features by an angle that grows with the position, so that scores see only i - j."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from intently._typing import Float, Shaped
from intently.mechanism.door import show

Layout = Literal["half", "interleaved"]


class Angles(NamedTuple):
    """Cosine and sine of every turn, `[*batch, length, width/2]`: column p turns pair p. No head axis."""

    cos: Float[Tensor, "*batch length pairs"]
    sin: Float[Tensor, "*batch length pairs"]


@runtime_checkable
class Scaling(Protocol):
    """How a context is stretched: what to turn by instead of `rotary_frequencies`; see `positions.scaling`."""

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin, so scores grow by its square."""
        ...

    def frequencies(self, width: int, base: float, positions: Tensor) -> Float[Tensor, "*batch pairs"]:
        """Radians per position of each pair, `[width/2]`, or `[*batch, width/2]` where they depend on the positions."""
        ...


@dataclass(frozen=True)
class Rotary:
    """Rotary positions as one object: `rotary(states, positions) -> states`.

    Args:
        width: features to rotate, the first ones of each head; even, at most the width of the head.
        base: the slowest pair turns by `base ** (2/width - 1)` per position (10 000 in the paper, 500 000 in Llama 3).
        scaling: how the context is stretched, one of `positions.scaling`; none when left out.
        layout: which features form a pair, as in `rotate`.

    >>> import torch
    >>> rotary = Rotary(2)
    >>> rotary(torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), torch.arange(2))[0, 1]    # cos(1), sin(1)
    tensor([0.5403, 0.8415])
    """

    width: int
    base: float = 10000.0
    scaling: Scaling | None = None
    layout: Layout = "half"

    def __post_init__(self) -> None:
        _check_width(self.width, self.base)
        _check_layout(self.layout)

    def __call__(
        self, states: Float[Tensor, "*batch heads length width"], positions: Shaped[Tensor, "*some length"]
    ) -> Float[Tensor, "*batch heads length width"]:
        """Rotate queries or keys `[*batch, heads, length, width]` that stand at `positions` `[*batch, length]`."""
        return rotate(states, self.angles(positions, dtype=states.dtype), layout=self.layout)

    def angles(self, positions: Shaped[Tensor, "*batch length"], *, dtype: torch.dtype = torch.float32) -> Angles:
        """The angles of these positions, to be computed once and shared by layers, queries and keys."""
        return rotary_angles(positions, self.width, base=self.base, scaling=self.scaling, dtype=dtype)


def rotate(
    states: Float[Tensor, "*batch heads length width"], angles: Angles, *, layout: Layout = "half"
) -> Float[Tensor, "*batch heads length width"]:
    """Turn every pair of features of every head by the angle of its position.

    `(a, b) -> (a cos - b sin, b cos + a sin)`, that is `(a + ib) * exp(i m θ_p)` for pair p at position m. Queries and
    keys are rotated, values are not; then `rotate(q, m) · rotate(k, n)` depends on m - n alone. (Times the square of
    the attention factor, where the scaling has one.)

    The two layouts hold the same pairs at other places, and mixing them up raises nothing:

    - `"half"` pairs feature p with p + width/2: GPT-NeoX, and Llama, Mistral, Qwen, Gemma, Phi as kept by Hugging Face.
    - `"interleaved"` pairs feature 2p with 2p + 1: the paper, GPT-J, GLM, Cohere, and Llama as published by Meta.

    Reordering the features of each head to 0, 2, 4, ..., 1, 3, 5, ... turns the second into the first and leaves every
    score as it is; `interleaved_to_half` does that to the rows of a projection.

    Args:
        states: queries or keys, `[*batch, heads, length, width]`.
        angles: from `rotary_angles`, `[*batch, length, pairs]`. With fewer pairs than width/2 the rotation is
            partial: the first `2 * pairs` features are turned, the rest are passed on as they are (GPT-J, GPT-NeoX,
            Phi, GLM).
        layout: which features form a pair.

    Returns:
        `[*batch, heads, length, width]` in the dtype of the states; half precision is turned in float32 and rounded once.

    Raises:
        TypeError, ValueError: states or angles that do not fit together.

    Symbols: states = q_m or k_n, position = m or n, pair p = i - 1, frequency = θ_i, width = d.

    Equals / differs: torch `scaled_dot_product_attention` and `nn.MultiheadAttention` know no positions: rotate before
    the call (the module cannot, its projections are inside). ONNX `RotaryEmbedding` (opset 23) is this function, its
    `interleaved` attribute the layout, its caches the angles by position. FlexAttention sees only scores: rotate before.

    Source: Su et al. 2021, RoFormer, arXiv 2104.09864, equations 14, 15 and 34 (there interleaved).

    Four tokens that say the same, (1, 0), in one head of width 2: token m is turned by m radians, so the score of i
    and j is cos(i - j), the same along every diagonal:

    >>> import torch
    >>> turned = rotate(torch.tensor([[[1.0, 0.0]] * 4]), rotary_angles(torch.arange(4), 2))
    >>> (turned @ turned.mT)[0]
    tensor([[ 1.0000,  0.5403, -0.4161, -0.9900],
            [ 0.5403,  1.0000,  0.5403, -0.4161],
            [-0.4161,  0.5403,  1.0000,  0.5403],
            [-0.9900, -0.4161,  0.5403,  1.0000]])
    """
    _check_layout(layout)
    pairs = _check_fit(states, angles)
    exact = torch.promote_types(states.dtype, torch.float32)
    cos, sin = (each.to(exact).unsqueeze(-3) for each in angles)
    turning, rest = states[..., : 2 * pairs].to(exact), states[..., 2 * pairs :]
    if layout == "half":
        first, second = turning[..., :pairs], turning[..., pairs:]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    turned = turned.to(states.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def rotary_angles(
    positions: Shaped[Tensor, "*batch length"],
    width: int,
    *,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> Angles:
    """Cosine and sine of `position * frequency` for each position and each of the width/2 pairs of features.

    Computed in float64 (float32 on devices without it) and given in `dtype`, or in float32 where that is narrower:
    bfloat16 knows no whole number between 256 and 258, so positions held in it would collide.

    Args:
        positions: `[*batch, length]`, whole numbers, or floats of at least 32 bits where positions lie between tokens.
        width: number of features to rotate, even; less than the width of a head for a partial rotation.
        base: the slowest pair turns by `base ** (2/width - 1)` radians per position.
        scaling: stretches the context, see `positions.scaling`; its attention factor is multiplied into both results.
        dtype: of the result; at least float32.

    Returns:
        `Angles(cos, sin)`, each `[*batch, length, width/2]`.

    Raises:
        TypeError: positions in half precision, or boolean (a padding mask is not a position).
        ValueError: width is odd or below 2; base is not above 1.

    Source: Su et al. 2021, RoFormer, arXiv 2104.09864, section 3.2.2.

    >>> import torch
    >>> rotary_angles(torch.arange(4), 2).sin.flatten()                      # sin 0, sin 1, sin 2, sin 3
    tensor([0.0000, 0.8415, 0.9093, 0.1411])
    """
    _check_width(width, base)
    check_positions("rotary_angles", positions)
    exact = widest(positions.device)
    if scaling is None:
        frequencies, factor = rotary_frequencies(width, base, device=positions.device), 1.0
    else:
        frequencies, factor = scaling.frequencies(width, base, positions), scaling.attention_factor
    turns = positions.to(exact).unsqueeze(-1) * frequencies.to(exact).unsqueeze(-2)
    dtype = torch.promote_types(dtype, torch.float32)
    return Angles((turns.cos() * factor).to(dtype), (turns.sin() * factor).to(dtype))


def rotary_frequencies(
    width: int, base: float = 10000.0, *, device: torch.device | str | None = None
) -> Float[Tensor, " pairs"]:
    """Radians per position of each pair, `base ** (-2p / width)` for p = 0, 1, ..., width/2 - 1; float64 where it exists.

    >>> rotary_frequencies(4).tolist()
    [1.0, 0.01]
    """
    _check_width(width, base)
    exact = widest(torch.device(device) if device is not None else torch.get_default_device())
    return 1.0 / base ** (torch.arange(0, width, 2, device=device, dtype=exact) / width)


def widest(device: torch.device) -> torch.dtype:
    """The precision in which angles are computed: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _check_width(width: int, base: float) -> None:
    if width < 2 or width % 2:
        raise ValueError(
            f"rotary: width is {width}; features turn in pairs, so an even number above 0 is needed. "
            "It is the number of rotated features of one head, not the width of the model"
        )
    if not base > 1:
        raise ValueError(f"rotary: base is {base}; a number above 1 is needed (10000 in the paper)")


def _check_layout(layout: str) -> None:
    if layout not in ("half", "interleaved"):
        raise ValueError(
            f'rotary: layout is {layout!r}; "half" (GPT-NeoX, Llama in Hugging Face) or "interleaved" (GPT-J, GLM) is needed'
        )


def check_positions(where: str, positions: Any) -> None:
    """Refuse what cannot tell one position from the next.

    Raises:
        TypeError, ValueError: no tensor, half precision, bool, or no axis.
    """
    if not isinstance(positions, Tensor):
        raise TypeError(f"{where}: positions are {type(positions).__name__}; a torch.Tensor is needed")
    if positions.dtype in (torch.bool, torch.float16, torch.bfloat16) or positions.is_complex():
        cause = (
            "A padding mask? Turn it into positions with positions_from_padding"
            if positions.dtype == torch.bool
            else "Half precision skips whole numbers (bfloat16 from 256 on, float16 from 2048 on), so tokens would collide"
        )
        raise TypeError(f"{where}: positions are {show(positions)}; integers or float32 at least are needed. {cause}")
    if positions.dim() < 1:
        raise ValueError(f"{where}: positions are {show(positions)}; [*batch, length] is needed")


def _check_fit(states: Any, angles: Angles) -> int:
    if not isinstance(states, Tensor) or not states.is_floating_point():
        what = show(states) if isinstance(states, Tensor) else type(states).__name__
        raise TypeError(f"rotate: states are {what}; a floating point tensor is needed")
    shapes = f"states {show(states)}, cos {show(angles.cos)}, sin {show(angles.sin)}"
    if angles.cos.shape != angles.sin.shape:
        raise ValueError(f"rotate: cos and sin differ in shape: {shapes}")
    if states.dim() < 3 or angles.cos.dim() < 2 or angles.cos.dim() >= states.dim():
        raise ValueError(
            f"rotate: {shapes}; states [*batch, heads, length, width] and angles [*batch, length, pairs] are needed. "
            "Angles carry no head axis, and states without one need .unsqueeze(-3)"
        )
    *lead, length, pairs = angles.cos.shape
    if 2 * pairs > states.shape[-1]:
        raise ValueError(
            f"rotate: {pairs} pairs are {2 * pairs} features, the states have {states.shape[-1]}: {shapes}. "
            "Cos and sin repeated for both members of a pair, as Hugging Face keeps them? Pass the first half of each"
        )
    if length not in (1, states.shape[-2]):
        raise ValueError(
            f"rotate: angles for {length} positions, states of length {states.shape[-2]}: {shapes}. "
            "Heads and length swapped, or positions of the whole cache for the new tokens only?"
        )
    for ours, theirs in zip(reversed(lead), reversed(states.shape[:-3]), strict=False):
        if ours not in (1, theirs):
            raise ValueError(f"rotate: batch axes {lead} of the angles do not fit {list(states.shape[:-3])}: {shapes}")
    return pairs
