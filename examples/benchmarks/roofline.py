"""What the machine could do at best, measured on the spot, and what a convolution needs at least."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eqaccel import TensorProductSpec
from eqaccel.benchmarks.timing import measure
from eqaccel.codegen import Direction
from eqaccel.families.tensor_product import plan_of
from eqaccel.runtime import host_compiler
from eqaccel.targets import host_target

# Twelve chains cover the latency of two multiply-add units, and leave room for two constants in sixteen registers.
_SOURCE = """
#define EACH(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11)
#define START(i) vec c##i = one * SCALAR(i);
#define STEP(i) c##i = c##i * m + one;
#define LOAD(i) c##i += data[n + i];
#define PLUS(i) + c##i
typedef SCALAR vec __attribute__((vector_size(BYTES), aligned(sizeof(SCALAR))));
static SCALAR total(vec v) {
  SCALAR sum = 0;
  for (unsigned i = 0; i < BYTES / sizeof(SCALAR); ++i) sum += v[i];
  return sum;
}
extern "C" double multiply_add(const void*, long rounds) {
  const vec one = vec{} + SCALAR(1), m = one * SCALAR(0.5);
  EACH(START)
  for (long r = 0; r < rounds; ++r) { EACH(STEP) }
  return total(vec{} EACH(PLUS));
}
extern "C" double read(const void* pointer, long count) {
  const vec* data = static_cast<const vec*>(pointer);
  const vec one = vec{} + SCALAR(1);
  EACH(START)
  for (long n = 0; n + 12 <= count; n += 12) { EACH(LOAD) }
  return total(vec{} EACH(PLUS));
}
"""
_CHAINS = 12


@dataclass(frozen=True)
class Roofline:
    """Limits of the machine.

    Attributes:
        bandwidth: Bytes a second: copying (read and written bytes counted) on a GPU, reading memory on a CPU.
        peak: Floating-point operations a second: of a large matrix product on a GPU, of multiply-adds in vector
            registers on a CPU.
    """

    bandwidth: float
    peak: float

    def to_json(self) -> dict[str, float]:
        """In GB/s and GF/s."""
        return {"bandwidth_gb_s": self.bandwidth / 1e9, "fma_peak_gf_s": self.peak / 1e9}


def measure_roofline(device: str, dtype: torch.dtype, threads: int) -> Roofline:
    """Measures the limits of the machine as it is now: other load lowers them as it lowers everything else.

    Args:
        device: "cpu" or "cuda".
        dtype: Scalar type of the arithmetic.
        threads: Threads to use on a CPU.
    """
    return Roofline(_copy_bandwidth(), _product_peak(dtype)) if device == "cuda" else _cpu_roofline(dtype, threads)


def floor_bytes(spec: TensorProductSpec, nodes: int, edges: int, direction: Direction, itemsize: int) -> int:
    """Bytes moved if each input is read once and each output written once; the few bytes of indices left out."""
    inputs = nodes * spec.x_dim + edges * (spec.y_dim + spec.weight_numel)
    outputs = nodes * spec.z_dim
    # Backward adds the gradients of the inputs; double backward reads directions for these and writes all again; triple
    # backward reads directions for what double backward writes, and writes gradients of directions too.
    count = {
        Direction.FORWARD: inputs + outputs,
        Direction.BACKWARD: 2 * inputs + outputs,
        Direction.DOUBLE_BACKWARD: 3 * inputs + 2 * outputs,
        Direction.TRIPLE_BACKWARD: 5 * inputs + 3 * outputs,
    }
    return itemsize * count[direction]


def operations(spec: TensorProductSpec, edges: int, direction: Direction, itemsize: int) -> int:
    """Floating-point operations, two a multiply-add, without the small edge matrices: the same on every device."""
    return 2 * edges * plan_of(spec, direction, host_target(), itemsize).multiply_adds()


def _copy_bandwidth() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source))


def _product_peak(dtype: torch.dtype) -> float:
    size = 4096
    left, right = (torch.randn(size, size, dtype=dtype, device="cuda") for _ in range(2))
    return 2 * size**3 / _seconds(lambda: torch.mm(left, right))


def _seconds(run: Callable[[], object]) -> float:
    timing = measure({"": lambda: run}, "cuda", repetitions=20, budget=1.0)[""]
    if isinstance(timing, str):
        raise RuntimeError(timing)
    return timing.median / 1e3


def _cpu_roofline(dtype: torch.dtype, threads: int) -> Roofline:
    width, itemsize = host_target().simd_bytes, dtype.itemsize
    compiler = host_compiler()
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "roofline.cpp"), Path(folder, "roofline.so")
        source.write_text(_SOURCE)
        scalar = "float" if dtype == torch.float32 else "double"
        defines = [f"-DSCALAR={scalar}", f"-DBYTES={width}"]
        command = [*compiler["command"], *compiler["flags"], *defines, str(source), "-o", str(library)]
        subprocess.run([*command, "-fvisibility=default"], check=True, capture_output=True)
        loops = ctypes.CDLL(str(library))
    rounds = 4_000_000
    flops = 2 * _CHAINS * (width // itemsize) * rounds * threads
    data = np.ones((1 << 28) // 8)  # far larger than a cache
    vectors = data.nbytes // width // threads
    parts = [data.ctypes.data + number * vectors * width for number in range(threads)]
    peak = flops / _best(loops.multiply_add, [0] * threads, rounds)
    return Roofline(threads * vectors * width / _best(loops.read, parts, vectors), peak)


def _best(function: Callable[..., float], pointers: list[int], count: int) -> float:
    """Seconds of the fastest of several runs on one thread for each pointer; ctypes lets the threads run at once."""
    function.restype = ctypes.c_double
    times = []
    with ThreadPoolExecutor(len(pointers)) as pool:
        for _ in range(15):
            start = time.perf_counter()
            list(pool.map(lambda p: function(ctypes.c_void_p(p), ctypes.c_long(count)), pointers))
            times.append(time.perf_counter() - start)
    return min(times)
