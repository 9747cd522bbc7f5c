"""What is supported, as tables that are made of those that the code reads."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from itertools import product
from typing import Any, get_type_hints

from eqaccel import errors, settings
from eqaccel.families import polynomial, tensor_product
from eqaccel.families.tensor_product import ConnectionMode
from eqaccel.patches.calculator import StepState
from eqaccel.patches.finder import KINDS, OTHERS
from eqaccel.patches.following import FollowedStep
from eqaccel.patches.kind import ModuleKind
from eqaccel.patches.replacement import Replacement
from eqaccel.patches.wrapper import WrapperState
from eqaccel.step import Evaluation
from eqaccel.targets import RUN_BACKENDS, TARGETS, Target
from eqaccel.training import Recorder

BACKENDS = {TARGETS[name].backend: name for name in ("cpu-generic", "sm_90", "gfx90a")}
"""Backends in the tables, and a target of each."""


def supported() -> str:
    """Tables of the targets, kinds of models, couplings and settings that the code knows."""
    columns = [backend.upper() for backend in BACKENDS]
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
            *table("Models and engines", ("kind", "engine", "by", "what is fast", *columns), engines()),
            *table("Modules that are replaced", ("in models of", "module"), replaced()),
            *table("Operators", ("", ""), limits),
            *table("Tensor products", ("connection mode", "weights", *columns), modes()),
            *table("Settings", ("environment variable", "meaning"), variables),
            "",
        ]
    )


def kinds() -> list[tuple[str, ...]]:
    """The kinds of models, and the files of models that are opened."""
    return [(kind.name, first_line(type(kind)), files(kind)) for kind in (*KINDS, OTHERS)]


def files(kind: ModuleKind) -> str:
    """The formats of files whose models are exported, and run by `eqaccel.Calculator`."""
    own = [kind.file_format.name] if kind.file_format else []
    return "; ".join(["of torch.save", *own]) if kind.exporting else "none"


def engines() -> list[tuple[str, ...]]:
    """What runs models, what they are run by there, and what of it is fast on each backend."""
    model, one_rank = "model and forces", "on one rank as a CUDA graph"
    rows = []
    for kind in (*KINDS, OTHERS):
        found = []
        if kind.stepping:
            found.append(("ASE", kind.stepping.class_name, *stepped(StepState)))
        if kind.exporting:
            found.append(("ASE, OpenMM", "eqaccel.Calculator", *stepped(FollowedStep)))
        if kind.wrapping:
            found.append(("torch-sim", kind.wrapping.class_name, *stepped(WrapperState)))
        if kind.exporting:
            found.append(("LAMMPS", "pair_style eqaccel", model, *on_backends(one_rank)))
            found.append(("C++", "eqaccel/model.h", model, *on_backends()))
        found.append(("Python, training", "eqaccel.patch(model)", "the modules below", *on_backends()))
        if kind.training:
            recorded = on_backends("as CUDA graphs", only=Recorder.devices)
            found.append(("Python, training", "eqaccel.training.capture(model)", "model and gradients", *recorded))
        rows += [(kind.name, engine, f"`{by}`", *cells) for engine, by, *cells in found]
    return rows


def stepped(state: type[Any]) -> tuple[str, ...]:
    """What is fast where a step computes, which is one of those that a GPU records."""
    step = get_type_hints(state.make)["return"]
    if not issubclass(step, Evaluation):
        raise TypeError(f"make: expected that of {state.__name__} to give a step, got {step}")
    return "neighbours, model and forces", *on_backends("as a CUDA graph")


def on_backends(recorded: str = "", only: Collection[str] = tuple(BACKENDS)) -> tuple[str, ...]:
    """Whether something was run on each backend that there is anything for, and how it is recorded on a GPU."""
    cells = []
    for backend, target in BACKENDS.items():
        how = f"yes, {recorded}" if recorded and TARGETS[target].is_gpu else "yes"
        cells.append("-" if backend not in only else how if backend in RUN_BACKENDS else "not run")
    return tuple(cells)


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


def modes() -> list[tuple[str, ...]]:
    """The directions that have kernels, by connection mode, weights and backend."""
    rows = []
    for mode, weighted in product((None, *ConnectionMode), (True, False)):
        try:
            spec = mode_spec(mode, weighted) if mode else channelwise_spec(weighted)
        except errors.SpecError:
            continue  # e3nn has no such instruction either
        cells = (kernel_directions(spec, TARGETS[target]) for target in BACKENDS.values())
        name = f"`{mode.value}`" if mode else "`uvu`, one channel of in2"
        rows.append((name, "yes" if weighted else "no", *cells))
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


def channelwise_spec(weighted: bool) -> tensor_product.TensorProductSpec:
    """A product that is channel by channel, as in MACE and NequIP."""
    return tensor_product.TensorProductSpec("3x1o", "1x1o", "3x0e", [(0, 0, 0, ConnectionMode.UVU, weighted)])


def kernel_directions(spec: tensor_product.TensorProductSpec, target: Target) -> str:
    """The directions for which there is a kernel."""
    family = tensor_product.TENSOR_PRODUCT
    existing = [d for d in family.directions if family.payload_of(spec, d) and family.body(spec, d, target, 4)]
    return ", ".join(direction.value.replace("_", " ") for direction in existing)


def first_line(thing: object) -> str:
    """The sentence that a docstring begins with."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A section with a table."""
    if not rows:
        raise ValueError(f"rows: expected some for the table '{title}', got none")
    lines = ["", f"## {title}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
