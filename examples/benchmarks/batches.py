"""Times steps of torch-sim's dynamics on one cell and on several at once: as its wrapper comes, patched, and converted.

Models have random weights and small forces, and atoms are slow, so that they stay about where they are. A step is
what its user waits for on average: states stay on the device, and what the host does goes on beside what a GPU does.
Neighbours are kept in these steps; evaluations that find those of all cells anew are timed by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import eqaccel
from eqaccel.benchmarks import contests, pictures, report, suite
from eqaccel.benchmarks.models import LIMITS, PEERS
from eqaccel.benchmarks.steps import Prepared
from eqaccel.benchmarks.structures import SYSTEMS, make_sample, read_system
from eqaccel.benchmarks.timing import Timing, free_memory, limited
from eqaccel.patches.calculator import step_state
from eqaccel.patches.copying import duplicated
from eqaccel.patches.torch_state import default_dtype
from eqaccel.step import SKIN

TEMPERATURE = 30.0  # kelvin
TIMESTEP = 0.001  # ps
CONTENDERS = {"eqaccel": "eqaccel", "e3nn": "e3nn", **PEERS}
"""Name in results, by the name on the command line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    contests.add_arguments(parser, CONTENDERS, "mp0-medium", "carbon-64")
    parser.add_argument("--cells", type=suite.counts, default="1,16", help="at once; default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="that are timed")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for the steps of one contender")


def run(arguments: argparse.Namespace) -> report.Results:
    """Every contender on every system."""
    start = time.monotonic()
    torch.set_num_threads(arguments.threads)
    arguments.models = arguments.models or ["mp0-medium"]
    arguments.systems = arguments.systems or ["carbon-64"]
    results = report.new_results("batches", arguments)
    rows: list[dict[str, Any]] = []
    results["rows"] = rows
    jobs = []
    for model, _ in contests.installed(arguments, rows):
        for system in arguments.systems:
            for count in arguments.cells:
                for word in contests.chosen(arguments):
                    rows.append(contests.not_begun(arguments, model, f"{system} x {count}", CONTENDERS[word]))
                    jobs.append((rows[-1], system, count))
    prepared: dict[str, Prepared] = {}
    with contextlib.suppress(KeyboardInterrupt), suite.progress(len(jobs)) as bar:
        for row, system, count in jobs:
            suite.describe_step(bar, f"{row['model']}, {row['system']}, {row['implementation']}")
            left = arguments.time_limit - (time.monotonic() - start)
            if left > 0:
                row |= contests.not_finished(arguments)
                with limited(left):
                    if row["model"] not in prepared:
                        kinds = list(dict.fromkeys(read_system(name)[0] for name in arguments.systems))
                        prepared[row["model"]] = Prepared.of(row["model"], kinds, arguments)
                    row |= _time(prepared[row["model"]], system, count, row["implementation"], arguments)
            if arguments.json:
                report.write(arguments.json, json.dumps(results, indent=1) + "\n")
            bar.update()
    results["run_s"] = time.monotonic() - start
    return results


def _time(prepared: Prepared, system: str, count: int, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a row gets: times of a contender on some cells, or why there are none."""
    free_memory()
    try:
        with default_dtype(prepared.dtype):
            found = _simulate(prepared, system, count, name, arguments)
    except Exception as failure:  # of a peer, of the memory: the others are still to be timed
        found = {"note": contests.note_of(failure)}
    free_memory()
    return found


def _simulate(prepared: Prepared, system: str, count: int, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import torch_sim as ts
    from torch_sim.models.mace import MaceModel

    kind, atoms = read_system(system)
    dtype, device = getattr(torch, arguments.dtype), torch.device(arguments.device)
    model = duplicated(prepared.model).to(arguments.device)
    if name in prepared.case.variants:
        model = prepared.case.variants[name](model, arguments.device)
    wrapper = MaceModel(model, device=device, dtype=dtype)
    if name == "eqaccel":
        eqaccel.patch(wrapper)
    cells = [SYSTEMS[kind](atoms) for _ in range(count)]
    state = ts.io.atoms_to_state(cells, device, dtype)
    kt, dt = (torch.tensor(value, device=device, dtype=dtype) for value in (TEMPERATURE * 8.617e-5, TIMESTEP))
    begin, update = ts.integrators.nve(wrapper, dt=dt * ts.units.MetalUnits.time, kT=kt, seed=0)
    state = begin(state)
    samples, mean = _steps(update, state, arguments)
    row = {"note": "", "atoms": count * len(cells[0]), "cells": count}
    row["step"] = Timing(samples).to_json() | {"mean_ms": mean} | Timing(samples).spread()
    row |= {"atoms_per_s": 1e3 * row["atoms"] / mean} | _own(wrapper)
    if "rebuilds" in row:
        row["anew"] = Timing(_anew(wrapper, state, arguments)).to_json()
    sample = make_sample(kind)
    found = wrapper(ts.io.atoms_to_state([sample], device, dtype))["forces"].double().cpu().numpy()
    expected = prepared.forces[kind]
    row["force_difference"] = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not row["force_difference"] < LIMITS[dtype]:
        return {"note": f"other numbers: relative difference of forces {row['force_difference']:.1e}"}
    return row


def _steps(update: Any, state: Any, arguments: argparse.Namespace) -> tuple[tuple[float, ...], float]:
    """Milliseconds from step to step, and those of a mean step, when the device has done all of them."""
    settle = torch.cuda.synchronize if arguments.device == "cuda" else (lambda: None)
    for _ in range(min(20, arguments.steps)):
        state = update(state)
    settle()
    marks = [time.perf_counter()]
    while len(marks) <= arguments.steps and (len(marks) < 4 or marks[-1] - marks[0] < arguments.budget):
        state = update(state)
        marks.append(time.perf_counter())
    settle()
    mean = (time.perf_counter() - marks[0]) / (len(marks) - 1)
    return tuple(1e3 * float(taken) for taken in np.diff(marks)), 1e3 * mean


def _anew(wrapper: Any, state: Any, arguments: argparse.Namespace) -> tuple[float, ...]:
    """Milliseconds of evaluations of a patched wrapper that find the neighbours of all cells anew."""
    settle = torch.cuda.synchronize if arguments.device == "cuda" else (lambda: None)
    places = state.positions, state.positions + 2 * SKIN  # the same cells, so that there are as many edges
    step, samples = step_state(wrapper).step, []
    for number in range(min(20, arguments.steps) + 3):
        state.positions, before = places[number % 2], step.rebuilds
        settle()
        begin = time.perf_counter()
        wrapper(state)
        settle()
        samples.append(1e3 * (time.perf_counter() - begin))
        if number and step.rebuilds != before + 1:
            raise RuntimeError(f"neighbours were found anew {step.rebuilds - before} times in one evaluation")
    state.positions = places[0]
    return tuple(samples[3:])


def _own(wrapper: Any) -> dict[str, Any]:
    """What the step of a patched wrapper did; nothing for others."""
    state = step_state(wrapper)
    if state is None or state.step is None:
        return {} if state is None else {"note": state.note()}
    return {"calls": state.calls, "rebuilds": state.step.rebuilds, "captures": dict(state.step.captures)}


def format_table(results: report.Results) -> str:
    """Every contender on every system."""
    own = _means(results)
    lines = []
    for row in results["rows"]:
        cells = [f"{row['model']}, {row['system'] or '-'}", row["implementation"]]
        if "step" in row:
            ratio = f" ({row['step']['mean_ms'] / own[row['system']]:.2f}x)" if row["system"] in own else ""
            cells.append(f"{row['step']['mean_ms']:.2f}{ratio}")
            cells.append(f"{row['step']['p10_ms']:.2f} to {row['step']['p90_ms']:.2f}")
            cells.append(f"{row['atoms_per_s']:.3g}")
        else:
            cells += ["-"] * 3
        cells.append(f"{row['rebuilds']}, {sum(row['captures'].values())}" if "rebuilds" in row else "-")
        cells.append(f"{row['anew']['median_ms']:.2f}" if "anew" in row else "-")
        cells.append(f"{row['force_difference']:.0e}" if "force_difference" in row else "-")
        lines.append([*cells, row["note"]])
    header = ["model, cells", "implementation", "step, ms", "10 to 90 %, ms", "atoms a second", "lists, recordings"]
    header += ["with new lists, ms", "difference of forces", "note"]
    return "In brackets: times that of eqaccel.\n\n" + report.table(lines, header)


def compact(results: report.Results) -> str:
    """A line for each system, a column for each contender."""
    names = list(dict.fromkeys(row["implementation"] for row in results["rows"]))
    systems = list(dict.fromkeys(row["system"] for row in results["rows"] if row["system"]))
    own = _means(results)

    def cell(system: str, name: str) -> str:
        wanted = (row for row in results["rows"] if (row["system"], row["implementation"]) == (system, name))
        times = [row["step"]["mean_ms"] for row in wanted if "step" in row]
        if not times:
            return "-"
        mean = statistics.fmean(times)
        ratio = f" ({mean / own[system]:.1f}x)" if name != "eqaccel" and system in own else ""
        return f"{mean:.2f} ms{ratio}"

    lines = [[system.replace("-", " "), *(cell(system, name) for name in names)] for system in systems]
    return report.table(lines, ["a step of torch-sim's dynamics", *names])


def draw(results: report.Results, path: Path) -> list[Path]:
    """Bars for each system and contender."""
    names = dict.fromkeys(row["implementation"] for row in results["rows"])
    found = {name: times for name in names if (times := _means(results, name))}
    systems = list(dict.fromkeys(system for times in found.values() for system in times))
    series = {name: [times.get(system) for system in systems] for name, times in found.items()}
    return pictures.grouped(results, path, systems, series, "ms", "A step of torch-sim's dynamics", log=False)


def _means(results: report.Results, name: str = "eqaccel") -> dict[str, float]:
    """Milliseconds of a mean step of a contender, by system."""
    rows = (row for row in results["rows"] if row["implementation"] == name and "step" in row)
    return {row["system"]: row["step"]["mean_ms"] for row in rows}
