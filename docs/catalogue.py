"""Fills the pages on promises and faults from the texts in the code, so that there is no second copy of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from intently.faults.base import Fault
    from intently.promises.base import Promise

_PROMISES = "<!-- catalogue: promises -->"
_FAULTS = "<!-- catalogue: faults -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with each page."""
    if _PROMISES in markdown:
        from intently.faults import FAULTS
        from intently.promises import PROMISES

        markdown = markdown.replace(_PROMISES, promises(PROMISES.values(), FAULTS.values()))
    if _FAULTS in markdown:
        from intently.faults import FAULTS

        markdown = markdown.replace(_FAULTS, faults(FAULTS.values()))
    return markdown


def promises(known: Any, breakers: Any) -> str:
    return "\n\n".join(_promise(promise, list(breakers)) for promise in known)


def faults(known: Any) -> str:
    return "\n\n".join(_fault(fault) for fault in known)


def _promise(promise: Promise, breakers: list[Fault]) -> str:
    broken_by = [f"[{fault.name}](fault.md#{fault.name})" for fault in breakers if promise.name in fault.promises]
    facts = [
        ("Applies to", promise.applies_to),
        ("Tried by", promise.how),
        ("Broken by", ", ".join(broken_by)),
        ("Sources", ", ".join(promise.sources)),
    ]
    return "\n\n".join([_heading(promise.name), promise.statement, _facts(facts)])


def _fault(fault: Fault) -> str:
    breaks = ", ".join(f"[{name}](promise.md#{name})" for name in fault.promises)
    facts = [
        ("Stage", fault.stage),
        ("Severity", fault.severity),
        ("Breaks", breaks),
        ("Symptom", fault.symptom),
        ("Why silent", fault.why_silent),
        ("Fix", fault.fix),
        ("Sources", ", ".join(fault.sources)),
    ]
    parts = [_heading(fault.name), fault.summary, _facts(facts)]
    for label, code in (("Flagged", fault.bad), ("Silent", fault.good)):
        if code.strip():
            parts.append(f"{label}:\n\n```python\n{code.strip()}\n```")
    return "\n\n".join(parts)


def _heading(name: str) -> str:
    return f"### {name} {{ #{name} }}"


def _facts(facts: list[tuple[str, str]]) -> str:
    """A list whose later lines stay inside their item."""
    inside = "\n    "
    return "\n".join(f"- **{label}:** {inside.join(text.strip().splitlines())}" for label, text in facts if text)
