"""Compiles every kernel of the benchmarks' tensor products for machines of every class, with NVRTC; needs no GPU.

Each problem x direction x dtype x architecture gets the kernel that an architecture finds in the payload. It has to
compile, to take no more shared memory than the class has, and, in float32 kernels of MACE models, not to spill.
It takes about an hour: `./run kernels`, or `./run kernels --problems mace-large --archs sm_100` for a part.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections import Counter
from typing import get_args

from eqaccel import runtime
from eqaccel.benchmarks.problems import CONVOLUTIONS, PROBLEMS, PRODUCTS
from eqaccel.codegen import SCALAR_BYTES, Direction
from eqaccel.errors import CompileError
from eqaccel.families.tensor_product import TENSOR_PRODUCT, Layout, TensorProductSpec
from eqaccel.targets import TARGETS

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""At least one of each class, and those that compilers treat otherwise."""

NAMES = tuple(dict.fromkeys((*CONVOLUTIONS, *PRODUCTS)))
"""Every problem that is timed."""

MAIN = ("mace-large", "mace-medium", "mp0-first", "mp0-second")
"""Problems whose kernels may not spill in float32."""


def main() -> int:
    """Compiles what the command line asks for; returns 1 if a kernel is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument(
        "--archs", nargs="+", choices=[name for name in TARGETS if name.startswith("sm_")], default=ARCHS
    )
    parser.add_argument("--dtypes", nargs="+", choices=SCALAR_BYTES, default=list(SCALAR_BYTES))
    parser.add_argument(
        "--bfloat16-weights", action="store_true", help="of products with such weights, where they can be"
    )
    parser.add_argument("--layout", choices=get_args(Layout), default="mul_ir", help="of rows of x and z")
    parser.add_argument("--by-rows", action="store_true", help="for rows without a graph")
    options = parser.parse_args()
    print(f"NVRTC {runtime.nvrtc_version()}")
    start, counts, faults = time.monotonic(), Counter(), []
    specs = {name: PROBLEMS[name].spec.with_layout(options.layout, options.by_rows) for name in options.problems}
    if options.bfloat16_weights:
        own = {name: spec for name, spec in specs.items() if spec.is_channelwise and not spec.shared_weights}
        specs = {name: spec.with_bfloat16_weights() for name, spec in own.items() if spec.weight_numel}
    for name, arch, scalar, direction in itertools.product(specs, options.archs, options.dtypes, Direction):
        spills, fault = compile_kernel(name, specs[name], arch, scalar, direction)
        counts["kernels"] += 1
        counts["kernels that spill"] += spills > 0
        if fault:
            faults.append(f"{name} {direction.value} {scalar} {arch}: {fault}")
        if spills or fault:
            print(f"{name} {direction.value} {scalar} {arch}: {fault or f'{spills} bytes of spills'}", flush=True)
    print(
        f"{counts['kernels']} kernels in {time.monotonic() - start:.0f} s: {counts['kernels that spill']} spill, "
        f"{len(faults)} are not as they should be"
    )
    return 1 if faults else 0


def compile_kernel(name: str, spec: TensorProductSpec, arch: str, scalar: str, direction: Direction) -> tuple[int, str]:
    """Compiles what an architecture finds in the payload of a problem's spec.

    Returns:
        Bytes that the main kernels store because registers run out, and what is wrong, or "".
    """
    made = TENSOR_PRODUCT.payload_of(spec, direction)
    if made is None:
        return 0, ""
    program = runtime.Program(made[0])
    try:
        source = program.source("cuda", scalar, direction.value, arch)
        log = runtime.compile_cuda(source, arch)[1]
    except CompileError as error:
        return 0, str(error)
    taken = max(int(number) for number in re.findall(r"shared_bytes = (\d+);", source))
    if taken > TARGETS[arch].shared_bytes:
        return 0, f"expected at most {TARGETS[arch].shared_bytes} bytes of shared memory, got {taken}"
    found = runtime.resources(log)
    spills = sum(uses["spill_store_bytes"] for kernel, uses in found.items() if kernel.startswith("eq_main"))
    if spills and name in MAIN and scalar == "float32":
        return spills, f"expected no spills, got {spills} bytes"
    return spills, ""


if __name__ == "__main__":
    sys.exit(main())
