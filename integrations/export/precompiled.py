"""Kernels compiled ahead of time, put into the file, so that the machine that runs it needs no compiler.

A CPU target names an instruction set, and its kernels run on every CPU that has it. CUDA kernels run on later minor
revisions of their compute capability too. Where no kernel of the file fits, the usual compilation takes over.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from eqaccel import runtime
from eqaccel.codegen import matrix_payload, payload, payload_key, polynomial_payload, source
from eqaccel.errors import CompileError, ExportError
from eqaccel.plan import TARGETS, UNTUNED, Direction, TunedKernel, make_plan
from eqaccel.spec import PolynomialSpec, TensorProductSpec

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
    spec: TensorProductSpec, scalar: str, targets: tuple[str, ...], tuned: tuple[TunedKernel, ...] = ()
) -> bytes:
    """Compiles the kernels of a tensor product for several targets.

    Args:
        spec: The tensor product.
        scalar: "float32" or "float64".
        targets: Names of targets.
        tuned: Kernels of the tensor product that are not the default ones.

    Returns:
        Entries to append to the payload of the tensor product.

    Raises:
        ExportError: If a compiler is missing or fails.
    """
    program = runtime.Program(payload(spec, tuned)[0])
    scalar_bytes = 4 if scalar == "float32" else 8
    tunings = {(k.target.name, k.direction, k.scalar_bytes): k.tuning for k in tuned}

    def cpu_source(direction: Direction, target: str) -> str:  # planned for the instruction set
        tuning = tunings.get((target, direction, scalar_bytes), UNTUNED)
        return source(make_plan(spec, direction, TARGETS[target], scalar_bytes, tuning))

    return _entries(program, scalar, targets, cpu_source)


@functools.lru_cache(maxsize=16)
def precompiled_polynomial_entries(spec: PolynomialSpec, scalar: str, targets: tuple[str, ...]) -> bytes:
    """The kernels of a polynomial, as `precompiled_entries` gives others."""
    program = runtime.Program(polynomial_payload(spec)[0])
    return _entries(program, scalar, targets, lambda direction, _: program.source("cpu", scalar, direction.value))


@functools.cache
def precompiled_matrix_entries() -> bytes:
    """The kernel of matrix products for sm_90, as `precompiled_entries` gives others."""
    arch = "sm_90a"
    try:
        text = runtime.Program(matrix_payload()[0]).source("cuda", "float32", "forward", arch)
        code = runtime.compile_cuda(text, arch)[0]
    except CompileError as error:
        raise ExportError(f"precompile: no kernel for sm_90: {error}") from error
    return f"binary/{arch}/forward/float32 {len(code)}\n".encode() + code + b"\n"


def add_entries(module: Any, entries: bytes) -> None:
    """Adds entries to the payload of a module, under a key of its own: a process may know the bare payload already."""
    content = module.payload.cpu().numpy().tobytes() + entries
    module.key = payload_key(content)
    module.payload = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(module.payload.device)


def _entries(
    program: runtime.Program, scalar: str, targets: tuple[str, ...], cpu_source: Callable[[Direction, str], str]
) -> bytes:
    entries = b""
    for target in targets:
        for direction in _DIRECTIONS:
            try:
                if target in TARGETS and not TARGETS[target].is_gpu:
                    code = program.compile_for(target, scalar, direction.value, cpu_source(direction, target))[0]
                else:
                    code = _compile_gpu(program, scalar, direction, target)
            except (CompileError, ValueError) as error:
                raise ExportError(f"precompile: no kernel for {target}: {error}") from error
            entries += f"binary/{target}/{direction.value}/{scalar} {len(code)}\n".encode() + code + b"\n"
    return entries


def _compile_gpu(program: runtime.Program, scalar: str, direction: Direction, target: str) -> bytes:
    # GPU kernels are launched with numbers in the payload, so they are made from the sources there.
    if target.startswith("gfx"):
        return runtime.compile_hip(program.source("hip", scalar, direction.value, target), target)[0]
    return runtime.compile_cuda(program.source("cuda", scalar, direction.value, target), target)[0]
