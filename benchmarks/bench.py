"""Runs the benchmarks: `python -m benchmarks.bench [--threads N] [cost fused blocked window rope]`; all when none is named."""

from __future__ import annotations

import argparse
import importlib
import sys
import time

import torch

NAMES = ("cost", "fused", "blocked", "window", "rope")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(NAMES)}; all when none is named")
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use (1)")
    wanted = parser.parse_args(arguments)
    unknown = sorted(set(wanted.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is named {', '.join(unknown)}: there are {', '.join(NAMES)}")
    torch.set_num_threads(wanted.threads)
    for name in wanted.names or NAMES:
        print(f"\n{name}", flush=True)
        torch.manual_seed(0)
        started = time.perf_counter()
        try:
            importlib.import_module(f"benchmarks.{name}").main()
        except KeyboardInterrupt:
            sys.exit(f"interrupted; the results of {name} and what follows are as they were, those before it are new")
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
