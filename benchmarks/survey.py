"""Checks tiny random models of transformers types, one process each, resumable: `python -m benchmarks.survey [TYPES…]`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import written
from intently.targets.huggingface_build import model_types

LIMIT = 90  # seconds a type
STATE = written.RESULTS / "survey.jsonl"


def survey(name: str) -> dict[str, object]:
    """One type, checked as a user would: what the program said, and how long it took."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "intently", "check", f"hf:{name}", "--json", str(out), "--quiet"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            return {"type": name, "verdict": "unchecked", "why": f"longer than {LIMIT} s", "seconds": LIMIT}
        took = round(time.perf_counter() - started, 1)
        if not out.exists():
            said = next(
                (line for line in done.stderr.splitlines() if line.startswith("cannot check: ")),
                "cannot check: no reason given",
            )
            return {
                "type": name,
                "verdict": "unchecked",
                "why": said.removeprefix("cannot check: ")[:160],
                "seconds": took,
            }
        report = json.loads(out.read_text())
    errors = [f"{f['fault']} at {f['site']} ({f['proof']})" for f in report["findings"] if f["severity"] == "error"]
    unnamed = [n for n in report.get("notes", ()) if "no fault known" in n]
    return {"type": name, "verdict": report["verdict"], "why": "; ".join([*errors, *unnamed])[:300], "seconds": took}


def main() -> None:
    written.RESULTS.mkdir(exist_ok=True)
    done = {}
    if STATE.exists():
        done = {row["type"]: row for row in map(json.loads, STATE.read_text().splitlines())}
    wanted = sys.argv[1:] or list(model_types())
    for number, name in enumerate(wanted, 1):
        if name not in done or sys.argv[1:]:
            done[name] = survey(name)
            with STATE.open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
        row = done[name]
        print(f"{number}/{len(wanted)} {name}: {row['verdict']} {row['why']} ({row['seconds']} s)", flush=True)
    rows = [(r["type"], r["verdict"], r["why"], r["seconds"]) for r in (done[n] for n in wanted)]
    counts = {v: sum(r[1] == v for r in rows) for v in ("kept", "broken", "unchecked")}
    title = "Survey of transformers types"
    text = written.table(
        title, ("type", "verdict", "errors, or why not", "seconds"), rows, f"{len(rows)} types: {counts}"
    )
    print(f"wrote {written.write('survey.md', text)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; what was done is kept, and the next run goes on from there")
