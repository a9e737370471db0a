"""Runs the benchmarks: `python -m benchmarks.bench [--threads N] [cost fused blocked window rope]`; all when none is named."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

NAMES = ("cost", "fused", "blocked", "window", "rope")

# Interrupted, a benchmark ends without a word: its results are written last, whole.
ONE = "import signal, torch, benchmarks.{0} as one; signal.signal(2, signal.SIG_DFL); torch.manual_seed(0); one.main()"

# What is released stays with the process, for all alternatives alike. glibc would give large pieces back and fault them
# in again at the next call, which costs whoever works in large pieces up to half its time; an allocator that keeps a
# pool, or a process with a past, does not. Memory is measured in processes without these settings.
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(NAMES)}; all when none is named")
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use (1)")
    wanted = parser.parse_args(arguments)
    unknown = sorted(set(wanted.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is named {', '.join(unknown)}: there are {', '.join(NAMES)}")
    surroundings = os.environ | KEEP | {"OMP_NUM_THREADS": str(wanted.threads)}
    for name in wanted.names or NAMES:
        print(f"\n{name}", flush=True)
        started = time.perf_counter()
        # A process of its own: what the benchmarks before it left in the allocator changes what this one measures.
        try:
            done = subprocess.run([sys.executable, "-c", ONE.format(name)], env=surroundings, check=False)
        except KeyboardInterrupt:
            sys.exit(f"interrupted; the results of {name} and what follows are as they were, those before it are new")
        if done.returncode:
            sys.exit(f"{name} ended with {done.returncode}; its results are as they were")
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
