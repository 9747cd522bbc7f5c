"""Builds the site of the documentation from the chapters in the repository and from the code.

Its pages lie in build/docs as the chapters lie in the repository, so the same links work on the site and in the source.
The installed eqaccel is the one described. MkDocs makes HTML of the pages, and fails where a link leads nowhere.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path

import latex2mathml.converter
from support_tables import supported

import eqaccel
from eqaccel import errors, o3, training
from eqaccel.__main__ import main
from eqaccel.families import linear, polynomial, tensor_product
from eqaccel.families.tensor_product import ConnectionMode
from eqaccel.runtime import include_path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build/docs"
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", re.DOTALL)


def build() -> None:
    """Writes the pages, then the site, and looks for every public name in it.

    Raises:
        SystemExit: If MkDocs finds a fault, or a name has no entry.
    """
    config = ROOT / "mkdocs.yml"
    shutil.rmtree(PAGES, ignore_errors=True)
    for file in collected():
        copy = PAGES / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    chapter = PAGES / "docs/mathematics.md"
    chapter.write_text(FORMULA.sub(mathml, chapter.read_text()))
    for name, write in GENERATED.items():
        (PAGES / "docs" / name).write_text(write())
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--config-file", config], cwd=PAGES, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    anchors = set(re.findall(r'id="([^"]+)"', (ROOT / "build/site/docs/reference.html").read_text()))
    missing = [name for name in (*public_names(), *e3nn_names()) if home(name) not in anchors]
    if missing:
        raise SystemExit(f"the reference has no entry for {', '.join(missing)}")


def mathml(formula: re.Match[str]) -> str:
    """A formula as MathML, which browsers show without a script."""
    display, inline = formula.groups()
    text = latex2mathml.converter.convert((display or inline).strip(), display="block" if display else "inline")
    return text.replace("_", "&#95;")  # no emphasis in Markdown


def collected() -> set[Path]:
    """The chapters, and every file of the repository that they link to."""
    found: set[Path] = set()
    waiting = [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / "docs").glob("*.md"),
    ]
    while waiting:
        file = waiting.pop()
        if file in found or not file.is_file() or not file.is_relative_to(ROOT):
            continue
        found.add(file)
        if file.suffix == ".md":
            links = [link for link in LINK.findall(file.read_text()) if "://" not in link]
            waiting += [(file.parent / link).resolve() for link in links]
    return found


def public_names() -> list[str]:
    """`eqaccel.__all__`, but for what is no object with a docstring."""
    return [name for name in eqaccel.__all__ if name != "__version__"]


def e3nn_names() -> list[str]:
    """`eqaccel.o3.__all__`, but for what has a name in `eqaccel` already."""
    known = {home(name) for name in public_names()}
    return [name for name in (f"o3.{name}" for name in o3.__all__) if home(name) not in known]


def home(name: str) -> str:
    """The path under which a public name is defined."""
    thing = attrgetter(name)(eqaccel)
    return f"{thing.__module__}.{thing.__qualname__}"


def reference() -> str:
    """Every public name of the package, the words of specs, and the errors."""
    kinds = [error for _, error in inspect.getmembers(errors, inspect.isclass) if error.__module__ == errors.__name__]
    words = [tensor_product.Instruction, tensor_product.Path, ConnectionMode, polynomial.Term, linear.LinearPath]
    lines = ["# Python", "", inspect.cleandoc(eqaccel.__doc__ or "").partition("\n\n")[0], ""]
    lines += [f"This is eqaccel {eqaccel.__version__}. `eqaccel.NAME` is each of:", ""]
    lines += entries(map(home, public_names()))
    lines += [
        "## Classes of e3nn",
        "",
        "Imported from `eqaccel.o3`.",
        "",
        *entries(map(home, e3nn_names())),
        "## Training",
        "",
        "Imported from `eqaccel.training`.",
        "",
        *entries(home(f"training.{name}") for name in training.__all__),
        "## Parts of specs",
        "",
        "Imported from `eqaccel.families.tensor_product`, `eqaccel.families.polynomial` and `eqaccel.families.linear`.",
        "",
    ]
    lines += entries(f"{word.__module__}.{word.__qualname__}" for word in words)
    lines += ["## Errors", "", "Imported from `eqaccel.errors`.", ""]
    lines += entries(f"{errors.__name__}.{kind.__qualname__}" for kind in kinds)
    return "\n".join(lines)


def entries(paths: Iterable[str]) -> list[str]:
    """What mkdocstrings replaces by the docstrings of things."""
    return [f"::: {path}\n" for path in paths]


def headers() -> str:
    """What the C++ headers say of themselves, and their text."""
    lines = [
        "# C++",
        "",
        "A program includes these headers; `python -m eqaccel libs` says where they and the libraries lie.",
    ]
    for file in sorted((include_path() / "eqaccel").glob("*.h")):
        text = file.read_text()
        comment, _, code = text.partition("#pragma once\n")
        words = "\n".join(line.removeprefix("//").strip() for line in comment.splitlines())
        lines += ["", f"## eqaccel/{file.name}", "", words, "", "```cpp", code.strip(), "```"]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """The help of the command line."""
    names = ("", "doctor", "cache", "show", "export", "libs")
    lines = ["# Commands", ""]
    for name in names:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([name, "--help"] if name else ["--help"])
        lines += [f"## python -m eqaccel {name}".rstrip(), "", "```text", printed.getvalue().strip(), "```", ""]
    return "\n".join(lines)


GENERATED: dict[str, Callable[[], str]] = {
    "reference.md": reference,
    "reference_cpp.md": headers,
    "commands.md": commands,
    "supported.md": supported,
}

if __name__ == "__main__":
    build()
