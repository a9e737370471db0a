"""The one error that means: no verdict was reached, for this reason, and this is what to try."""

from __future__ import annotations


class CannotCheck(Exception):
    """No verdict is possible; `fact` says why in one sentence, `cause` what lies behind it, `hint` what to try.

    The command line shows the three and exits with status 2; it never shows a traceback for it.

    >>> error = CannotCheck("model.py has no name 'net'", cause="it defines: build, model", hint="model.py:model")
    >>> print(error)
    model.py has no name 'net'. Cause: it defines: build, model. Try: model.py:model.
    """

    def __init__(self, fact: str, cause: str = "", hint: str = "") -> None:
        super().__init__(fact, cause, hint)
        self.fact = fact
        self.cause = cause
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.fact, self.cause and f"Cause: {self.cause}", self.hint and f"Try: {self.hint}"]
        return " ".join(_sentence(part) for part in parts if part)


def _sentence(text: str) -> str:
    return text if text.rstrip().endswith((".", "!", "?")) else f"{text.rstrip()}."
