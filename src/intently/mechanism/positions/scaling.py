"""Context scaling: slow the rotations down, some or all, so that a model reads further than it was trained to.

Each scaling is a small frozen object given as `scaling=` to `Rotary` or `rotary_angles`. With θ_p = base ** (-2p / width):

| object | turns pair p by | changes every token's angle |
|---|---|---|
| `Linear` | θ_p / factor | yes |
| `NTKAware` | θ_p with a larger base: the fastest pair as it was, the slowest divided by factor | yes |
| `DynamicNTK` | the same, with a base that grows with the length of the sequence | only beyond the trained length |
| `YaRN` | θ_p for fast pairs, θ_p / factor for slow ones, a ramp between; sharper scores | yes |
| `Llama3` | as YaRN, the ramp over wavelengths, no sharpening | yes |
| `LongRoPE` | θ_p / factor_p, one searched number per pair, two sets of them | at the trained length, all at once |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from intently._typing import Float
from intently.mechanism.positions.rotary import rotary_frequencies


@dataclass(frozen=True)
class Linear:
    """Position interpolation: every pair turns `factor` times slower, so that position m sits where m / factor sat.

    `θ_p / factor`

    Symbols: factor = L'/L, the new length over the trained one.

    Source: Chen et al. 2023, Extending Context Window of Large Language Models via Positional Interpolation,
    arXiv 2306.15595, equation 4.

    Four tokens at factor 2 stand at 0, 1/2, 1, 3/2:

    >>> import torch
    >>> (Linear(2.0).frequencies(2, 10000.0, torch.arange(4)) * torch.arange(4)).tolist()
    [0.0, 0.5, 1.0, 1.5]
    """

    factor: float
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_factor("Linear", self.factor)

    def frequencies(self, width: int, base: float, positions: Tensor) -> Float[Tensor, " pairs"]:
        """`[width/2]`, radians per position."""
        return rotary_frequencies(width, base, device=positions.device) / self.factor


@dataclass(frozen=True)
class NTKAware:
    """NTK-aware scaling: a larger base, which leaves the fastest pair alone and divides the slowest by `factor`.

    `base' = base * factor ** (width / (width - 2))`

    Nearby tokens keep the angles that tell them apart; the exponent is what makes the last pair turn at θ / factor.

    Symbols: factor = s, width = |D|.

    Source: Peng et al. 2023, YaRN, arXiv 2309.00071, section 3.1 (after a note by bloc97).

    Width 4, two pairs of 1 and 1/100 per position; factor 4 leaves the first and divides the second by 4:

    >>> import torch
    >>> NTKAware(4.0).frequencies(4, 10000.0, torch.arange(4)).tolist()
    [1.0, 0.0025]
    """

    factor: float
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_factor("NTKAware", self.factor)

    def frequencies(self, width: int, base: float, positions: Tensor) -> Float[Tensor, " pairs"]:
        """`[width/2]`, radians per position."""
        _check_wide("NTKAware", width)
        return rotary_frequencies(width, base * self.factor ** (width / (width - 2)), device=positions.device)


@dataclass(frozen=True)
class DynamicNTK:
    """Dynamic NTK scaling: nothing up to the trained length, beyond it a base that grows with the sequence.

    `base' = base * (factor * n / trained - (factor - 1)) ** (width / (width - 2))`, n = max(last position + 1, trained)

    n is taken sequence by sequence, so what a sequence gets does not hang on its neighbours in the batch; Hugging Face
    takes the longest of the batch. Either way the angles of *all* tokens change as the sequence grows: keys rotated
    earlier and kept in a cache no longer agree with a new query. Cache them before the rotation.

    Symbols: trained = L (`max_position_embeddings`), n = l', factor = α of the note, s of the configuration.

    Source: Peng et al. 2023, YaRN, arXiv 2309.00071, on dynamic scaling; Hugging Face, `rope_type` "dynamic".

    Width 4, trained on 4, factor 1: eight tokens need the base of `NTKAware(2)`, four need nothing.

    >>> import torch
    >>> DynamicNTK(1.0, trained=4).frequencies(4, 10000.0, torch.arange(4)).tolist()
    [1.0, 0.01]
    >>> DynamicNTK(1.0, trained=4).frequencies(4, 10000.0, torch.arange(8)).tolist()
    [1.0, 0.005]
    """

    factor: float
    trained: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_factor("DynamicNTK", self.factor)
        _check_trained("DynamicNTK", self.trained)

    def frequencies(self, width: int, base: float, positions: Tensor) -> Float[Tensor, "*batch pairs"]:
        """`[*batch, width/2]`, radians per position in each sequence."""
        _check_wide("DynamicNTK", width)
        plain = rotary_frequencies(width, base, device=positions.device)
        length = _lengths(positions).to(plain.dtype).clamp(min=self.trained)
        growth = (self.factor * length / self.trained - (self.factor - 1)) ** (width / (width - 2))
        exponents = torch.arange(0, width, 2, device=plain.device, dtype=plain.dtype) / width
        return plain * growth.unsqueeze(-1) ** -exponents


@dataclass(frozen=True)
class YaRN:
    """YaRN: pairs that turn often within the trained length stay, those that turn less than once are interpolated.

    `θ_p * (keep_p + (1 - keep_p) / factor)`, keep_p from 1 down to 0 along a straight ramp in p between the pairs that
    turn `fast` and `slow` times within the trained length, `p(r) = width ln(trained / (2π r)) / (2 ln base)`.

    Cos and sin are multiplied by the attention factor, so scores grow by its square (a temperature below 1):
    `0.1 ln(factor) + 1` by default. The numbers of a configuration come in three spellings: pass its `attention_factor`
    if it has one; with both `mscale` and `mscale_all_dim` (DeepSeek) pass `yarn_mscale(factor, mscale) /
    yarn_mscale(factor, mscale_all_dim)`. There the softmax scale is multiplied by the square of the second as well,
    which is not a matter of rotation.

    Args:
        factor: new length over the trained one.
        trained: length of the training context, `original_max_position_embeddings`.
        fast, slow: turns within the trained length that bound the ramp (`beta_fast`, `beta_slow`).
        truncate: round the ramp's ends outward to whole pairs; the authors' code does, gpt-oss does not.
        attention: the attention factor, when it is not to be the paper's.

    Symbols: factor = s, trained = L, fast = β, slow = α, keep = γ, attention factor = √(1/t).

    Source: Peng et al. 2023, YaRN, arXiv 2309.00071, on "NTK-by-parts" and YaRN; the ramp as in its code, over pairs
    (the text has it over turns).

    Width 4, trained on 4 tokens: no pair completes a turn (4 / 2π = 0.64), so the ramp shrinks to pair 0, which always
    stays; pair 1 is interpolated.

    >>> import torch
    >>> scaling = YaRN(2.0, trained=4)
    >>> scaling.frequencies(4, 10000.0, torch.arange(4)).tolist(), round(scaling.attention_factor, 4)
    ([1.0, 0.005], 1.0693)
    """

    factor: float
    trained: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    attention: float | None = None

    def __post_init__(self) -> None:
        _check_factor("YaRN", self.factor)
        _check_trained("YaRN", self.trained)
        if not self.fast >= self.slow > 0:
            raise ValueError(f"YaRN: fast is {self.fast}, slow is {self.slow}; fast >= slow > 0 is needed")

    @property
    def attention_factor(self) -> float:
        """What multiplies cos and sin."""
        return yarn_mscale(self.factor) if self.attention is None else self.attention

    def frequencies(self, width: int, base: float, positions: Tensor) -> Float[Tensor, " pairs"]:
        """`[width/2]`, radians per position."""
        plain = rotary_frequencies(width, base, device=positions.device)
        first, last = self._ramp(width, base)
        pairs = torch.arange(width // 2, device=plain.device, dtype=plain.dtype)
        keep = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
        return plain * (keep + (1 - keep) / self.factor)

    def _ramp(self, width: int, base: float) -> tuple[float, float]:
        """The pairs between which the ramp falls."""
        ends = [
            width * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.fast, self.slow)
        ]
        first, last = (math.floor(ends[0]), math.ceil(ends[1])) if self.truncate else ends
        # The authors bound the last pair by width - 1, not width/2 - 1: a ramp may end beyond the pairs there are.
        first, last = max(first, 0), min(last, width - 1)
        return first, max(last, first + 0.001)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """`0.1 * mscale * ln(factor) + 1`, and 1 where nothing is stretched: YaRN's fit of √(1/t).

    >>> yarn_mscale(1.0), round(yarn_mscale(math.e), 4)
    (1.0, 1.1)
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scaling: wavelengths below `trained / high` stay, above `trained / low` are stretched, between is mixed.

    `θ_p * (keep_p + (1 - keep_p) / factor)`, `keep_p = (trained / wavelength_p - low) / (high - low)` held in [0, 1],
    wavelength_p = 2π / θ_p.

    Symbols: factor = `factor`, low = `low_freq_factor`, high = `high_freq_factor`, trained =
    `original_max_position_embeddings` of its configuration.

    Source: Grattafiori et al. 2024, The Llama 3 Herd of Models, arXiv 2407.21783 (base 500 000); the published code.

    Width 4, trained on 4π: wavelengths 2π and 200π; the first turns twice, (2 - 1) / (4 - 1) = 1/3 of it is kept, so
    at factor 4 it turns at 1/3 + 2/3 · 1/4 = 1/2. The second is stretched.

    >>> import torch
    >>> [round(each, 6) for each in Llama3(4.0, trained=4 * math.pi).frequencies(4, 10000.0, torch.arange(4)).tolist()]
    [0.5, 0.0025]
    """

    factor: float
    trained: float
    low: float = 1.0
    high: float = 4.0
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_factor("Llama3", self.factor)
        _check_trained("Llama3", self.trained)
        if not self.high > self.low > 0:
            raise ValueError(f"Llama3: low is {self.low}, high is {self.high}; high > low > 0 is needed. Swapped?")

    def frequencies(self, width: int, base: float, positions: Tensor) -> Float[Tensor, " pairs"]:
        """`[width/2]`, radians per position."""
        plain = rotary_frequencies(width, base, device=positions.device)
        turns = self.trained * plain / (2 * math.pi)
        keep = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * (keep + (1 - keep) / self.factor)


@dataclass(frozen=True)
class LongRoPE:
    """LongRoPE: a searched divisor for every pair, one set within the trained length and one beyond it.

    `θ_p / long_p` where the sequence is longer than `trained`, else `θ_p / short_p`.

    The set changes for all tokens at once when a sequence outgrows the trained length; keys cached before that no longer
    agree. As in `DynamicNTK` the length is each sequence's own; Hugging Face takes the longest of the batch.

    Args:
        short, long: width/2 divisors each.
        trained: length of the training context.
        factor: new length over the trained one; sets the attention factor, √(1 + ln factor / ln trained).
        attention: the attention factor, when it is not to be that.

    Source: Ding et al. 2024, LongRoPE, arXiv 2402.13753; attention factor as in Phi-3's code.

    >>> import torch
    >>> scaling = LongRoPE(short=(1.0, 1.0), long=(1.0, 4.0), trained=4, factor=4.0)
    >>> scaling.frequencies(4, 10000.0, torch.arange(4)).tolist(), scaling.frequencies(4, 10000.0, torch.arange(5)).tolist()
    ([1.0, 0.01], [1.0, 0.0025])
    >>> round(scaling.attention_factor, 4)                                   # the square root of 1 + 1
    1.4142
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained: int
    factor: float
    attention: float | None = None

    def __post_init__(self) -> None:
        _check_factor("LongRoPE", self.factor)
        _check_trained("LongRoPE", self.trained)

    @property
    def attention_factor(self) -> float:
        """What multiplies cos and sin."""
        if self.attention is not None:
            return self.attention
        return math.sqrt(1 + math.log(self.factor) / math.log(self.trained))

    def frequencies(self, width: int, base: float, positions: Tensor) -> Float[Tensor, "*batch pairs"]:
        """`[*batch, width/2]`, radians per position in each sequence."""
        if not len(self.short) == len(self.long) == width // 2:
            raise ValueError(
                f"LongRoPE: {len(self.short)} short and {len(self.long)} long divisors for {width // 2} pairs of a "
                f"rotary width of {width}; one of each is needed per pair"
            )
        plain = rotary_frequencies(width, base, device=positions.device)
        short, long = (torch.tensor(each, dtype=plain.dtype, device=plain.device) for each in (self.short, self.long))
        beyond = (_lengths(positions) > self.trained).unsqueeze(-1)
        return plain / torch.where(beyond, long, short)


def _lengths(positions: Tensor) -> Tensor:
    """How far each sequence reaches, last position + 1, as a tensor: no number has to leave the device."""
    return positions.amax(dim=-1) + 1 if positions.shape[-1] else positions.new_zeros(positions.shape[:-1])


def _check_factor(where: str, factor: float) -> None:
    if not (math.isfinite(factor) and factor >= 1):
        raise ValueError(
            f"{where}: factor is {factor}; it is the new length over the trained one, a number of at least 1. Inverted?"
        )


def _check_trained(where: str, trained: float) -> None:
    if not trained > 1:
        raise ValueError(f"{where}: trained is {trained}; the length of the training context is needed, above 1")


def _check_wide(where: str, width: int) -> None:
    if width <= 2:
        raise ValueError(
            f"{where}: width is {width}; a single pair has no slowest and fastest, so at least 4 is needed"
        )
