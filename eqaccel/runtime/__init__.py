"""The runtime room: compiles generated sources, keeps them in a disk cache, launches them.

Takes a payload (the kernels of one computation, in one `bytes` object, see `csrc/runtime/program.h`) and the name of a
target. Gives compiled kernels, what the compilers said about them, and what devices and compilers there are. Must not
know what a kernel computes, nor anything of torch but where the libraries for each version of it lie: the ops library
calls the same C++ code directly.

The work is done in C++ (`csrc/runtime`), because a TorchScript model in a C++ program needs it without Python.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from eqaccel import _runtime
from eqaccel._runtime import (
    Program,
    cache_dir,
    cache_stats,
    compile_cpu,
    compile_hip,
    cuda_devices,
    distrust_path,
    end_compilers,
    find_program,
    hip_devices,
    hiprtc_version,
    host_compiler,
    instruction_sets,
    register_program,
    resources,
    set_third_maker,
    third_program,
)
from eqaccel.errors import CacheWarning
from eqaccel.runtime.folder import PLUGINS, CacheContent, cache_content, clear_cache
from eqaccel.runtime.libraries import include_path, torch_libraries
from eqaccel.runtime.nvrtc import locate_nvrtc, use_packages
from eqaccel.runtime.records import newest_record, read_record, record_names, write_record

__all__ = [
    "PLUGINS",
    "CacheContent",
    "Program",
    "cache_content",
    "cache_dir",
    "cache_stats",
    "clear_cache",
    "compile_cpu",
    "compile_cuda",
    "compile_hip",
    "compile_program",
    "cuda_devices",
    "distrust_path",
    "end_compilers",
    "find_program",
    "hip_devices",
    "hiprtc_version",
    "host_compiler",
    "include_path",
    "instruction_sets",
    "launch_cpu",
    "locate_nvrtc",
    "newest_record",
    "nvrtc_version",
    "read_record",
    "record_names",
    "register_program",
    "resources",
    "set_third_maker",
    "third_program",
    "torch_libraries",
    "write_record",
]

_runtime.set_warning_handler(lambda message: warnings.warn(message, CacheWarning, stacklevel=2))
# Shown where a program asks for it, with logging.basicConfig(level="INFO") for instance.
_runtime.set_progress_handler(logging.getLogger("eqaccel").info)


def compile_program(
    program: Program, backend: str, scalar: str, direction: str, arch: str | None = None
) -> dict[str, Any]:
    """Compiles one direction of a program, or finds it in the disk cache. Needs no GPU.

    Args:
        program: The program.
        backend: "cpu", "cuda" or "hip".
        scalar: "float32" or "float64".
        direction: "forward", "backward", "double_backward" or "triple_backward".
        arch: "sm_90", "gfx90a" and so on; None on the CPU.

    Returns:
        `log` (what the compiler printed), `resources` (kernel name to registers, spills, shared memory), `seconds`,
        `cached`, and the entry's `key` and `path` ("" if it could not be stored).

    What takes longer than some seconds is told on the logger "eqaccel", at level INFO.

    Raises:
        CompileError: If the source does not compile, or a compiler of the host takes longer than EQACCEL_COMPILE_LIMIT.
        KeyboardInterrupt: If Ctrl-C was pressed; the host's compiler is ended at once.
        MissingCompilerError: If there is no compiler for the backend.
    """
    if backend == "cuda":
        use_packages()
    return program.compile(backend, scalar, direction, arch)


def compile_cuda(source: str, arch: str) -> tuple[bytes, str]:
    """Compiles CUDA source to a cubin for one architecture ("sm_90"), past the cache; returns it and the log."""
    use_packages()
    return _runtime.compile_cuda(source, arch)


def nvrtc_version() -> str:
    """Version of the NVRTC that is used, for example "13.0"; raises MissingCompilerError if there is none."""
    use_packages()
    return _runtime.nvrtc_version()


def launch_cpu(program: Program, scalar: str, direction: str, operands: dict[str, Any]) -> None:
    """Runs one direction on NumPy arrays, without torch.

    Args:
        program: The program.
        scalar: "float32" or "float64": the dtype of all arrays but the indices, which are int32.
        direction: "forward", "backward", "double_backward" or "triple_backward".
        operands: Fields of `eq_operands` (eqaccel/codegen/preludes/abi.h) by name; arrays must be contiguous, absent
            fields are null or 0, `deterministic` and `threads` are 1 and the workspace is allocated unless given.
    """
    program.launch("cpu", scalar, direction, operands)
