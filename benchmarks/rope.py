"""What rotary positions cost a transformer block, beside the share that EleutherAI reported for whole models."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import timing, written
from intently.masks import Mask
from intently.mechanism.layers import Attend, FeedForward, MultiHeadAttention, TransformerBlock
from intently.mechanism.positions import Rotary

SIZES = ((512, 8, 1024), (768, 12, 1024), (768, 12, 2048))  # model, heads, length

REPORTED = (
    "EleutherAI report that “with fusion, we find that rotary embeddings impose a 1-3% overhead across a range of "
    "transformer sizes” (Rotary Embeddings: A Relative Revolution, 2021, section Runtime, "
    "https://blog.eleuther.ai/rotary-embeddings/), for whole models; here it is one block, nothing compiled or fused"
)


def block(model: int, heads: int, position: Rotary | None = None) -> TransformerBlock:
    """A block as in GPT-2: norms first, GELU, a feed-forward four times as wide."""
    return TransformerBlock(
        MultiHeadAttention(model, heads, attend=Attend(mask=Mask.causal()), position=position),
        FeedForward(model, 4 * model, F.gelu),
        norms=[nn.LayerNorm(model), nn.LayerNorm(model)],
    )


def forward(module: nn.Module, states: Tensor) -> Callable[[], object]:
    def call() -> Tensor:
        with torch.no_grad():
            return module(states)

    return call


def backward(module: nn.Module, states: Tensor) -> Callable[[], object]:
    leaves = [states.clone().requires_grad_(), *module.parameters()]
    return lambda: torch.autograd.grad(module(leaves[0]).sum(), leaves)


def main() -> None:
    rows = []
    for model, heads, length in SIZES:
        plain = block(model, heads)
        turned = block(model, heads, Rotary(model // heads))
        turned.load_state_dict(plain.state_dict())
        states = torch.randn(1, length, model)
        if torch.equal(plain(states), turned(states)):
            raise RuntimeError("the rotary block computes what the plain one does, so nothing would be measured")
        for step, wrap in (("forward", forward), ("forward + backward", backward)):
            calls = {
                "plain": wrap(plain, states),
                "rotary": wrap(turned, states),
                "plain again": wrap(plain, states),
            }
            times = timing.interleaved(calls, budget=8, least=7, most=31)
            rows.append(
                (
                    step,
                    f"{model}, {heads} heads, length {length}",
                    timing.milliseconds(times["plain"]),
                    timing.percent(timing.ratio(times["rotary"], times["plain"])),
                    timing.percent(timing.ratio(times["plain again"], times["plain"])),
                )
            )
            print(*rows[-1], sep=" | ", flush=True)
    columns = ("step", "block", "without, ms", "rotary adds", "the same block again adds")
    note = f"float32, causal; {timing.note()}; the last column is the noise. {REPORTED}"
    print(f"wrote {written.write('rope.md', written.table('Rotary positions', columns, rows, note))}")
