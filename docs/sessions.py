"""`python docs/sessions.py`: run each `$ intently …` and each cell that the pages show with its output, and renew the output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cells

SESSION = re.compile(r"```text\n\$ intently (?P<arguments>[^\n]+)\n.*?```", re.DOTALL)


def renewed(found: re.Match[str]) -> str:
    """The block with what the command prints now."""
    words = found["arguments"].split()
    ran = subprocess.run([sys.executable, "-m", "intently", *words], capture_output=True, text=True, encoding="utf-8")
    if ran.returncode not in (0, 1):
        raise SystemExit(f"intently {found['arguments']}: {ran.stderr}")
    output = "\n".join(line.rstrip() for line in ran.stdout.rstrip().splitlines())
    return f"```text\n$ intently {found['arguments']}\n{output}\n```"


def main() -> None:
    for page in sorted(Path(__file__).parent.rglob("*.md")):
        text = SESSION.sub(renewed, page.read_text("utf-8"))
        if page.parent.name == "mechanism":  # the pages whose Python is complete; elsewhere it is shown in pieces
            text, _ = cells.run(text, page.stem)
        page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
