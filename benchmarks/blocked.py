"""Memory of the blocked backend over the length, for what no fused kernel takes: ALiBi as a function, and a softcap."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from benchmarks import growth, memory, plot, timing, written
from intently.masks import Mask
from intently.mechanism import attention
from intently.mechanism.positions import alibi

Backend = Literal["blocked", "stages"]

HEADS, WIDTH = 1, 64
LENGTHS = (2048, 4096, 8192, 16384, 32768)
STAGES_UP_TO = 8192  # the five stages hold several [heads, query, key] at once: over 5 GB at the next length
COLUMNS = (
    "step",
    "length",
    "blocked: alive, MiB",
    "process, MiB",
    "stages: alive, MiB",
    "process, MiB",
    "blocked, ms",
    "time, blocked / stages",
)


def step(backend: Backend, length: int, gradients: bool) -> Callable[[], object]:
    """Causal attention with ALiBi and a softcap, and its gradients where they are wanted."""
    leaves = [each.requires_grad_(gradients) for each in torch.randn(3, 1, HEADS, length, WIDTH).unbind()]
    bias = alibi(HEADS)
    given = torch.ones(1, HEADS, length, WIDTH)

    def call() -> Tensor | tuple[Tensor, ...]:
        output = attention(*leaves, mask=Mask.causal(), bias=bias, softcap=30.0, backend=backend)
        return torch.autograd.grad(output, leaves, given) if gradients else output

    return call


def held(backend: Backend, length: int, gradients: bool) -> dict[str, float]:
    """MiB by reading, taken with all cores: how many threads work changes the time, not the memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        alive = memory.peak_bytes(step(backend, length, gradients))
        process = memory.resident_bytes(step, backend, length, gradients, warm=(backend, 64, gradients))
    finally:
        torch.set_num_threads(threads)
    return {reading: size / 2**20 for reading, size in (("alive", alive), ("process", process)) if size}


def main() -> None:
    rows = []
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name, gradients in (("forward", False), ("forward + backward", True)):
        for length in LENGTHS:
            backends: tuple[Backend, ...] = ("blocked", "stages") if length <= STAGES_UP_TO else ("blocked",)
            cells: list[object] = [name, length]
            for backend in backends:
                sizes = held(backend, length, gradients)
                cells += [f"{sizes['alive']:.1f}", f"{sizes['process']:.0f}" if "process" in sizes else ""]
                for reading, size in sizes.items():
                    series.setdefault((name, f"{backend}, {reading}"), []).append((length, size))
            if "stages" in backends:
                calls = {backend: step(backend, length, gradients) for backend in backends}
                times = timing.interleaved(calls, budget=4, least=3, most=9)
                cells += [timing.milliseconds(times["blocked"]), timing.ratio(times["blocked"], times["stages"])]
            rows.append(cells + [""] * (len(COLUMNS) - len(cells)))
            print(*cells, sep=" | ", flush=True)
    note = (
        f"causal, ALiBi as a function of positions, softcap 30, one head of width {WIDTH}, float32. Memory beyond "
        f"query, key and value: alive at once in torch's allocator, and what a fresh process came to occupy. {timing.note()}"
    )
    fits = [
        (name, what, f"N^{growth.exponent(*zip(*points, strict=True)):.2f}") for (name, what), points in series.items()
    ]
    for fit in fits:
        print(*fit, sep=" | ")
    text = written.table("The blocked backend", COLUMNS, rows, note)
    text += "\n" + written.table(
        "Growth of its memory", ("step", "what", "grows as"), fits, "least squares in logarithms"
    )
    print(f"wrote {written.write('blocked.md', text)}")
    shown = {what: points for (name, what), points in series.items() if "backward" in name}
    written.picture("blocked.svg", plot.lines("Peak memory, forward + backward, ALiBi and softcap", "MiB", shown))
