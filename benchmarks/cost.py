"""What looking costs: a traced forward against a plain one, and a check in forwards and seconds."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks import timing, written
from intently import demo
from intently.check import check
from intently.sites import find


def main() -> None:
    rows = []
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    for name, model, length in (
        ("demo decoder, written out, 4 layers", demo.honest().model.eval(), 32),
        ("nn.TransformerEncoder, 4 layers", nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval(), 512),
    ):
        batch = torch.randint(1, 50, (2, length)) if "demo" in name else torch.randn(2, length, 256)

        def plain(model=model, batch=batch) -> None:
            with torch.no_grad():
                model(batch)

        def traced(model=model, batch=batch) -> None:
            find(model, batch)

        times = timing.interleaved({"plain": plain, "traced": traced}, budget=10, most=7)
        rows.append(
            (
                name,
                length,
                f"{timing.Spread.of(times['plain']).middle * 1e3:.2f}",
                timing.ratio(times["traced"], times["plain"]),
            )
        )
        print(*rows[-1], sep=" | ", flush=True)
    looking = written.table(
        "Cost of looking", ("model", "length", "plain forward, ms", "traced / plain"), rows, timing.note()
    )
    costs = []
    for make in (demo.honest, demo.faulty):
        report = check(make())
        costs.append((report.target, report.verdict, report.forwards, f"{report.seconds:.2f}"))
        print(*costs[-1], sep=" | ", flush=True)
    checking = written.table("Cost of a check", ("target", "verdict", "forward passes", "seconds"), costs)
    print(f"wrote {written.write('cost.md', looking + chr(10) + checking)}")
