"""Fine-tunes the small MACE model of the examples on hotter frames, plain and after `eqaccel.patch`, side by side.

    python examples/finetune_mace.py                                # 200 steps of each, some minutes on one core
    python examples/finetune_mace.py --configurations 12 --epochs 1 # some seconds, to see that everything works

The model that comes with the examples has seen copper and gold up to 1100 K. It starts twice from the same weights,
once plain and once patched, and both copies take every step on the same batch, one after the other: through MACE's own
loss and training step, with an optimizer of their own. Their losses have to agree, or the example fails. Printed and
saved to ``--out``: losses, errors on frames held out, time a step, peak memory, a picture, and the model, which is
unpatched before it is saved. Energies are in eV, lengths in angstrom.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from mace import tools
from mace.tools.torch_geometric.dataloader import DataLoader
from mace.tools.train import evaluate, take_step
from matplotlib.figure import Figure
from prettytable import PrettyTable
from tqdm import tqdm
from train_alloy import QUANTITIES, ROOT, graphs_of, sample_configurations, stress_loss

import eqaccel
from eqaccel.benchmarks.timing import allocated_peak

TEMPERATURES = (1600.0, 2200.0, 2800.0)  # kelvin
RESULTS = ("results.json", "finetune.png", "finetuned.model")


@dataclass
class Run:
    """A copy of the model that is trained, and what was measured.

    Attributes:
        label: Name in the table and in the picture.
        model: The copy.
        losses: The loss of every step.
        step_ms: Wall-clock milliseconds of every step; the first one compiles.
        errors_before: Errors on the frames held out, before the first step: meV/atom, meV/A and meV/A^3.
        errors_after: The same after the last step.
        peak_mb: Megabytes that torch has in use at most in a step: on a CPU beyond what there was before it.
    """

    label: str
    model: torch.nn.Module
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    errors_before: dict[str, float] = field(default_factory=dict)
    errors_after: dict[str, float] = field(default_factory=dict)
    peak_mb: float = 0.0

    @property
    def ms_per_step(self) -> float:
        """Median wall-clock time of a step but the first, which a busy machine disturbs least."""
        return float(np.median(self.step_ms[1:]))

    def to_json(self) -> dict[str, object]:
        """All but the model."""
        plain = {name: value for name, value in vars(self).items() if name != "model"}
        return plain | {"ms_per_step": self.ms_per_step}


def held_out(configurations: int) -> int:
    """Returns how many frames are there to validate."""
    return max(2, configurations // 6)


def make_loaders(model: torch.nn.Module, options: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Returns batches of labelled hot frames: to train on, in a new order in every epoch, and held out."""
    rng = np.random.default_rng(options.seed)
    frames = list(
        tqdm(
            sample_configurations(options.configurations, rng, TEMPERATURES),
            total=options.configurations,
            desc="EMT frames",
        )
    )
    table = tools.AtomicNumberTable([int(z) for z in model.atomic_numbers])
    graphs = graphs_of(frames, table, float(model.r_max))
    kept = held_out(len(graphs))
    return (
        DataLoader(graphs[kept:], batch_size=options.batch_size, shuffle=True, drop_last=True),
        DataLoader(graphs[:kept], batch_size=options.batch_size),
    )


def fit(runs: list[Run], train_loader: DataLoader, valid_loader: DataLoader, options: argparse.Namespace) -> None:
    """Trains all copies of the model, which take turns at every batch, and fills in what was measured."""
    device, loss = torch.device(options.device), stress_loss().to(options.device)
    optimizers = [torch.optim.Adam(run.model.parameters(), lr=options.rate) for run in runs]

    def step(run: Run, optimizer: torch.optim.Optimizer, batch: object) -> float:
        found, _ = take_step(run.model, loss, batch.clone(), optimizer, None, QUANTITIES, 10.0, device)
        return float(found)  # the device has finished

    for run in runs:
        run.errors_before = validate(run.model, loss, valid_loader, device)
    with tqdm(total=options.epochs * len(train_loader), unit="step", desc="fine-tuning") as bar:
        for _ in range(options.epochs):
            for batch in train_loader:
                for run, optimizer in zip(runs, optimizers, strict=True):
                    begin = time.perf_counter()
                    run.losses.append(step(run, optimizer, batch))
                    run.step_ms.append(1e3 * (time.perf_counter() - begin))
                bar.set_postfix_str(f"loss {run.losses[-1]:.3f}", refresh=False)
                bar.update()
    for run, optimizer in zip(runs, optimizers, strict=True):
        run.errors_after = validate(run.model, loss, valid_loader, device)
        # A step of its own, since watching memory takes time; of length zero, since the model is finished.
        optimizer.param_groups[0]["lr"] = 0.0
        run.peak_mb = peak_megabytes(partial(step, run, optimizer, batch), device)


def validate(
    model: torch.nn.Module, loss: torch.nn.Module, loader: DataLoader, device: torch.device
) -> dict[str, float]:
    """Returns root mean square errors of energy, forces and stress."""
    _, errors = evaluate(model, loss, loader, QUANTITIES, device)
    names = {"energy (meV/atom)": "rmse_e_per_atom", "forces (meV/A)": "rmse_f", "stress (meV/A^3)": "rmse_stress"}
    return {name: 1e3 * float(errors[key]) for name, key in names.items()}


def peak_megabytes(step: Callable[[], object], device: torch.device) -> float:
    """Returns the most memory that torch has in use during a step."""
    if device.type == "cpu":
        return allocated_peak(step) / 1e6
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) / 1e6


def loss_tolerance(loader: DataLoader, steps: int, dtype: torch.dtype) -> float:
    """Returns how far losses may be apart, relative to them.

    A gradient is a sum over the edges of a batch, and two orders of adding it up differ by as many roundings at most.
    Every step puts such a difference into the parameters, so that the differences of all steps add up.
    """
    edges = max(batch.edge_index.shape[1] for batch in loader)
    return steps * edges * torch.finfo(dtype).eps


def require_agreement(difference: float, tolerance: float) -> None:
    """Raises RuntimeError if losses are further apart than rounding explains."""
    if not difference <= tolerance:
        raise RuntimeError(f"losses differ by {difference:.1e}, more than rounding explains: {tolerance:.1e}")


def results_table(runs: list[Run], difference: float) -> PrettyTable:
    """Returns the comparison as text, a column per run."""
    before, after = runs
    table = PrettyTable(["", before.label, after.label])
    table.align = "r"
    table.align[""] = "l"
    table.add_row(["ms per step", *(f"{run.ms_per_step:.1f}" for run in runs)])
    table.add_row(["speed-up", "1.00", f"{before.ms_per_step / after.ms_per_step:.2f}"])
    table.add_row(["peak memory of a step (MB)", *(f"{run.peak_mb:.0f}" for run in runs)])
    table.add_row(["largest relative difference of losses", "", f"{difference:.1e}"])
    for name in before.errors_before:
        cells = [f"{run.errors_before[name]:.1f} to {run.errors_after[name]:.1f}" for run in runs]
        table.add_row([f"validation RMSE, {name}", *cells])
    return table


def draw(runs: list[Run], title: str, path: Path) -> None:
    """Draws losses over steps, time and memory of a step."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, *bars = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    figure.suptitle(title)
    for run, style in zip(runs, ({"color": "0.6", "lw": 4}, {"color": "tab:blue", "lw": 1.5}), strict=True):
        left.plot(range(1, len(run.losses) + 1), run.losses, label=run.label, **style)
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend(frameon=False)
    measured = {"ms per step": [run.ms_per_step for run in runs], "peak memory (MB)": [run.peak_mb for run in runs]}
    for axes, (label, values) in zip(bars, measured.items(), strict=True):
        drawn = axes.bar([run.label for run in runs], values, color=["0.6", "tab:blue"])
        axes.bar_label(drawn, [f"{values[0]:.0f}", f"{values[1]:.0f}\n({values[0] / values[1]:.1f}x less)"])
        axes.set(ylabel=label)
        axes.margins(y=0.2)
    for axes in (left, *bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, and finds the device if it is left open."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "cuau_emt.model", help="a Cu-Au model of MACE")
    parser.add_argument("--configurations", type=int, default=48, help="labelled frames, a sixth of them to validate")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7, help="of frames, and of the order of batches")
    parser.add_argument("--out", type=Path, default=Path("eqaccel_finetune"), help="folder of the results")
    options = parser.parse_args(arguments)
    trained = options.configurations - held_out(options.configurations)
    if options.epochs * (trained // options.batch_size) < 2:
        parser.error("--configurations, --epochs, --batch-size: expected two steps at least, since the first compiles")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    return options


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Runs the comparison and returns what is written to ``results.json``.

    Raises:
        RuntimeError: If the losses of the two copies do not agree.
    """
    options = parse_arguments(arguments)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|e3nn|mace")
    torch.set_num_threads(options.threads)
    tools.set_default_dtype(options.dtype)
    tools.set_seeds(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)

    dtype = getattr(torch, options.dtype)
    plain = torch.load(options.model, weights_only=False, map_location=options.device).to(dtype)
    plain.requires_grad_(True)
    train_loader, valid_loader = make_loaders(plain, options)
    patched = eqaccel.patch(copy.deepcopy(plain))
    print(f"\n{eqaccel.report(patched)}\n")
    runs = [Run("unpatched", plain), Run("patched", patched)]
    fit(runs, train_loader, valid_loader, options)

    losses = np.array([run.losses for run in runs])
    difference = float((np.abs(losses[1] - losses[0]) / losses[0]).max())
    tolerance = loss_tolerance(train_loader, losses.shape[1], dtype)
    print(f"\n{results_table(runs, difference)}")
    results = {
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "versions": {name: version(name) for name in ("torch", "mace-torch", "ase")} | {"eqaccel": eqaccel.__version__},
        "speedup": runs[0].ms_per_step / runs[1].ms_per_step,
        "max_loss_difference": difference,
        "loss_tolerance": tolerance,
        "runs": [run.to_json() for run in runs],
    }
    (options.out / RESULTS[0]).write_text(json.dumps(results, indent=1))
    draw(runs, f"Fine-tuning {options.model.stem}, {options.dtype} on {options.device}", options.out / RESULTS[1])
    torch.save(eqaccel.unpatch(patched), options.out / RESULTS[2])
    print(f"wrote {', '.join(RESULTS)} to {options.out}")
    require_agreement(difference, tolerance)
    return results


if __name__ == "__main__":
    main()
