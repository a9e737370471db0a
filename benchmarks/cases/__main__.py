"""`python -m benchmarks.cases [NAMES…] [--folder DIR]`: check each public case, write results/cases.md, exit 1 where one is wrong."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import written
from benchmarks.cases.case import Case, right
from benchmarks.cases.environment import CannotInstall, interpreter
from benchmarks.cases.table import CASES
from benchmarks.written import RESULTS

ROOT = RESULTS.parent.parent
LIMIT = 300  # seconds a check


def checked(python: Path, case: Case) -> tuple[str, list[dict[str, str]]]:
    """The verdict of the command line on a case's model, and the findings; `unchecked` with the reason as the only finding."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [
            str(python),
            "-W",
            "ignore",
            "-m",
            "intently",
            "check",
            f"{case.file}:build",
            "--quiet",
            "--json",
            str(out),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
        try:
            said = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT, check=False, env=environment, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return f"longer than {LIMIT} s", []
        if not out.exists():
            return (said.stderr.strip().splitlines() or ["no reason given"])[0][:200], []
        report = json.loads(out.read_text(encoding="utf-8"))
    return report["verdict"], report["findings"]


def row(folder: Path, case: Case, kind: str, requirement: str) -> tuple[tuple[str, ...], bool | None]:
    """One line of the table, and whether it is as it should be; None where the release cannot be installed."""
    try:
        python = interpreter(folder, requirement, without=case.without)
    except CannotInstall as error:
        return (case.report, case.fault, requirement, "cannot be installed", str(error)[:160], ""), None
    verdict, findings = checked(python, case)
    told = [f"{f['fault']} at {f['site']} ({f['severity']}, {f['proof']})" for f in findings if f["severity"] != "note"]
    ran = verdict in ("kept", "broken")
    good = ran and right(case, kind, findings)
    return (case.report, case.fault, f"{requirement} ({kind})", verdict, "; ".join(told), "yes" if good else "no"), good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases", description=__doc__)
    parser.add_argument("names", nargs="*", help="cases to run; all when none is named")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "cases", help="where the environments are made")
    given = parser.parse_args()
    unknown = set(given.names) - {c.name for c in CASES}
    if unknown:
        parser.error(f"no case is named {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CASES)}")
    wanted = [c for c in CASES if not given.names or c.name in given.names]
    rows: list[tuple[str, ...]] = []
    judged: list[bool | None] = []
    for case in wanted:
        for kind, requirement in case.releases():
            line, good = row(given.folder, case, kind, requirement)
            rows.append(line)
            judged.append(good)
            print(
                f"{case.name}: {line[2]}: {line[3]}; {line[4] or 'nothing told'}; as it should be: {line[5] or '-'}",
                flush=True,
            )
        if not case.fixed and case.why:
            rows.append((case.report, case.fault, "none fixed", "", case.why, ""))
    if not given.names:
        columns = ("report", "fault", "release", "verdict", "told", "right")
        ran = [good for good in judged if good is not None]
        note = f"{sum(ran)} of {len(ran)} checks say what they should"
        note += f"; {judged.count(None)} releases cannot be installed here" if None in judged else ""
        print(f"wrote {written.write('cases.md', written.table('Public cases', columns, rows, note))}")
    return 1 if False in judged else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the environments made so far are kept")
