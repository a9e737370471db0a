"""Runs every script here and prints which fault still shows: `python examples/upstream`."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def main() -> int:
    shown = 0
    for script in sorted(FOLDER.glob("[a-z]*.py")):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", script],
            capture_output=True,
            text=True,
            env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
        )
        said = {0: "gone", 1: "shows"}.get(run.returncode, "could not run")
        if run.returncode == 1 and "Traceback" in run.stderr:
            said = "could not run"
        shown += said == "shows"
        print(f"{script.stem}: {said}")
        print("".join(f"    {line}\n" for line in (run.stdout or run.stderr[-400:]).splitlines()), end="", flush=True)
    print(f"{shown} show")
    return 0


if __name__ == "__main__":
    sys.exit(main())
