"""Runs small tensor products on a GPU under compute-sanitizer, side by side, a process for each product and tool.

Each is a batch and a graph, of one row and of some, deterministic and not, with two derivatives that are compared with
float64. `python tools/sanitize.py` takes products of all modes, in about a minute on 16 cores; `--products mace-large
--tools memcheck` takes others. Racecheck misreads kernels of several segments (CONTRIBUTING.md), so MACE's and NequIP's
are not among those that it is given unasked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import torch

from eqaccel import TensorProduct, TensorProductConv, TensorProductSpec
from eqaccel.benchmarks.problems import PROBLEMS
from eqaccel.testing import assert_product, random_operands

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from mode_cases import CASES  # a folder, no package

UNASKED = (*CASES, "tetris-1", "diffdock-l1", "diffdock-l2")
KINDS = (("ir_mul", "float32"), ("mul_ir", "float64"), ("mul_ir", "float32"))
"""Layout and dtype, which products take in turns."""

TOOLS = ("memcheck", "racecheck")

ROWS = (1, 41)
"""Of batches, and edges of graphs."""

ABORTED_AT_EXIT, ATTEMPTS = "terminate called without an active exception", 4
"""What a process says whose autograd thread ends after Python, as torch's may on a busy machine; it is run again."""


def main() -> int:
    """Runs what the command line asks for; returns 1 if a tool or a comparison finds a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", nargs="+", choices=[*CASES, *PROBLEMS], default=UNASKED, metavar="NAME")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--alone", nargs=2, metavar=("LAYOUT", "DTYPE"), help="of one product, in this process")
    options = parser.parse_args()
    if options.alone:
        for name in options.products:
            check(name, *options.alone, options.device)
        return 0
    kinds = dict(zip(options.products, cycle(KINDS), strict=False))
    # Without a tool first, which compiles the kernels, or tells that they do not work.
    faults = run_all([""], kinds, options.device) or run_all(options.tools, kinds, options.device)
    print("\n".join([*faults, f"{len(kinds)} products, {len(faults)} faults"]))
    return 1 if faults else 0


def run_all(tools: Sequence[str], kinds: Mapping[str, tuple[str, str]], device: str) -> list[str]:
    """What is wrong with products, side by side, under each tool."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [pool.submit(run, tool, name, kind, device) for tool in tools for name, kind in kinds.items()]
        return [fault for ran in runs if (fault := ran.result())]


def run(tool: str, name: str, kind: tuple[str, str], device: str) -> str:
    """Checks one product in a process of its own, under a tool unless it is ""; returns what is wrong, or ""."""
    command = [sys.executable, __file__, "--products", name, "--alone", *kind, "--device", device]
    if tool:
        options = ["--kernel-name", "kernel_substring=eq_", "--error-exitcode", "9"]
        command = ["compute-sanitizer", "--tool", tool, *options, *command]
    for _ in range(ATTEMPTS):
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode == 0 or ABORTED_AT_EXIT not in ran.stderr:
            break
    title = f"{tool or 'no tool'}, {name}, {', '.join(kind)}"
    return "" if ran.returncode == 0 else f"{title}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"


def check(name: str, layout: str, dtype: str, device: str) -> None:
    """Compares a product with the reference."""
    spec = TensorProductSpec(*CASES[name]) if name in CASES else PROBLEMS[name].spec
    kind = {"dtype": getattr(torch, dtype), "device": device}
    batch = TensorProduct(spec, layout=layout)
    convolutions = [TensorProductConv(spec, layout=layout, deterministic=fixed) for fixed in (True, False)]
    for rows in ROWS:
        assert_product(batch.to(device), random_operands(spec, rows, rows, batch=True, **kind))
        for convolution in convolutions:
            assert_product(convolution.to(device), random_operands(spec, 5, rows, **kind))


if __name__ == "__main__":
    sys.exit(main())
