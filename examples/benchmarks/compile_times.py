"""Times the just-in-time compilation of the kernels of a model, in processes of their own.

Called by the benchmark of models. `python -m eqaccel.benchmarks.compile_times specs.pickle --backend cuda --arch sm_90`
prints the times of one process, in which nothing is warm but the disk cache. Compiling for a GPU needs none.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eqaccel.families.polynomial import PolynomialSpec
from eqaccel.families.tensor_product import TensorProductSpec

DIRECTIONS = ("forward", "backward")
Spec = TensorProductSpec | PolynomialSpec


def compile_all(specs: Sequence[Spec], backend: str, arch: str | None, scalar: str) -> dict[str, Any]:
    """Writes and compiles the kernels of tensor products and polynomials, one after the other.

    Returns:
        `codegen_s` for writing all sources, `compile_s` for compiling or finding them, and `kernels`, one entry for
        each with its seconds and whether the disk cache had it.
    """
    from eqaccel.families.polynomial import polynomial_payload
    from eqaccel.families.tensor_product import payload
    from eqaccel.runtime import Program, compile_program

    kernels, codegen, compiling = [], 0.0, 0.0
    for number, spec in enumerate(specs):
        start = time.perf_counter()
        write = polynomial_payload if isinstance(spec, PolynomialSpec) else payload
        program = Program(write(spec)[0])
        codegen += time.perf_counter() - start
        for direction in DIRECTIONS:
            start = time.perf_counter()
            compiled = compile_program(program, backend, scalar, direction, arch)
            seconds = time.perf_counter() - start
            compiling += seconds
            kernels.append({"spec": number, "direction": direction, "s": seconds, "cached": compiled["cached"]})
    return {"codegen_s": codegen, "compile_s": compiling, "kernels": kernels}


def cold_and_warm(specs: Sequence[Spec], backend: str, arch: str | None, scalar: str) -> dict[str, Any]:
    """`compile_all` in a fresh process with an empty cache, and in another that finds the cache of the first.

    Raises:
        RuntimeError: If a process fails, with the end of what it printed.
    """
    command = [sys.executable, "-m", "eqaccel.benchmarks.compile_times", "specs.pickle"]
    command += ["--backend", backend, "--dtype", scalar, *(["--arch", arch] if arch else [])]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "specs.pickle").write_bytes(pickle.dumps(tuple(specs)))
        environment = os.environ | {"EQACCEL_CACHE_DIR": folder}
        for state in ("cold", "warm"):
            # Not from where this was started: a checkout there would hide the installed package.
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"compiling for {backend} failed: {done.stderr.strip()[-500:]}")
            results[state] = json.loads(done.stdout.splitlines()[-1])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", type=Path, help="a pickled sequence of specs")
    parser.add_argument("--backend", choices=["cpu", "cuda", "hip"], default="cpu")
    parser.add_argument("--arch", help="architecture of a GPU, sm_90 for example")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    a = parser.parse_args()
    print(json.dumps(compile_all(pickle.loads(a.specs.read_bytes()), a.backend, a.arch, a.dtype)))


if __name__ == "__main__":
    main()
