"""What benchmarks of steps of whole models share: their options, and rows of what is not timed (yet)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from typing import Any

from eqaccel.benchmarks import report, suite
from eqaccel.benchmarks.families import FAMILIES, ModelCase
from eqaccel.benchmarks.structures import read_system
from eqaccel.benchmarks.timing import describe

FULL = "out of memory"
"""The note of what died of that."""


def add_arguments(parser: argparse.ArgumentParser, contenders: Iterable[str], models: str, systems: str) -> None:
    """Options of models, systems and contenders.

    Args:
        parser: Where to add them.
        contenders: Their names on the command line.
        models: What the default is, in words.
        systems: An example of systems.
    """
    report.add_arguments(parser)
    known = ", ".join(FAMILIES)
    parser.add_argument("--models", type=suite.names(FAMILIES), help=f"some of {known}; default: {models}")
    parser.add_argument("--systems", type=_systems, help=f"as {systems}; default: the model's")
    parser.add_argument("--elements", type=int, help="instead of those of a MACE model")
    parser.add_argument("--channels", type=int, help="of every irrep, instead of those of the model")
    choice = [name for name in contenders if name != "eqaccel"]
    parser.add_argument(
        "--compare", type=suite.names([*choice, "none"]), default="e3nn,cue,oeq", help=f"none, or some of {choice}"
    )
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which whatever runs is ended")


def _systems(text: str) -> list[str]:
    """A parser of comma-separated names of systems."""
    try:
        return [name for name in text.split(",") if read_system(name)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def chosen(arguments: argparse.Namespace) -> list[str]:
    """Names of the contenders on the command line, eqaccel first."""
    return ["eqaccel", *(word for word in arguments.compare if word != "none")]


def installed(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[tuple[str, type[ModelCase]]]:
    """The chosen models and what their library does with them; one whose library is missing gets a row that says so."""
    for model in arguments.models:
        try:
            case = FAMILIES[model].load()
        except ImportError as missing:
            rows.append(_row(model, None, "eqaccel", describe(missing)))
        else:
            yield model, case


def not_begun(arguments: argparse.Namespace, model: str, system: str, implementation: str) -> dict[str, Any]:
    """The row of what is to be timed."""
    return _row(model, system, implementation, f"not begun within {arguments.time_limit:g} s")


def not_finished(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is to be known of a row while it is timed."""
    return {"note": f"not finished within {arguments.time_limit:g} s", "begun": True}


def _row(model: str, system: str | None, implementation: str, note: str) -> dict[str, Any]:
    known = {"model": model, "system": system, "atoms": None, "implementation": implementation}
    return known | {"note": note, "begun": False}


def note_of(failure: Exception | str) -> str:
    """A failure on one line; what TorchScript and compilers make of torch's error counts as that."""
    if FULL in str(failure).lower():
        return FULL
    return failure if isinstance(failure, str) else describe(failure)
