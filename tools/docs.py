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
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from operator import attrgetter
from pathlib import Path

import latex2mathml.converter

import eqaccel
from eqaccel import errors, o3, settings, training
from eqaccel.__main__ import main
from eqaccel.families import linear, polynomial, tensor_product
from eqaccel.families.tensor_product import ConnectionMode
from eqaccel.patches.finder import KINDS, OTHERS
from eqaccel.patches.replacement import Replacement
from eqaccel.runtime import include_path
from eqaccel.targets import TARGETS, Target

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


def supported() -> str:
    """Tables of the targets, kinds of models, couplings and settings that the code knows."""
    rows = [
        (f"`{target.name}`", f"{target.shared_bytes // 1024} KiB of shared memory a block")
        for target in TARGETS.values()
        if target.is_gpu
    ]
    processors = [
        (f"`{target.name}`", f"{target.registers} vector registers of {target.simd_bytes} bytes")
        for target in TARGETS.values()
        if not target.is_gpu
    ]
    limits = [
        ("highest degree of an irrep", str(tensor_product.MAX_DEGREE)),
        ("highest degree of a polynomial", str(polynomial.MAX_POWER)),
    ]
    variables = [(f"`{name}`", meaning) for name, meaning in settings.VARIABLES.items()]
    return "\n".join(
        [
            "# What is supported",
            "",
            "Made from the tables that the code reads. [Models](models.md) says what was run, and on which machines.",
            *table("GPUs that kernels are planned for", ("target", "plan"), rows),
            *table("CPUs", ("target", "plan"), processors),
            *table("Kinds of models", ("kind", "", "files"), kinds()),
            *table("Models and engines", ("kind", "engine", "by", "what is fast", *BACKENDS), engines()),
            *table("Modules that are replaced", ("in models of", "module"), replaced()),
            *table("Operators", ("", ""), limits),
            *table("Tensor products", ("connection mode", "weights", *BACKENDS), modes()),
            *table("Settings", ("environment variable", "meaning"), variables),
            "",
        ]
    )


def kinds() -> list[tuple[str, ...]]:
    """The kinds of models, and their files."""
    return [
        (
            kind.name,
            first_line(type(kind)),
            "of torch.save" + (f"; {kind.file_format.name}" if kind.file_format else ""),
        )
        for kind in (*KINDS, OTHERS)
    ]


def engines() -> list[tuple[str, ...]]:
    """What runs models, what they are run by there, and what of it is fast on each backend."""
    step, modules = "neighbours, model and forces", "the modules below"
    recorded = ("yes", "yes, as a CUDA graph", "not run")
    rows = []
    for kind in (*KINDS, OTHERS):
        if kind.stepping:
            rows.append((kind.name, "ASE", f"`{kind.stepping.class_name}`", step, *recorded))
        if kind.exporting:
            rows.append((kind.name, "ASE, OpenMM", "`eqaccel.Calculator`", step, *recorded))
        if kind.wrapping:
            rows.append((kind.name, "torch-sim", f"`{kind.wrapping.class_name}`", step, *recorded))
        if kind.exporting:
            one_rank = ("yes", "yes, on one rank as a CUDA graph", "not run")
            rows.append((kind.name, "LAMMPS", "`pair_style eqaccel`", "model and forces", *one_rank))
            rows.append((kind.name, "C++", "`eqaccel/model.h`", "model and forces", "yes", "yes", "not run"))
        rows.append((kind.name, "Python, training", "`eqaccel.patch(model)`", modules, "yes", "yes", "not run"))
    return rows


def replaced() -> list[tuple[str, str]]:
    """The classes of modules that have a replacement, by the kind of model that they are in."""
    names = {type(kind).__module__.rpartition(".")[0]: kind.name for kind in (*KINDS, OTHERS)}
    found, waiting = [], Replacement.__subclasses__()
    while waiting:
        replacement = waiting.pop()
        waiting += replacement.__subclasses__()
        if not replacement.__name__.startswith("_"):
            folder = replacement.__module__.rpartition(".")[0]
            found.append((names.get(folder, "any kind"), first_line(replacement)))
    return sorted(set(found))


BACKENDS = {"CPU": "cpu-generic", "CUDA": "sm_90", "HIP": "gfx90a"}
"""Backends in the table of connection modes, and a target of each."""


def modes() -> list[tuple[str, ...]]:
    """The directions that have kernels, by connection mode, weights and backend."""
    rows = []
    for mode, weighted in product(ConnectionMode, (True, False)):
        try:
            spec = mode_spec(mode, weighted)
        except errors.SpecError:
            continue  # e3nn has no such instruction either
        cells = (kernel_directions(spec, TARGETS[target]) for target in BACKENDS.values())
        rows.append((f"`{mode.value}`", "yes" if weighted else "no", *cells))
    return rows


def mode_spec(mode: ConnectionMode, weighted: bool) -> tensor_product.TensorProductSpec:
    """A product of one instruction, whose multiplicities fit its mode."""
    muls = (3, 2) if mode.pairs is tensor_product.Pairs.ALL else (3, 3)
    dense = 4 if weighted or mode.pairs is tensor_product.Pairs.ALL else 1
    mixing = tensor_product.Mixing
    mul = {
        mixing.OWN: mode.pairs.count(*muls),
        mixing.OVER_V: muls[0],
        mixing.OVER_U: muls[1],
        mixing.DENSE: dense,
    }[mode.mixing]
    return tensor_product.TensorProductSpec(f"{muls[0]}x1o", f"{muls[1]}x1o", f"{mul}x0e", [(0, 0, 0, mode, weighted)])


def kernel_directions(spec: tensor_product.TensorProductSpec, target: Target) -> str:
    """The directions for which there is a kernel."""
    family = tensor_product.TENSOR_PRODUCT
    return ", ".join(d.value.replace("_", " ") for d in family.directions if family.body(spec, d, target, 4))


def first_line(thing: object) -> str:
    """The sentence that a docstring begins with."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A section with a table."""
    if not rows:
        raise ValueError(f"rows: expected some for the table '{title}', got none")
    lines = ["", f"## {title}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


GENERATED: dict[str, Callable[[], str]] = {
    "reference.md": reference,
    "reference_cpp.md": headers,
    "commands.md": commands,
    "supported.md": supported,
}

if __name__ == "__main__":
    build()
