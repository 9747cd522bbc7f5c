"""Molecular dynamics before and after `eqaccel.patch`: what the examples for MACE and NequIP have in common.

A short run is timed with the calculator as it is; one call patches it in place; the same run starts again from the same
frame and goes on for longer. Printed and saved to ``--out``: speed, the largest force difference on the last frame of
the unpatched run, energy drift, a picture and the trajectory. Energies are in eV, lengths in angstrom, times in fs.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.calculator import Calculator
from ase.io.trajectory import Trajectory
from ase.md.langevin import Langevin
from ase.md.md import MolecularDynamics
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.md.verlet import VelocityVerlet
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from prettytable import PrettyTable
from tqdm import tqdm

import eqaccel

WARM_UP_STEPS = 3  # the first steps compile and allocate, so they are run before the clock starts


@dataclass(frozen=True)
class Run:
    """What was measured in one run.

    Attributes:
        label: Name in the table and in the picture.
        times: Time of every step since the start, in fs.
        energies: Total energy at these times, in meV per atom above the first.
        step_ms: Wall-clock milliseconds of every step.
        peak_memory_mb: Largest GPU memory in use during the run, None on a CPU.
    """

    label: str
    times: list[float]
    energies: list[float]
    step_ms: list[float]
    peak_memory_mb: float | None

    @property
    def ms_per_step(self) -> float:
        """Median wall-clock time of a step, which a busy machine disturbs least."""
        return float(np.median(self.step_ms))

    @property
    def ns_per_day(self) -> float:
        """Simulated time per day of wall-clock time."""
        return 86400.0 * 1e-6 * self.times[1] / (1e-3 * self.ms_per_step)

    @property
    def drift(self) -> float | None:
        """Slope of the total energy in meV/atom/ps, without the first quarter, in which the crystal thermalises.

        None for less than 100 fs: within a vibration the total energy of Verlet swings, and a slope says nothing.
        """
        if self.times[-1] < 100:
            return None
        start = len(self.times) // 4
        return 1e3 * float(np.polyfit(self.times[start:], self.energies[start:], 1)[0])


def add_arguments(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Adds the options that every example has; ``defaults`` replaces some of their defaults."""
    parser.add_argument("--steps", type=int, default=200, help="steps of the patched run")
    parser.add_argument("--reference-steps", type=int, default=20, help="steps of the unpatched run")
    parser.add_argument("--ensemble", choices=("nve", "langevin"), default="nve")
    parser.add_argument("--temperature", type=float, default=400.0, help="in kelvin")
    parser.add_argument("--timestep", type=float, default=2.0, help="in fs")
    parser.add_argument("--interval", type=int, default=10, help="steps between frames of the trajectory")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="of velocities, the structure and the thermostat")
    parser.add_argument("--out", type=Path, default=Path("eqaccel_md"), help="folder of the results")
    parser.set_defaults(**defaults)


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, and finds the device if it is left open."""
    options = parser.parse_args(arguments)
    if min(options.steps, options.reference_steps, options.interval) < 1:
        parser.error("--steps, --reference-steps and --interval: expected at least 1")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    return options


def thermalize(atoms: Atoms, temperature: float, rng: np.random.Generator) -> None:
    """Gives atoms velocities of a temperature in kelvin, without any of the centre of mass."""
    thermalize_momenta(atoms, temperature_K=temperature, rng=rng)
    Stationary(atoms)


def dynamics_of(atoms: Atoms, options: argparse.Namespace) -> MolecularDynamics:
    """Returns the integrator that the command line asks for; its random numbers are the same in every run."""
    if options.ensemble == "nve":
        return VelocityVerlet(atoms, options.timestep * units.fs)
    return Langevin(
        atoms,
        options.timestep * units.fs,
        temperature_K=options.temperature,
        friction=0.01 / units.fs,
        fixcm=False,
        rng=np.random.default_rng(options.seed),
    )


def simulate(
    label: str, start: Atoms, calculator: Calculator, steps: int, options: argparse.Namespace
) -> tuple[Run, Atoms]:
    """Runs ``steps`` steps from ``start`` and returns what was measured, and the last frame.

    The trajectory goes to ``--out``; each step is timed on its own, and the calculator returns NumPy arrays, so the
    device has finished when a step ends.
    """
    on_gpu = calculator.device.type == "cuda"
    warm_up = start.copy()
    warm_up.calc = calculator
    dynamics_of(warm_up, options).run(WARM_UP_STEPS)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(calculator.device)

    atoms = start.copy()
    atoms.calc = calculator
    dynamics = dynamics_of(atoms, options)
    first = atoms.get_total_energy()
    times, energies, step_ms = [0.0], [0.0], []
    with Trajectory(options.out / f"{label}.traj", "w", atoms) as trajectory:
        trajectory.write()
        for step in tqdm(range(1, steps + 1), desc=label, unit="step"):
            begin = time.perf_counter()
            dynamics.run(1)
            step_ms.append(1e3 * (time.perf_counter() - begin))
            times.append(step * options.timestep)
            energies.append(1e3 * (atoms.get_total_energy() - first) / len(atoms))
            if step % options.interval == 0 or step == steps:
                trajectory.write()
    peak = torch.cuda.max_memory_allocated(calculator.device) / 2**20 if on_gpu else None
    return Run(label, times, energies, step_ms, peak), atoms


def forces_of(frame: Atoms, calculator: Calculator) -> np.ndarray:
    """Returns freshly computed forces, shape (atoms, 3), in eV/A."""
    calculator.reset()  # the calculator keeps its last results, which the same frame would be answered with
    return calculator.get_forces(frame)


def results_table(runs: list[Run], difference: float, ensemble: str) -> PrettyTable:
    """Returns the comparison as text, a column per run."""
    before, after = runs
    table = PrettyTable(["", before.label, after.label])
    table.align = "r"
    table.align[""] = "l"
    table.add_row(["ms per step", *(f"{run.ms_per_step:.2f}" for run in runs)])
    table.add_row(["ns per day", *(f"{run.ns_per_day:.3f}" for run in runs)])
    table.add_row(["speed-up", "1.00", f"{before.ms_per_step / after.ms_per_step:.2f}"])
    table.add_row(["largest force difference (eV/A)", "", f"{difference:.1e}"])
    if ensemble == "nve":
        drifts = ["too short" if run.drift is None else f"{run.drift:.3f}" for run in runs]
        table.add_row(["energy drift (meV/atom/ps)", *drifts])
    if after.peak_memory_mb is not None:
        table.add_row(["peak GPU memory (MiB)", *(f"{run.peak_memory_mb:.0f}" for run in runs)])
    return table


def draw_speed(axes: Axes, labels: list[str], speeds: list[float], digits: int, factor: float, name: str) -> None:
    """Draws a bar for each run; the last is ``factor`` times as fast as the first."""
    bars = axes.bar(labels, speeds, color=[*["0.6"] * (len(speeds) - 1), "tab:blue"])
    *others, last = (f"{speed:.{digits}f}" for speed in speeds)
    axes.bar_label(bars, [*others, f"{last}\n({factor:.1f}x faster)"])
    axes.set(ylabel=name)
    axes.margins(y=0.2)


def save_picture(figure: Figure, path: Path) -> None:
    """Writes a picture, whose axes have no frame above and at the right."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def save_results(
    options: argparse.Namespace, device: str, packages: tuple[str, ...], measured: dict[str, object]
) -> dict[str, object]:
    """Writes ``results.json`` to ``--out``: what was asked for, on what, with which versions, and what was measured."""
    results = {
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in packages} | {"eqaccel": eqaccel.__version__},
    } | measured
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    return results


def processor(device: torch.device) -> str:
    """What a device is called in the results."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def measured_runs(before: Run, after: Run) -> dict[str, object]:
    """What the results say of two runs of dynamics."""
    runs = [
        asdict(run) | {"ms_per_step": run.ms_per_step, "ns_per_day": run.ns_per_day, "drift": run.drift}
        for run in (before, after)
    ]
    return {"speedup": before.ms_per_step / after.ms_per_step, "runs": runs}


def draw(runs: list[Run], title: str, path: Path) -> None:
    """Draws total energy over time, and the time per step of both runs."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    figure.suptitle(title)
    for run, style in zip(runs, ({"color": "0.6", "lw": 4}, {"color": "tab:blue", "lw": 1.5}), strict=True):
        left.plot(run.times, run.energies, label=run.label, **style)
    left.set(xlabel="time (fs)", ylabel="total energy (meV/atom)")
    left.legend(frameon=False)
    speeds = [run.ms_per_step for run in runs]
    draw_speed(right, [run.label for run in runs], speeds, 1, speeds[0] / speeds[1], "ms per step")
    save_picture(figure, path)


def compare(
    calculator: Calculator, start: Atoms, options: argparse.Namespace, title: str, packages: tuple[str, ...]
) -> dict[str, object]:
    """Runs the comparison and returns what is written to ``results.json``.

    Args:
        calculator: Of MACE or NequIP; it is patched here.
        start: First frame of both runs, with velocities.
        options: What `parse` returned.
        title: What the picture shows.
        packages: Names of the packages whose versions are written down.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{len(start)} atoms of {start.get_chemical_formula()} on {options.device} in {options.dtype}")
    before, frame = simulate("unpatched", start, calculator, options.reference_steps, options)
    expected = forces_of(frame, calculator)

    begin = time.perf_counter()
    eqaccel.patch(calculator)
    patch_seconds = time.perf_counter() - begin
    print(f"\n{eqaccel.report(calculator)}\npatched and verified in {patch_seconds:.1f} s\n")

    difference = float(np.abs(forces_of(frame, calculator) - expected).max())
    after, _ = simulate("patched", start, calculator, options.steps, options)

    print(f"\n{results_table([before, after], difference, options.ensemble)}")
    measured = {"atoms": len(start), "patch_seconds": patch_seconds, "max_force_difference": difference}
    measured |= measured_runs(before, after)
    results = save_results(options, processor(calculator.device), packages, measured)
    draw([before, after], f"{title}, {len(start)} atoms", options.out / "md.png")
    print(f"wrote results.json, md.png, unpatched.traj and patched.traj to {options.out}")
    return results
