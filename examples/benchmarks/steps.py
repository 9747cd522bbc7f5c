"""Times whole steps of molecular dynamics in ASE, as calculators come, patched by eqaccel, and with its peers.

`--compare lammps,lammps-2` times the steps of LAMMPS as well, with the patched model exported, on one rank and on two:
each has a GPU of its own where there are two.

Models have random weights, and forces so small that springs hold the atoms to their sites: they move, and change their
neighbours, as in the real thing. Every contender gets a model of its own, and has to give the forces of the model as it
comes on a small cell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import eqaccel
from eqaccel.benchmarks import contests, lammps, report, suite
from eqaccel.benchmarks.dynamics import own_step, parts, simulate
from eqaccel.benchmarks.families import FAMILIES, ModelCase
from eqaccel.benchmarks.models import LIMITS, PEERS
from eqaccel.benchmarks.structures import make_sample, make_system, read_system
from eqaccel.benchmarks.timing import free_memory, limited
from eqaccel.patches.calculator import step_state
from eqaccel.patches.copying import duplicated
from eqaccel.patches.program import WORTH_A_PROGRAM
from eqaccel.patches.torch_state import default_dtype

MEAN_FORCE = 0.1  # eV/A, of a model on the small cell where it is largest; springs are stronger

Build = Callable[[type[ModelCase], torch.nn.Module, str], Any]
"""Makes the calculator of a contender out of the library's case, a model of its own and a device."""


def _converted(peer: str) -> Build:
    return lambda case, model, device: case.calculator(case.variants[peer](model, device), device)


def _patched(case: type[ModelCase], model: torch.nn.Module, device: str) -> Any:
    return eqaccel.patch(case.calculator(model, device))


CONTENDERS: dict[str, tuple[str, Build]] = {
    "eqaccel": ("eqaccel", _patched),
    "e3nn": ("e3nn", lambda case, model, device: case.calculator(model, device)),
    **{word: (name, _converted(name)) for word, name in PEERS.items()},
    "compile": ("e3nn compiled", lambda case, model, device: case.calculator(model, device, compiled=True)),
    "lammps": ("eqaccel in LAMMPS", _patched),
    "lammps-2": ("eqaccel in LAMMPS, 2 ranks", _patched),
}
"""Name in results and how to make the calculator, by the name on the command line."""

RANKS = {"lammps": 1, "lammps-2": 2}
"""Of LAMMPS, for the contenders that it runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    contests.add_arguments(parser, CONTENDERS, "mp0-medium", "carbon-1000,silicon-1000,water-5184")
    parser.add_argument("--peer-atoms", type=int, help="atoms up to which peers run; default: all")
    parser.add_argument("--warm-up", type=int, help="untimed steps (20 or 1; 50 of eqaccel on a CPU)")
    parser.add_argument("--steps", type=int, help="steps that are timed (200 or 10)")
    parser.add_argument("--budget", type=float, help="seconds for the steps of one contender on one system (10 or 60)")


def run(arguments: argparse.Namespace) -> report.Results:
    """Every contender on every system: eqaccel on all of them first, then its peers, one after the other."""
    start = time.monotonic()
    gpu = arguments.device == "cuda"
    torch.set_num_threads(arguments.threads)
    arguments.models = arguments.models or ["mp0-medium"]
    arguments.warm_up = arguments.warm_up or (20 if gpu else 1)
    arguments.steps = arguments.steps or (200 if gpu else 10)
    arguments.budget = arguments.budget or (10.0 if gpu else 60.0)
    results = report.new_results("step", arguments)
    jobs, blank = _jobs(arguments)
    results["rows"] = blank
    prepared: dict[str, Prepared] = {}
    full: dict[tuple[str, str, str], int] = {}  # atoms at which a contender ran out of memory
    with contextlib.suppress(KeyboardInterrupt), suite.progress(len(jobs)) as bar:
        for row, word in jobs:
            suite.describe_step(bar, f"{row['model']}, {row['system']}, {row['implementation']}")
            left = arguments.time_limit - (time.monotonic() - start)
            kind, atoms = read_system(row["system"])
            too_large = full.get((row["model"], kind, word), math.inf)
            if left <= 0:
                pass  # the row says so already
            elif atoms > too_large:
                row |= {"note": f"not tried: {contests.FULL} with {too_large} atoms", "begun": True}
            else:
                row |= contests.not_finished(arguments)
                with limited(left):
                    if row["model"] not in prepared:
                        prepared[row["model"]] = Prepared.of(row["model"], _kinds(jobs, row["model"]), arguments)
                    row |= _time(prepared[row["model"]], row["system"], word, arguments)
                if row["note"] == contests.FULL:
                    full[row["model"], kind, word] = atoms
            if arguments.json:
                report.write(arguments.json, json.dumps(results, indent=1) + "\n")
            bar.update()
    results["run_s"] = time.monotonic() - start
    return results


Job = tuple[dict[str, Any], str]
"""A row of the results and the name of the contender."""


def _jobs(arguments: argparse.Namespace) -> tuple[list[Job], list[dict[str, Any]]]:
    """What to do, in this order, and all rows, in the order of the table."""
    words = contests.chosen(arguments)
    rows: list[dict[str, Any]] = []
    jobs: list[Job] = []
    for model, family in contests.installed(arguments, rows):
        for system in arguments.systems or family.systems(model, arguments.device):
            atoms = read_system(system)[1]
            for word in words:
                if word == "eqaccel" or arguments.peer_atoms is None or atoms <= arguments.peer_atoms:
                    rows.append(contests.not_begun(arguments, model, system, CONTENDERS[word][0]))
                    jobs.append((rows[-1], word))
    return sorted(jobs, key=lambda job: words.index(job[1])), rows


def _kinds(jobs: Sequence[Job], model: str) -> list[str]:
    return list(dict.fromkeys(read_system(row["system"])[0] for row, _ in jobs if row["model"] == model))


@dataclass(frozen=True)
class Prepared:
    """A model that contenders get copies of.

    Attributes:
        case: What its library does with it.
        model: The model as it comes, on the CPU.
        forces: What it gives on the small cell of each kind of system, in eV/A.
        dtype: What torch's default has to be while its calculators work.
    """

    case: type[ModelCase]
    model: torch.nn.Module
    forces: dict[str, np.ndarray]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, kinds: Sequence[str], arguments: argparse.Namespace) -> Prepared:
        """Builds a model whose forces are small on all kinds of systems."""
        case = FAMILIES[name].load()
        dtype = case.working_dtype(getattr(torch, arguments.dtype))
        with default_dtype(dtype):
            model = case.plain_model(name, arguments)
            calculator = case.calculator(duplicated(model), "cpu")
            forces = {kind: calculator.get_forces(make_sample(kind)) for kind in kinds}
            factor = MEAN_FORCE / max(float(np.linalg.norm(found, axis=1).mean()) for found in forces.values())
            case.multiply_energies(model, factor)
        return cls(case, model, {kind: factor * found for kind, found in forces.items()}, dtype)


def _time(prepared: Prepared, system: str, word: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a row gets: times of a contender on a system, or why there are none."""
    free_memory()
    try:
        with default_dtype(prepared.dtype):
            found = _simulate(prepared, system, word, arguments)
    except Exception as failure:  # of a peer, of the memory: the others are still to be timed
        found = {"note": contests.note_of(failure)}
    if word == "compile":
        torch.compiler.reset()
    free_memory()
    return found


def _simulate(prepared: Prepared, system: str, word: str, arguments: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    model = duplicated(prepared.model).to(arguments.device)
    calculator = CONTENDERS[word][1](prepared.case, model, arguments.device)
    setup_s = time.perf_counter() - start
    if word in RANKS:
        options = {name: getattr(arguments, name) for name in ("threads", "warm_up", "steps", "budget")}
        row, found = lammps.simulate(calculator, system, arguments.device, ranks=RANKS[word], **options)
        return _checked(row, found, prepared, system, arguments)
    atoms = make_system(system)
    atoms.calc = calculator
    warm_up = arguments.warm_up
    if word == "eqaccel" and arguments.device == "cpu":  # a user's simulation is longer than these calls
        warm_up = max(warm_up, WORTH_A_PROGRAM)
    run = simulate(atoms, warm_up, arguments.steps, arguments.budget)
    row = run.to_json() | {"note": "", "atoms": len(atoms), "setup_s": setup_s} | _own(calculator)
    step = own_step(calculator)
    shares = None if step is None else parts(run, step)
    if shares is not None:
        row["parts"] = shares
    found = calculator.get_forces(make_sample(read_system(system)[0]))
    return _checked(row, found, prepared, system, arguments)


def _checked(
    row: dict[str, Any], found: np.ndarray, prepared: Prepared, system: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """A row, if forces on the small cell are those of the model as it comes."""
    expected = prepared.forces[read_system(system)[0]]
    row["force_difference"] = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not row["force_difference"] < LIMITS[getattr(torch, arguments.dtype)]:
        return {"note": f"other numbers: relative difference of forces {row['force_difference']:.1e}"}
    return row


def _own(calculator: Any) -> dict[str, Any]:
    """What the step of a patched calculator did; nothing for others."""
    state = step_state(calculator)
    if state is None:
        return {}
    if state.step is None:
        return {"note": state.note()}
    reason = state.step.not_captured if state.step.device.type == "cuda" else ""
    counts = {"calls": state.calls, "rebuilds": state.step.rebuilds, "captures": dict(state.step.captures)}
    return counts | {"note": f"no CUDA graph: {reason}" if reason else ""}
