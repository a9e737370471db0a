"""A case of the zoo: a small model, what was planted in it and where; and how a check's report is held against that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import intently
from intently import Target
from intently.errors import CannotCheck

# A path that only asking for weights takes is wrong in a way that has a name of its own: both are told, both are true.
ALSO = {"observer-effect": frozenset({"causal-leak", "padding-leak", "scale-missing"})}

STYLES = ("einsum", "matmul", "multihead", "sdpa")


@dataclass(frozen=True)
class Case:
    """One model. `fault` is None for a clean one; `sites` are the paths that hold the planted line."""

    name: str
    style: str
    fault: str | None
    sites: tuple[str, ...]
    build: Callable[[], Target]
    twin: str = ""  # of a planted case: the clean case that lacks the planted line only
    also: frozenset[str] = frozenset()  # other names that are true of the same line

    def __str__(self) -> str:
        return f"{self.style}-{self.name}"


def plant(
    style: str,
    fault: str,
    name: str,
    *sites: str,
    build: Callable[..., Target],
    bad: tuple[Any, ...],
    good: tuple[Any, ...],
) -> tuple[Case, Case]:
    """A planted case and its clean twin: the same builder, given parts with the planted line and parts without it.

    The twin is named by its parts, so that faults planted in one model share it.
    """
    parts = "-".join(part.__name__ for part in good)
    twin = Case(f"clean: {build.__name__}-{parts}", style, None, (), partial(build, *good))
    return Case(
        f"{fault}: {name}", style, fault, sites, partial(build, *bad), str(twin), ALSO.get(fault, frozenset())
    ), twin


@dataclass(frozen=True)
class Outcome:
    """What a check said about a case. `errors` holds (fault, site, proof) of each error, and of the planted fault."""

    case: str
    style: str
    fault: str | None
    sites: tuple[str, ...]
    errors: tuple[tuple[str, str, str], ...]
    seconds: float
    raised: str = ""
    twin: str = ""
    also: frozenset[str] = frozenset()

    @property
    def named(self) -> bool:
        """Whether the planted fault, and no other, was found (besides names that are as true of the planted line)."""
        return {fault for fault, site, _ in self.errors if fault not in self.also or site not in self.sites} == {
            self.fault
        }

    @property
    def located(self) -> bool:
        """Whether the planted fault was found at the planted sites and nowhere else."""
        return {site for fault, site, _ in self.errors if fault == self.fault} == set(self.sites)

    @property
    def proven(self) -> bool:
        """Whether a repair proved every finding of the planted fault."""
        proofs = [proof for fault, _, proof in self.errors if fault == self.fault]
        return bool(proofs) and set(proofs) == {"proven"}

    @property
    def right(self) -> bool:
        """Whether nothing is missed, misnamed, mislocated, unproven or falsely alarmed."""
        if self.raised:
            return False
        return not self.errors if self.fault is None else self.named and self.located and self.proven

    @property
    def complaint(self) -> str:
        """What is wrong, in words; empty where nothing is."""
        if self.raised:
            return f"could not be checked: {self.raised}"
        if self.right:
            return ""
        seen = ", ".join(f"{fault} at {site} ({proof})" for fault, site, proof in self.errors) or "no error"
        if self.fault is None:
            return f"false alarm: {seen}"
        kind = "unproven"
        if not any(fault == self.fault for fault, _, _ in self.errors):
            kind = "misnamed" if self.errors else "missed"
        elif not self.located:
            kind = "mislocated"
        elif not self.named:
            kind = "named twice"
        return f"{kind}: {self.fault} planted at {', '.join(self.sites)}; found {seen}"


def judge(case: Case) -> Outcome:
    """Check one case, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            report = intently.check(case.build())
    except CannotCheck as error:
        return Outcome(str(case), case.style, case.fault, case.sites, (), 0.0, str(error), case.twin, case.also)
    finally:
        torch.set_num_threads(threads)
    errors = tuple(
        (f.fault, f.site, f.proof) for f in report.findings if f.severity == "error" or f.fault == case.fault
    )
    return Outcome(
        str(case), case.style, case.fault, case.sites, errors, report.seconds, twin=case.twin, also=case.also
    )
