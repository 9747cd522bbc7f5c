"""Times the just-in-time compilation of convolutions, in processes of their own.

Called by the benchmark of models. `python -m eqaccel.benchmarks.compile_times --backend cuda --arch sm_90` prints the
times of one process, in which nothing is warm but the disk cache. Compiling for a GPU needs none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from eqaccel.benchmarks.problems import PROBLEMS

DIRECTIONS = ("forward", "backward")


def compile_all(
    problems: Sequence[str], backend: str, arch: str | None, scalar: str, directions: Sequence[str] = DIRECTIONS
) -> dict[str, Any]:
    """Writes and compiles the kernels of some problems, one after the other.

    Returns:
        `codegen_s` for writing all sources, `compile_s` for compiling or finding them, and `kernels`, one entry for
        each with its seconds and whether the disk cache had it.
    """
    from eqaccel.codegen import payload
    from eqaccel.runtime import Program, compile_program

    kernels, codegen, compiling = [], 0.0, 0.0
    for name in problems:
        start = time.perf_counter()
        program = Program(payload(PROBLEMS[name].spec)[0])
        codegen += time.perf_counter() - start
        for direction in directions:
            start = time.perf_counter()
            compiled = compile_program(program, backend, scalar, direction, arch)
            seconds = time.perf_counter() - start
            compiling += seconds
            kernels.append({"problem": name, "direction": direction, "s": seconds, "cached": compiled["cached"]})
    return {"codegen_s": codegen, "compile_s": compiling, "kernels": kernels}


def cold_and_warm(
    problems: Sequence[str], backend: str, arch: str | None, scalar: str, directions: Sequence[str] = DIRECTIONS
) -> dict[str, Any]:
    """`compile_all` in a fresh process with an empty cache, and in another that finds the cache of the first.

    Raises:
        RuntimeError: If a process fails, with the end of what it printed.
    """
    command = [sys.executable, "-m", "eqaccel.benchmarks.compile_times", "--problems", ",".join(problems)]
    command += ["--backend", backend, "--dtype", scalar, "--directions", ",".join(directions)]
    command += ["--arch", arch] if arch else []
    results = {}
    with tempfile.TemporaryDirectory() as folder:
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
    parser.add_argument("--problems", default="mp0-first,mp0-second")
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--backend", choices=["cpu", "cuda", "hip"], default="cpu")
    parser.add_argument("--arch", help="architecture of a GPU, sm_90 for example")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    a = parser.parse_args()
    print(json.dumps(compile_all(a.problems.split(","), a.backend, a.arch, a.dtype, a.directions.split(","))))


if __name__ == "__main__":
    main()
