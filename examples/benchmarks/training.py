"""Times steps of training, on energies and forces, of models as they come, patched by eqaccel, and with its peers.

The models have random weights, and so have the labels. Every contender gets a model and an optimizer of its own, and
has to give the loss and the gradients of the same model in float64 on a batch of small cells.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import eqaccel
from eqaccel.benchmarks import contests, report, suite
from eqaccel.benchmarks.families import FAMILIES, ModelCase, Variant
from eqaccel.benchmarks.model_timing import device_kernels
from eqaccel.benchmarks.models import LIMITS, PEERS
from eqaccel.benchmarks.structures import SYSTEMS, make_sample, read_system
from eqaccel.benchmarks.timing import allocated_peak, free_memory, limited, measure
from eqaccel.patches.copying import duplicated
from eqaccel.patches.torch_state import default_dtype

RATE = 1e-4  # of Adam: random weights stay finite over the steps that are timed


def captured(model: torch.nn.Module, _device: str) -> torch.nn.Module:
    """A patched model whose steps are recorded."""
    eqaccel.training.capture(eqaccel.patch(model))
    return model


CONTENDERS: dict[str, tuple[str, Callable[[type[ModelCase]], Variant]]] = {
    "eqaccel": ("eqaccel", lambda case: lambda model, device: eqaccel.patch(model)),
    "captured": ("eqaccel, captured", lambda case: captured),
    "e3nn": ("e3nn", lambda case: lambda model, device: model),
    **{word: (name, lambda case, name=name: case.variants[name]) for word, name in PEERS.items()},
}
"""Name in results and how to convert a model of its own, by the name on the command line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    models = "mp0-medium,alloy or, on a CPU, alloy"
    contests.add_arguments(parser, CONTENDERS, models, "carbon-64,water-81,alloy-32")
    parser.add_argument("--structures", type=int, help="of a batch (8 or, on a CPU, 2)")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--budget", type=float, help="seconds for the steps of one contender (5 or 60)")


def run(arguments: argparse.Namespace) -> report.Results:
    """Every contender on batches of every system: on a GPU one after the other, on a CPU taking turns."""
    start = time.monotonic()
    gpu = arguments.device == "cuda"
    torch.set_num_threads(arguments.threads)
    arguments.models = arguments.models or (["mp0-medium", "alloy"] if gpu else ["alloy"])
    arguments.structures = arguments.structures or (8 if gpu else 2)
    arguments.budget = arguments.budget or (5.0 if gpu else 60.0)
    results = report.new_results("training", arguments)
    jobs = _jobs(arguments, results["rows"])
    prepared: dict[tuple[str, str], Prepared] = {}
    with contextlib.suppress(KeyboardInterrupt), suite.progress(len(jobs)) as bar:
        for job in jobs:
            first = next(iter(job.values()))
            suite.describe_step(bar, f"{first['model']}, {first['system']}, {', '.join(job)}")
            case = first["model"], read_system(first["system"])[0]
            left = arguments.time_limit - (time.monotonic() - start)
            if left > 0:
                for row in job.values():
                    row |= contests.not_finished(arguments)
                with limited(left):
                    if case not in prepared:
                        prepared[case] = Prepared.of(*case, arguments)
                    _time(job, prepared[case], arguments)
            if arguments.json:
                report.write(arguments.json, json.dumps(results, indent=1) + "\n")
            bar.update()
    results["run_s"] = time.monotonic() - start
    return results


Job = Mapping[str, dict[str, Any]]
"""Rows of one model and system that are timed together, by the contender's name on the command line."""


def _jobs(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> list[Job]:
    """What to do, in this order; puts the rows into the results."""
    words = contests.chosen(arguments)
    jobs: list[Job] = []
    for model, case in contests.installed(arguments, rows):
        for system in arguments.systems or case.training_systems(model):
            job = {word: contests.not_begun(arguments, model, system, CONTENDERS[word][0]) for word in words}
            rows += job.values()
            jobs += [{word: row} for word, row in job.items()] if arguments.device == "cuda" else [job]
    return jobs


@dataclass(frozen=True)
class Batch:
    """Structures that a model is trained on, with labels.

    Attributes:
        inputs: What the model is called with.
        counts: Number of atoms of each structure.
        energies: What the energies of the structures have to become, in eV.
        forces: What the forces have to become, in eV/A.
    """

    inputs: Mapping[str, Tensor]
    counts: Tensor
    energies: Tensor
    forces: Tensor

    @classmethod
    def of(
        cls, case: type[ModelCase], model: torch.nn.Module, structures: Sequence[Any], dtype: torch.dtype, device: str
    ) -> Batch:
        """Makes a batch; the labels are random, and the same in every dtype."""
        counts = torch.tensor([len(atoms) for atoms in structures])
        generator = torch.Generator().manual_seed(0)
        energies = counts * torch.randn(len(counts), generator=generator, dtype=torch.float64)
        forces = torch.randn(int(counts.sum()), 3, generator=generator, dtype=torch.float64)
        inputs = {name: value.to(device) for name, value in case.batch(model, structures, dtype).items()}
        return cls(inputs, counts.to(device), energies.to(device, dtype), forces.to(device, dtype))

    def loss(self, case: type[ModelCase], model: torch.nn.Module) -> Tensor:
        """Mean squares of errors of energies an atom and of forces."""
        # What a data loader hands over is new in every step: no gradients, and edges that nobody has sorted.
        inputs = {name: value.detach() for name, value in self.inputs.items()}
        found = case.evaluate(model, inputs | {"edge_index": inputs["edge_index"].clone()}, training=True)
        energies = (found["energy"].reshape(-1) - self.energies) / self.counts
        return energies.square().mean() + (found["forces"] - self.forces).square().mean()


Numbers = tuple[Tensor, Mapping[str, Tensor]]
"""A loss, and the gradients of the parameters by their names."""


@dataclass(frozen=True)
class Prepared:
    """A model that contenders get copies of.

    Attributes:
        case: What its library does with it.
        plain: The model as it comes, on the CPU.
        expected: What counts as right on a batch of small cells: the same model in float64, on the CPU.
    """

    case: type[ModelCase]
    plain: torch.nn.Module
    expected: Numbers

    @classmethod
    def of(cls, name: str, kind: str, arguments: argparse.Namespace) -> Prepared:
        """Builds a model for a kind of systems."""
        case = FAMILIES[name].load()
        with default_dtype(case.working_dtype(getattr(torch, arguments.dtype))):
            plain = case.plain_model(name, arguments).requires_grad_(True)
        with default_dtype(torch.float64):
            exact = case.exact_model(name, plain, arguments).requires_grad_(True)
            small = Batch.of(case, exact, disturbed(make_sample(kind), 2), torch.float64, "cpu")
            return cls(case, plain, _numbers(case, exact, small))


def _time(job: Job, prepared: Prepared, arguments: argparse.Namespace) -> None:
    """Fills the rows of a job: times of the contenders, or why there are none."""
    case, plain, dtype = prepared.case, prepared.plain, getattr(torch, arguments.dtype)
    free_memory()
    occupied = torch.cuda.memory_allocated() if arguments.device == "cuda" else 0
    kind, number = read_system(next(iter(job.values()))["system"])
    with default_dtype(case.working_dtype(dtype)):
        batch = Batch.of(case, plain, disturbed(SYSTEMS[kind](number), arguments.structures), dtype, arguments.device)
        facts = {"atoms": int(batch.counts.sum()), "edges": batch.inputs["edge_index"].shape[1], "note": ""}
        for row in job.values():
            row |= facts
        small = Batch.of(case, plain, disturbed(make_sample(kind), 2), dtype, arguments.device)
        models = _checked_models(job, prepared, small, LIMITS[dtype], arguments.device)
        steps = {word: _step(case, model, batch) for word, model in models.items()}
        setups = {word: lambda step=step: step for word, step in steps.items()}
        timings = measure(setups, arguments.device, arguments.repetitions, arguments.budget, occupied)
        for word, timing in timings.items():
            if isinstance(timing, str):
                job[word]["note"] = contests.note_of(timing)
            else:
                job[word]["step"] = timing.to_json() | timing.spread()
                job[word] |= _count(job[word]["step"], steps[word], arguments.device)
                if word == "captured":  # recordings have memory that torch reserves, and does not count
                    job[word]["step"].pop("peak_bytes", None)


def _checked_models(
    job: Job, prepared: Prepared, small: Batch, limit: float, device: str
) -> dict[str, torch.nn.Module]:
    """The models of those contenders that give the right numbers; the rows of the others say what is wrong."""
    models = {}
    for word, row in job.items():
        try:
            model = CONTENDERS[word][1](prepared.case)(duplicated(prepared.plain).to(device), device)
            model.requires_grad_(True)
            row |= _check(_numbers(prepared.case, model, small), prepared.expected, limit)
        except Exception as failure:  # of a peer, of the memory: the others are still to be timed
            row["note"] = contests.note_of(failure)
        else:
            models[word] = model
    return models


def disturbed(structure: Any, count: int) -> list[Any]:
    """Copies of a structure with atoms in other places in each."""
    copies = [structure.copy() for _ in range(count)]
    for seed, atoms in enumerate(copies):
        atoms.rattle(0.02, seed=seed)
    return copies


def _step(case: type[ModelCase], model: torch.nn.Module, batch: Batch) -> Callable[[], None]:
    """A step of an optimizer of its own."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        batch.loss(case, model).backward()
        optimizer.step()

    return step


def _numbers(case: type[ModelCase], model: torch.nn.Module, batch: Batch) -> Numbers:
    """What has to agree between contenders; leaves no gradients behind."""
    model.zero_grad(set_to_none=True)
    loss = batch.loss(case, model)
    loss.backward()
    gradients = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach().double().cpu(), gradients


def _check(found: Numbers, expected: Numbers, limit: float) -> dict[str, Any]:
    """Relative differences of the loss and of the gradients, which are compared as one vector.

    Peers keep some parameters in forms of their own; their gradients are left out.

    Raises:
        ValueError: If the differences are above the limit.
    """
    (loss, gradients), (right_loss, right) = found, expected
    shared = [name for name, value in right.items() if name in gradients and gradients[name].numel() == value.numel()]
    ours, exact = (torch.cat([values[name].reshape(-1) for name in shared]) for values in (gradients, right))
    differences = {
        "loss_difference": float((loss - right_loss).abs() / right_loss.abs()),
        "gradient_difference": float((ours - exact).norm() / exact.norm()),
    }
    if not max(differences.values()) < limit:
        wrong = ", ".join(f"{key.replace('_', ' ')} {value:.1e}" for key, value in differences.items())
        raise ValueError(f"other numbers: {wrong}")
    return differences | {"parameters_compared": len(exact) / sum(value.numel() for value in right.values())}


def _count(timing: dict[str, Any], step: Callable[[], None], device: str) -> dict[str, Any]:
    """Calls of operators of a step and, on a GPU, launches; adds the peak of memory to the timing on a CPU."""
    with _Operators() as operators:
        step()
    found: dict[str, Any] = {"operators": operators.calls}
    if device == "cpu":
        timing["peak_bytes"] = allocated_peak(step)
        return found
    kernels = device_kernels(step)
    return found if kernels is None else found | {"launches": kernels[0], "device_ms": kernels[1]}


class _Operators(TorchDispatchMode):
    """Counts calls of operators that compute something: not those that show a tensor in another form."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += not (func.is_view or func.overloadpacket in _NO_WORK)
        return func(*args, **(kwargs or {}))


_NO_WORK = {torch.ops.aten.detach, torch.ops.aten._unsafe_view, torch.ops.aten.empty, torch.ops.aten.empty_like}
