"""A causal window: ours against the dense kernel under the same mask, and against two packages that offer windows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peers, plot, timing, written
from intently.masks import Mask
from intently.mechanism import attention, choose_backend

HEADS, WIDTH, BACK = 8, 64, 256
LENGTHS = (1024, 2048, 4096, 8192, 16384)
LONGEST = {  # what would take half a minute a call is left out
    ("dense kernel", "forward + backward"): 8192,
    ("x-transformers", "forward"): 8192,
    ("x-transformers", "forward + backward"): 8192,
}
SAME = 1e-4  # largest difference of float32 results that are the same but for rounding
NAMES = ("intently", "dense kernel", "local-attention", "x-transformers")


def alternatives(length: int) -> dict[str, peers.Attend | None]:
    """Every way to let a query see its own key and `BACK` before it; None for what is not installed."""
    window = Mask.causal() & Mask.window(BACK + 1)
    dense = window.matrix(length)
    ways: dict[str, peers.Attend | None] = {
        "intently": lambda query, key, value: attention(query, key, value, mask=window),
        "dense kernel": lambda query, key, value: F.scaled_dot_product_attention(query, key, value, attn_mask=dense),
    }
    for name, make in (
        ("local-attention", lambda: peers.local_attention(BACK)),
        ("x-transformers", lambda: peers.x_transformers(dense)),
    ):
        try:
            ways[name] = make()
        except ImportError:
            ways[name] = None
    return ways


def forward(way: peers.Attend, states: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (way(*states),)

    return call


def backward(way: peers.Attend, states: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    leaves = [each.clone().requires_grad_() for each in states]
    given = torch.ones_like(states[2])

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(way(*leaves), leaves, given)

    return call


def main() -> None:
    rows, taken = [], ""
    series: dict[str, list[tuple[float, float]]] = {}
    for length in LENGTHS:
        states = torch.randn(3, 1, HEADS, length, WIDTH)
        ways = alternatives(length)
        taken = choose_backend(*states, mask=Mask.causal() & Mask.window(BACK + 1)).name
        for step, wrap in (("forward", forward), ("forward + backward", backward)):
            calls = {
                name: wrap(way, states)
                for name, way in ways.items()
                if way is not None and length <= LONGEST.get((name, step), length)
            }
            exact = calls["intently"]()
            apart = {
                name: max((a - b).abs().max().item() for a, b in zip(exact, call(), strict=True))
                for name, call in calls.items()
            }
            different = {name: size for name, size in apart.items() if not size < SAME}
            if different:
                raise RuntimeError(f"{step} at {length}: {different} from intently's, so times would compare nothing")
            del exact
            times = timing.interleaved(calls, budget=4, least=3, most=15, warm=True)
            for name in NAMES:
                if name not in times:
                    absent = peers.MISSING if ways[name] is None else "not measured"
                    rows.append((step, length, name, absent, "", ""))
                    print(*rows[-1][:4], sep=" | ", flush=True)
                    continue
                against = timing.ratio(times[name], times["intently"]) if name != "intently" else "1"
                rows.append((step, length, name, timing.milliseconds(times[name]), against, f"{apart[name]:.1g}"))
                series.setdefault(f"{name}, {step}", []).append((length, timing.Spread.of(times[name]).middle * 1e3))
                print(*rows[-1], sep=" | ", flush=True)
    found = ", ".join(f"{name} {peers.version(name) or 'absent'}" for name in NAMES[2:])
    note = (
        f"{found}; {HEADS} heads of width {WIDTH}, float32, each query sees itself and {BACK} before it; intently's "
        f"automatic choice at the longest is {taken}; {timing.note()}. Differences are those from intently's outputs or "
        "gradients. The dense kernel and x-transformers (whose windows are dense masks) get their mask ready made"
    )
    columns = ("step", "length", "what", "ms", "times intently's", "largest difference")
    print(f"wrote {written.write('window.md', written.table('A causal window', columns, rows, note))}")
    written.picture(
        "window.svg",
        plot.lines(
            f"Causal window of {BACK}, forward + backward",
            "milliseconds",
            {name.split(",")[0]: points for name, points in series.items() if "backward" in name},
        ),
    )
