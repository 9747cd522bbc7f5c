"""Relaxes many small alloy cells in batches with torch-sim, before and after `eqaccel.patch`.

    python examples/torchsim_relax.py                                  # 200 cells of Cu and Au of 4 to 108 atoms
    python examples/torchsim_relax.py --structures 2000 --device cuda
    python examples/torchsim_relax.py --model my.model --dtype float32
    python examples/torchsim_relax.py --device cuda --cuequivariance   # and as MACE's own converter makes it

Positions and cells are relaxed by torch-sim's FIRE, as many cells at a time as ``--batch-atoms`` allows: those that
have converged make room for others. One call patches torch-sim's wrapper of the model in place. The unpatched wrapper
relaxes the first few cells only, because it takes long; so does one whose model MACE has converted for cuEquivariance,
if that is asked for. Printed and saved to ``--out``: structures a second, how far
the relaxed energies differ, a picture and the relaxed structures. Energies are in eV, lengths in angstrom.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import ase.io
import numpy as np
import torch
import torch_sim as ts
from ase import Atoms
from matplotlib.figure import Figure
from md import draw_speed, processor, save_picture, save_results
from prettytable import PrettyTable
from torch_sim.models.mace import MaceModel
from train_alloy import COMPOSITIONS, LATTICE, ROOT, alloy

import eqaccel


@dataclass(frozen=True)
class Run:
    """What was measured in one run.

    Attributes:
        label: Name in the table and in the picture.
        structures: Number of structures that were relaxed.
        seconds: Wall-clock time.
        processor_seconds: Time that all processor cores spent on it, which other programs disturb less.
        energies: Relaxed energy of each structure, in eV per atom.
    """

    label: str
    structures: int
    seconds: float
    processor_seconds: float
    energies: list[float]

    @property
    def rate(self) -> float:
        """Structures a second."""
        return self.structures / self.seconds

    @property
    def processor_rate(self) -> float:
        """Structures for each second of one processor core."""
        return self.structures / self.processor_seconds


def cells(count: int, seed: int) -> list[Atoms]:
    """Returns random alloys of different sizes and compositions, strained and shaken."""
    rng = np.random.default_rng(seed)
    structures = []
    for _ in range(count):
        strain = rng.normal(scale=0.02, size=(3, 3))
        sizes = tuple(int(size) for size in rng.integers(1, 4, size=3))
        atoms = alloy(sizes, rng.choice(COMPOSITIONS), (strain + strain.T) / 2, rng)
        atoms.rattle(0.1, rng=rng)
        structures.append(atoms)
    return structures


def relax(
    label: str, wrapper: MaceModel, structures: list[Atoms], options: argparse.Namespace
) -> tuple[Run, list[Atoms]]:
    """Relaxes structures in batches; returns what was measured, and the relaxed structures."""
    state = ts.io.atoms_to_state(structures, wrapper.device, wrapper.dtype)
    # A limit of its own, since memory cannot be measured on a CPU.
    batcher = ts.InFlightAutoBatcher(wrapper, memory_scales_with="n_atoms", max_memory_scaler=options.batch_atoms)
    wrapper(state[:2])  # compiles and allocates, before the clock starts
    begin, processor_begin = time.perf_counter(), time.process_time()
    relaxed = ts.optimize(
        state,
        wrapper,
        optimizer=ts.unit_cell_fire,
        convergence_fn=ts.generate_force_convergence_fn(options.force_tol),
        autobatcher=batcher,
        max_steps=options.max_steps * len(structures),  # it counts the steps of all batches together
    )
    energies = (relaxed.energy / relaxed.n_atoms_per_system).tolist()  # the device has finished
    seconds, processor_seconds = time.perf_counter() - begin, time.process_time() - processor_begin
    return Run(label, len(structures), seconds, processor_seconds, energies), ts.io.state_to_atoms(relaxed)


def results_table(runs: list[Run], difference: float) -> PrettyTable:
    """Returns the comparison as text, a column per run; the first one is of the unpatched model."""
    before = runs[0]
    table = PrettyTable(["", *(run.label for run in runs)])
    table.align = "r"
    table.align[""] = "l"
    table.add_row(["structures", *(run.structures for run in runs)])
    table.add_row(["structures a second", *(f"{run.rate:.2f}" for run in runs)])
    table.add_row(["speed-up", *(f"{run.rate / before.rate:.2f}" for run in runs)])
    table.add_row(["structures a second of one core", *(f"{run.processor_rate:.2f}" for run in runs)])
    table.add_row(
        ["speed-up by processor time", *(f"{run.processor_rate / before.processor_rate:.2f}" for run in runs)]
    )
    table.add_row(
        ["largest difference of relaxed energies (meV/atom)", *[""] * (len(runs) - 1), f"{1e3 * difference:.1e}"]
    )
    return table


def converted(options: argparse.Namespace) -> MaceModel:
    """Returns torch-sim's wrapper of the model as MACE converts it for cuEquivariance."""
    import cuequivariance_torch  # noqa: F401  (MACE itself would build a slow model without it)
    from mace.cli.convert_e3nn_cueq import run as convert

    dtype = getattr(torch, options.dtype)
    model = torch.load(options.model, map_location=options.device, weights_only=False).to(dtype)
    default = torch.get_default_dtype()
    try:
        converted = convert(model, device=options.device)
    except RuntimeError:
        # Made without cuEquivariance, it has all couplings, and yet says that it has the independent ones alone.
        model.use_reduced_cg = False
        converted = convert(model, device=options.device)
    finally:
        torch.set_default_dtype(default)
    return MaceModel(converted, device=torch.device(options.device), dtype=dtype)


def draw(runs: list[Run], relaxed: list[Atoms], title: str, path: Path) -> None:
    """Draws how large the relaxed cells are, and structures a second of all runs; the last is of the patched model."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    figure.suptitle(title)
    gold = np.array([np.mean(atoms.symbols == "Au") for atoms in relaxed])
    volumes = np.array([atoms.get_volume() / len(atoms) for atoms in relaxed])
    ends = np.array([LATTICE["Cu"], LATTICE["Au"]]) ** 3 / 4
    left.plot([0, 1], ends, color="0.6", label="between the pure metals")
    left.plot(gold, volumes, ".", color="tab:blue", label="relaxed")
    left.set(xlabel="share of gold", ylabel="volume (A$^3$/atom)")
    left.legend(frameon=False)
    speeds = [run.rate for run in runs]
    draw_speed(right, [run.label for run in runs], speeds, 2, speeds[-1] / speeds[0], "structures a second")
    save_picture(figure, path)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "cuau_emt.model", help="of Cu and Au")
    parser.add_argument("--structures", type=int, default=200, help="that the patched model relaxes")
    parser.add_argument("--reference-structures", type=int, default=20, help="that the unpatched model relaxes")
    parser.add_argument("--batch-atoms", type=int, default=512, help="atoms that are computed at once")
    parser.add_argument("--force-tol", type=float, default=0.02, help="largest force that is left, in eV/A")
    parser.add_argument("--max-steps", type=int, default=1000, help="on average, for each structure")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument("--cuequivariance", action="store_true", help="relax with MACE's converted model too, on a GPU")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("--seed", type=int, default=0, help="of the structures")
    parser.add_argument("--out", type=Path, default=Path("eqaccel_relax"), help="folder of the results")
    options = parser.parse_args(arguments)
    if not 1 <= options.reference_structures <= options.structures:
        parser.error("--reference-structures: expected at least 1, and no more than --structures")
    if options.batch_atoms < 108:
        parser.error("--batch-atoms: expected at least 108, the size of the largest cell")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.cuequivariance and options.device == "cpu":
        parser.error("--cuequivariance: expected a GPU, for which it has kernels")
    return options


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Runs the comparison and returns what is written to ``results.json``."""
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|e3nn|mace")
    model = torch.load(options.model, map_location=options.device, weights_only=False)
    wrapper = MaceModel(model, device=torch.device(options.device), dtype=getattr(torch, options.dtype))
    structures = cells(options.structures, options.seed)
    print(f"{len(structures)} cells, {sum(map(len, structures))} atoms, on {options.device} in {options.dtype}")

    few = structures[: options.reference_structures]
    before, _ = relax("unpatched", wrapper, few, options)
    peers = [relax("cuEquivariance", converted(options), few, options)[0]] if options.cuequivariance else []
    begin = time.perf_counter()
    eqaccel.patch(wrapper)
    patch_seconds = time.perf_counter() - begin
    print(f"\n{eqaccel.report(wrapper)}\npatched and verified in {patch_seconds:.1f} s\n")
    # In the same batches, since torch-sim's steps depend a little on what is relaxed together.
    same, _ = relax("patched", wrapper, few, options)
    difference = max(abs(one - other) for one, other in zip(before.energies, same.energies, strict=True))
    after, relaxed = relax("patched", wrapper, structures, options)

    print(f"{eqaccel.report(wrapper).rows[0]}\n")
    runs = [before, *peers, after]
    print(results_table(runs, difference))
    measured = {
        "atoms": sum(map(len, structures)),
        "patch_seconds": patch_seconds,
        "speedup": after.rate / before.rate,
        "processor_speedup": after.processor_rate / before.processor_rate,
        "max_energy_difference": difference,
        "runs": [asdict(run) | {"rate": run.rate, "processor_rate": run.processor_rate} for run in runs],
        "step": eqaccel.report(wrapper).rows[0].note,
    }
    packages = ("torch", "mace-torch", "torch-sim-atomistic", "ase")
    results = save_results(options, processor(wrapper.device), packages, measured)
    ase.io.write(options.out / "relaxed.xyz", relaxed)
    draw(runs, relaxed, f"{options.model.stem}, {options.structures} cells", options.out / "relax.png")
    print(f"wrote results.json, relax.png and relaxed.xyz to {options.out}")
    return results


if __name__ == "__main__":
    main()
