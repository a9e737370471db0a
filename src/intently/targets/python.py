"""Loads a target from Python: `path/file.py:name` or `package.module:name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from intently.errors import CannotCheck
from intently.targets.target import Target

_FACTORIES = ("build", "model", "make_model", "get_model", "create_model", "target", "main_model", "attention")


def load(text: str) -> Target:
    """The module, factory, Target or function that `text` names."""
    where, colon, name = text.rpartition(":")
    if not colon:
        where, name = text, ""
    module = _file(Path(where)) if where.endswith(".py") else _package(where)
    found, name = _attribute(module, name, where)
    return _as_target(found, text if name in text else f"{where}:{name}")


def _file(path: Path) -> ModuleType:
    if not path.exists():
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else [], 1
        )
        raise CannotCheck(f"there is no file {path}", hint=str(path.parent / near[0]) if near else "path/file.py:NAME")
    name = f"_intently_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise CannotCheck(
            f"{path} has a syntax error in line {error.lineno}: {error.msg}", cause=(error.text or "").strip()
        ) from error
    except ImportError as error:
        raise CannotCheck(
            f"{path} could not be imported: {error}", hint="install what it imports, or run from the folder it expects"
        ) from error
    except Exception as error:
        raise CannotCheck(
            f"{path} raised while it was imported", cause=_said(error), hint="python " + str(path)
        ) from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _package(name: str) -> ModuleType:
    if name.startswith(".") or "/" in name:  # no module has such a name
        raise CannotCheck(
            f"there is no file or folder {name}",
            hint="path/file.py:NAME, package.module:NAME, hf:MODEL_TYPE or a folder",
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise CannotCheck(
                f"there is no module {error.name!r}",
                hint="path/file.py:NAME, package.module:NAME, hf:MODEL_TYPE or a folder",
            ) from error
        raise CannotCheck(f"{name} could not be imported: {error}", hint="install what it imports") from error
    except Exception as error:
        raise CannotCheck(f"{name} raised while it was imported", cause=_said(error)) from error
    finally:
        sys.path.remove(str(Path.cwd()))


def _attribute(module: ModuleType, name: str, where: str) -> tuple[Any, str]:
    if not name:
        usual = [n for n in _FACTORIES if hasattr(module, n)]
        if not usual:
            raise CannotCheck(
                f"{where} needs a name after a colon", cause=f"it defines: {_defined(module)}", hint=f"{where}:NAME"
            )
        name = usual[0]
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [n for n in vars(module) if not n.startswith("_")], 1)
            raise CannotCheck(
                f"{where} has no name {part!r}",
                cause=f"it defines: {_defined(module)}",
                hint=f"{where}:{near[0]}" if near else "",
            )
        found = getattr(found, part)
    return found, name


def _defined(module: ModuleType) -> str:
    own = [
        n
        for n, v in vars(module).items()
        if not n.startswith("_") and getattr(v, "__module__", None) == module.__name__
    ]
    return ", ".join(own[:12]) or "nothing of its own"


def _as_target(found: Any, text: str) -> Target:
    if isinstance(found, Target):
        return found if found.name else _named(found, text)
    if isinstance(found, nn.Module):
        return Target(found, name=text)
    if not callable(found):
        raise CannotCheck(
            f"{text} is a {type(found).__name__}",
            hint="name a module, a function of q, k, v, or a function that builds one",
        )
    if _is_factory(found):
        try:
            made = found()
        except Exception as error:
            raise CannotCheck(f"{text}() raised while it built the model", cause=_said(error)) from error
        if isinstance(made, Target):
            return made if made.name else _named(made, text)
        if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
            made = made[0]
        if isinstance(made, nn.Module) or callable(made):
            return Target(made, name=text)
        raise CannotCheck(
            f"{text}() returned a {type(made).__name__}",
            hint="return a torch module, a Target, or a function of q, k, v",
        )
    if inspect.isclass(found):
        raise CannotCheck(
            f"{text} is a class whose constructor needs arguments",
            hint=f"write def build(): return {found.__name__}(…) and name build",
        )
    return Target(found, name=text)


def _named(target: Target, text: str) -> Target:
    from dataclasses import replace

    return replace(target, name=text)


def _is_factory(found: Any) -> bool:
    """A function (or class) that can be called with nothing."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return not needed


def _said(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")
