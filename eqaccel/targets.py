"""The machines that kernels are made for, one row a target: what generators know of them before a device is there."""

from __future__ import annotations

from dataclasses import dataclass

from eqaccel import _runtime


@dataclass(frozen=True)
class Target:
    """A kind of processor.

    Attributes:
        name: "cpu-avx512", "sm_90", "gfx90a", ...
        is_gpu: Whether lanes are threads (True) or SIMD elements (False).
        registers: Vector registers of a CPU core; 0 on a GPU.
        simd_bytes: Bytes of a CPU vector register; 0 on a GPU.
        shared_bytes: Shared memory that one GPU block may take; 0 on a CPU.
        spare_registers: Whether a GPU kernel may want as many registers as a thread has, and gets them.
    """

    name: str
    is_gpu: bool
    registers: int = 0
    simd_bytes: int = 0
    shared_bytes: int = 0
    spare_registers: bool = True

    @property
    def copies_in_bulk(self) -> bool:
        """Whether every machine with as much shared memory has an engine that copies rows to it."""
        return self.shared_bytes >= _BULK_KIB * 1024

    @property
    def backend(self) -> str:
        """What the sources are written for: "cpu", "cuda" or "hip"."""
        return gpu_backend(self.name) if self.is_gpu else "cpu"


def gpu_backend(arch: str) -> str:
    """What the sources for a GPU architecture are written for: "cuda" or "hip"."""
    return "hip" if arch.startswith("gfx") else "cuda"


_SHARED_KIB = {
    "sm_75": 64,
    "sm_80": 163,
    "sm_86": 99,
    "sm_87": 163,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_103": 227,
    "sm_110": 227,
    "sm_120": 99,
    "sm_121": 99,
    "gfx90a": 64,
    "gfx942": 64,
}
"""Shared memory that a block may take, by GPU architecture. Source: CUDA C++ Programming Guide, "Compute Capabilities",
and the local data share in AMD's instruction set manuals."""


_BULK_KIB = 227
"""What machines of compute capability 9.0 and later have, but for 12.x, which share a class with older ones."""


def _gpu(name: str, kib: int) -> Target:
    # For the same code NVRTC 13.5 takes a few registers more on sm_120, which is of this class, than on others.
    return Target(name, True, shared_bytes=kib * 1024, spare_registers=kib != 99)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("cpu-avx512", False, registers=32, simd_bytes=64),
        Target("cpu-avx2", False, registers=16, simd_bytes=32),
        Target("cpu-neon", False, registers=32, simd_bytes=16),
        Target("cpu-generic", False, registers=16, simd_bytes=16),
        *(_gpu(name, kib) for name, kib in _SHARED_KIB.items()),
    )
}

MACHINE_CLASSES: tuple[Target, ...] = tuple(
    _gpu(f"gpu-{kib}", kib) for kib in sorted(set(_SHARED_KIB.values()), reverse=True)
)
"""The kinds of GPU that plans are made for, the one with the most shared memory first: a plan runs on all that have as
much. Everything else about a device is asked of it when kernels are compiled and launched."""


RUN_BACKENDS = frozenset({"cpu", "cuda"})
"""Backends whose kernels have been run; those of others have only been compiled."""


def host_target() -> Target:
    """The CPU target of this machine, the best of those whose kernels run here."""
    return TARGETS[_runtime.cpu_targets()[0]]
