"""Kernels compiled ahead of time, put into the file, so that the machine that runs it needs no compiler.

A CPU target names an instruction set, and its kernels run on every CPU that has it. CUDA kernels run on later minor
revisions of their compute capability too. Where no kernel of the file fits, the usual compilation takes over.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

from eqaccel import runtime
from eqaccel.codegen import SCALAR_BYTES, Direction, payload_key
from eqaccel.errors import CompileError, ExportError
from eqaccel.families import KernelFamily, TunedKernel
from eqaccel.ops import KernelModule
from eqaccel.targets import TARGETS, gpu_backend

_DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD)
"""What energies and forces need."""


def check_targets(targets: Sequence[str]) -> None:
    """Raises `ExportError` unless all targets are names of CPU or GPU architectures."""
    known = [name for name in TARGETS if name.startswith("cpu-")]
    for target in [targets] if isinstance(targets, str) else targets:
        if isinstance(targets, str) or (target not in known and not re.fullmatch(r"sm_\d+|gfx[0-9a-f]+", str(target))):
            raise ExportError(
                f"precompile: expected a list of {', '.join(known)}, or GPU architectures such as sm_90 and gfx90a, "
                f"got {target!r}"
            )


@functools.lru_cache(maxsize=16)  # the inner layers of a model are alike
def precompiled_entries(
    family: KernelFamily, spec: Any, scalar: str, targets: tuple[str, ...], tuned: tuple[TunedKernel, ...] = ()
) -> bytes:
    """Compiles the kernels of a spec for several targets.

    Args:
        family: What computes.
        spec: What it computes.
        scalar: "float32" or "float64".
        targets: Names of targets; those for which the family has no kernel are passed over.
        tuned: Kernels of the spec that are not the default ones.

    Returns:
        Entries to append to the payload of the spec.

    Raises:
        ExportError: If a compiler is missing or fails.
    """
    program = runtime.Program(family.payload(spec, tuned)[0])
    tunings = {(k.target.name, k.direction, k.scalar_bytes): k.tuning for k in tuned}
    entries = b""
    for target, direction in itertools.product(targets, family.serving(_DIRECTIONS)):
        cpu = None if target not in TARGETS or TARGETS[target].is_gpu else TARGETS[target]
        backend = "cpu" if cpu else gpu_backend(target)
        arch = program.compile_arch(backend, scalar, direction.value, target)
        if arch is None:
            continue
        try:
            if cpu:  # planned for the instruction set
                tuning = tunings.get((target, direction, SCALAR_BYTES[scalar]))
                text = family.source(spec, direction, cpu, SCALAR_BYTES[scalar], tuning)
                code = program.compile_for(target, scalar, direction.value, text)[0]
            else:  # launched with numbers in the payload, so made from the sources there
                text = program.source(backend, scalar, direction.value, arch)
                compile_gpu = runtime.compile_hip if backend == "hip" else runtime.compile_cuda
                code = compile_gpu(text, arch)[0]
        except (CompileError, ValueError) as error:
            raise ExportError(f"precompile: no kernel for {target}: {error}") from error
        entries += f"binary/{arch}/{direction.value}/{scalar} {len(code)}\n".encode() + code + b"\n"
    return entries


def add_entries(module: KernelModule, entries: bytes) -> None:
    """Adds entries to the payload of a module, under a key of its own: a process may know the bare payload already."""
    content = module.payload.cpu().numpy().tobytes() + entries
    module.set_payload(content, payload_key(content))
