"""A public case: who reported it, which release has the fault, which has not, and the tiny model that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Case:
    """`faulty` and `fixed` are pip requirements, one or more by spaces; `fixed` is empty where no release is, and `why` says so.

    The file of its name in `models/` has a `build()` that returns the target. `without` asks pip to leave out what the wheels
    require (`--no-deps`), for wheels pinned to a torch of their own.
    """

    name: str
    report: str
    fault: str
    faulty: str
    fixed: str = ""
    why: str = ""
    without: bool = False

    @property
    def file(self) -> Path:
        return MODELS / f"{self.name}.py"

    def releases(self) -> tuple[tuple[str, str], ...]:
        """`("faulty", requirement)`, and `("fixed", requirement)` where there is one."""
        return (("faulty", self.faulty), *((("fixed", self.fixed),) if self.fixed else ()))


def right(case: Case, kind: str, findings: list[dict[str, str]]) -> bool:
    """Whether a report says what the release deserves: the fault under its name, or nothing under that name."""
    told = {f["fault"] for f in findings if f["severity"] != "note"}
    return (case.fault in told) == (kind == "faulty")
