"""Checks the types of the library with mypy, as pyproject.toml says.

Folders of the repository have other names than the modules in them (`patches` is `eqaccel.patches`). mypy finds modules
by folders, so it gets the package as it would be installed, made of links to the source. Nothing has to be built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "build/typed/eqaccel"


def installed_folders() -> dict[str, str]:
    """Folders of the package by folders of the repository: the table that packages are built with."""
    # tomllib came with Python 3.11.
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[tool.scikit-build.wheel.packages]\n")[2].partition("\n\n")[0]
    return dict(re.findall(r'^"([^"]+)" = "([^"]+)"$', table, re.MULTILINE))


def link_package() -> None:
    """Lays out the package in build/typed."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    PACKAGE.mkdir(parents=True)
    for installed, source in installed_folders().items():
        target = PACKAGE.parent / installed
        if target == PACKAGE:
            for entry in sorted((ROOT / source).iterdir()):
                (PACKAGE / entry.name).symlink_to(entry)
        else:
            target.symlink_to(ROOT / source)


def main() -> int:
    """Runs mypy; returns its exit status."""
    link_package()
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *sys.argv[1:]]
    return subprocess.run(command, cwd=PACKAGE.parent, env=os.environ | {"MYPYPATH": "."}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
