"""A virtual environment for one release, which borrows torch and the tool's own requirements from the running one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


class CannotInstall(RuntimeError):
    """A requirement cannot be installed here; the message is pip's last line."""


def interpreter(folder: Path, requirement: str, *, without: bool) -> Path:
    """The Python of an environment that holds `requirement`, made in `folder` unless it is there already."""
    name = requirement.split()[0].replace("==", "-")
    mark = hashlib.sha256(f"{requirement} {without}".encode()).hexdigest()[:6]
    home = folder / f"{name}-{mark}"
    python = home / "bin" / "python"
    done = home / "installed"
    if done.exists():
        return python
    venv.create(home, with_pip=True, clear=True)
    _borrow(home)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps"] if without else []
    said = subprocess.run([*command, *requirement.split()], capture_output=True, text=True, check=False)
    if said.returncode != 0:
        lines = [line for line in said.stderr.splitlines() if line.startswith("ERROR")] or said.stderr.splitlines()
        raise CannotInstall(lines[-1].removeprefix("ERROR: ") if lines else "pip failed")
    done.touch()
    return python


def _borrow(home: Path) -> None:
    """Packages of the running environment come after the new one's own, so that what it installs is what is used."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = home / "lib" / version / "site-packages"
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
