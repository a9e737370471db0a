"""The Python cells of a page: they run in order in one namespace, and the text block right below one is what it prints."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

CELL = re.compile(r"```python\n(?P<code>.*?)```\n(?P<below>\n```text\n(?!\$ ).*?```\n)?", re.DOTALL)


def run(page: str, name: str = "page") -> tuple[str, dict[str, Any]]:
    """The page with what its cells print now, and the names that they leave behind.

    Raises:
        ValueError: a cell prints and has no text block below it, or the other way round.
    """
    names: dict[str, Any] = {"__name__": name}

    def renewed(cell: re.Match[str]) -> str:
        line = page.count("\n", 0, cell.start()) + 2
        code = compile("\n" * (line - 1) + cell["code"], f"{name}.md", "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        output = "\n".join(text.rstrip() for text in printed.getvalue().rstrip().splitlines())
        if bool(output) != bool(cell["below"]):
            says = (
                "prints, and no text block stands below it"
                if output
                else "prints nothing, and a text block stands below"
            )
            raise ValueError(f"{name}.md, line {line}: the cell {says}")
        block = f"\n```text\n{output}\n```\n" if output else ""
        return f"```python\n{cell['code']}```\n{block}"

    return CELL.sub(renewed, page), names
