"""What the cost model knows of a machine: one row a target."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """A kind of processor.

    Attributes:
        name: "cpu-avx512", "sm_90", "gfx90a", ...
        is_gpu: Whether lanes are threads (True) or SIMD elements (False).
        registers: Vector registers of a CPU core, or 32-bit registers that a GPU thread may hold.
        simd_bytes: Bytes of a CPU vector register; 4 on a GPU.
        shared_bytes: Shared memory that one GPU block may take.
        multiprocessors: Multiprocessors of a typical device; a running device tells its own number.
        bulk_copy: Whether rows reach shared memory by the bulk copy engine.
    """

    name: str
    is_gpu: bool
    registers: int
    simd_bytes: int
    shared_bytes: int = 0
    multiprocessors: int = 0
    bulk_copy: bool = False


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("cpu-avx512", False, registers=32, simd_bytes=64),
        Target("cpu-avx2", False, registers=16, simd_bytes=32),
        Target("cpu-neon", False, registers=32, simd_bytes=16),
        Target("cpu-generic", False, registers=16, simd_bytes=16),
        Target("sm_80", True, 255, 4, shared_bytes=163 * 1024, multiprocessors=108),
        Target("sm_90", True, 255, 4, shared_bytes=227 * 1024, multiprocessors=132, bulk_copy=True),
        Target("sm_100", True, 255, 4, shared_bytes=227 * 1024, multiprocessors=148, bulk_copy=True),
        Target("gfx90a", True, 255, 4, shared_bytes=64 * 1024, multiprocessors=104),
        Target("gfx942", True, 255, 4, shared_bytes=64 * 1024, multiprocessors=304),
    )
}


@functools.lru_cache(maxsize=1)
def host_target() -> Target:
    """The CPU target of this machine, from the instruction sets that the operating system reports."""
    if platform.machine() in ("aarch64", "arm64"):
        return TARGETS["cpu-neon"]
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    for flag, name in (("avx512f", "cpu-avx512"), ("avx2", "cpu-avx2")):
        if flag in flags:
            return TARGETS[name]
    return TARGETS["cpu-generic"]
