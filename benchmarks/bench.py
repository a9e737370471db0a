"""What looking costs: a traced forward against a plain one, and a check in forwards and seconds, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import written
from intently import demo
from intently.check import check
from intently.sites import find

REPEATS = 7


def seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call, after one that does not count."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    for name, model, length in (
        ("demo decoder, written out, 4 layers", demo.honest().model.eval(), 32),
        ("nn.TransformerEncoder, 4 layers", nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval(), 512),
    ):
        batch = torch.randint(1, 50, (2, length)) if "demo" in name else torch.randn(2, length, 256)
        with torch.no_grad():
            plain = seconds(lambda m=model, b=batch: m(b))
        traced = seconds(lambda m=model, b=batch: find(m, b))
        rows.append((name, length, f"{plain * 1e3:.2f}", f"{traced / plain:.2f}"))
        print(*rows[-1], sep=" | ")
    looking = written.table(
        "Cost of looking",
        ("model", "length", "plain forward, ms", "traced / plain"),
        rows,
        f"median of {REPEATS}, one thread",
    )
    costs = []
    for make in (demo.honest, demo.faulty):
        report = check(make())
        costs.append((report.target, report.verdict, report.forwards, f"{report.seconds:.2f}"))
        print(*costs[-1], sep=" | ")
    checking = written.table("Cost of a check", ("target", "verdict", "forward passes", "seconds"), costs)
    print(f"wrote {written.write('cost.md', looking + chr(10) + checking)}")


if __name__ == "__main__":
    main()
