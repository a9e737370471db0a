"""A module that can be called: `intently.check` is the file of that name and also the function in it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def callable_module(module_name: str, function_name: str) -> None:
    """Let the module be called as the function it is named for; put as the last line of that module.

    Importing a submodule binds it as an attribute of its package, over any function of the same name, so whether
    `intently.check` were a module or a function would otherwise depend on who imported what first.

    >>> import sys, types
    >>> module = sys.modules["greeting"] = types.ModuleType("greeting")
    >>> module.greet = lambda name: f"hello {name}"
    >>> callable_module("greeting", "greet")
    >>> module("world")
    'hello world'
    >>> del sys.modules["greeting"]
    """

    class Verb(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__dict__[function_name](*args, **kwargs)

    sys.modules[module_name].__class__ = Verb
