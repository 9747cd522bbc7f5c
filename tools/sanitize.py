"""Runs small tensor products and models on a GPU under compute-sanitizer, side by side, a process for each and tool.

A product is a batch and a graph, of few and of more rows, deterministic and not, with two derivatives that are compared
with float64. A model is patched, which runs all its kernels with their derivatives, and is taken for some steps of a
calculator, as far as its library is installed. `python tools/sanitize.py` takes products of all modes and such models,
in some minutes on 16 cores; `--of mace-large --tools memcheck` takes others. Racecheck misreads kernels of several
segments (CONTRIBUTING.md), so MACE's and NequIP's products are not among those that it is given unasked, and models get
memcheck alone.

Under memcheck each tensor has an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING), so that what is read beyond
its end is seen even where torch would have another tensor there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

import torch

import eqaccel
from eqaccel import TensorProduct, TensorProductConv, TensorProductSpec
from eqaccel.benchmarks.problems import PROBLEMS
from eqaccel.step import Evaluation
from eqaccel.testing import assert_product, random_operands

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from mode_cases import CASES  # a folder, no package

MODELS = {"mace": ("float32", "float64"), "nequip": ("float32", "float64"), "sevennet": ("float32",)}
"""Models of tests/support, and the dtypes that their libraries know."""

LIBRARIES = {"mace": "mace", "nequip": "nequip", "sevenn": "sevennet"}
"""Packages, and the models that they are for."""

UNASKED = (*CASES, "tetris-1", "diffdock-l1", "diffdock-l2", *(LIBRARIES[p] for p in LIBRARIES if find_spec(p)))
KINDS = (("ir_mul", "float32"), ("mul_ir", "float64"), ("mul_ir", "float32"))
"""Layout and dtype, which products take in turns."""

Case = tuple[str, tuple[str, str]]
"""A name, and layout and dtype."""

TOOLS = ("memcheck", "racecheck")

ROWS, NODES = (4, 44), 8
"""Rows of batches or edges of graphs, and nodes: copies take 16 bytes at a time, which operands of these end with."""

ABORTED_AT_EXIT, ATTEMPTS = "terminate called without an active exception", 4
"""What a process says whose autograd thread ends after Python, as torch's may on a busy machine; it is run again."""


def main() -> int:
    """Runs what the command line asks for; returns 1 if a tool or a comparison finds a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", choices=[*CASES, *PROBLEMS, *MODELS], default=UNASKED, metavar="NAME")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--alone", nargs=2, metavar=("LAYOUT", "DTYPE"), help="of one, in this process")
    options = parser.parse_args()
    if options.alone:
        for name in options.of:
            (check_model if name in MODELS else check)(name, *options.alone, options.device)
        return 0
    kinds = dict(zip([name for name in options.of if name not in MODELS], cycle(KINDS), strict=False))
    models = [(name, ("", dtype)) for name in options.of for dtype in MODELS.get(name, ())]
    cases: list[Case] = [*models, *kinds.items()]
    # Without a tool first, which compiles the kernels, or tells that they do not work.
    faults = run_all([""], cases, options.device) or run_all(options.tools, cases, options.device)
    print("\n".join([*faults, f"{len(cases)} products and models, {len(faults)} faults"]))
    return 1 if faults else 0


def run_all(tools: Sequence[str], cases: Sequence[Case], device: str) -> list[str]:
    """What is wrong with products and models, side by side, under each tool that they get."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        asked = [(tool, *case) for tool in tools for case in cases if case[0] not in MODELS or tool != "racecheck"]
        runs = [pool.submit(run, *case, device) for case in asked]
        return [fault for ran in runs if (fault := ran.result())]


def run(tool: str, name: str, kind: tuple[str, str], device: str) -> str:
    """Checks one of them in a process of its own, under a tool unless it is ""; returns what is wrong, or ""."""
    command = [sys.executable, __file__, "--of", name, "--alone", *kind, "--device", device]
    environment = dict(os.environ)
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if tool:
        options = ["--kernel-name", "kernel_substring=eq_", "--error-exitcode", "9"]
        command = ["compute-sanitizer", "--tool", tool, *options, *command]
    for _ in range(ATTEMPTS):
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if ran.returncode == 0 or ABORTED_AT_EXIT not in ran.stderr:
            break
    title = f"{tool or 'no tool'}, {name}, {', '.join(kind)}"
    # A tool prints what it finds, the first fault first; Python ends with the reason of an error.
    return "" if ran.returncode == 0 else f"{title}: {ran.stdout[:4000]}{ran.stderr[-2000:]}"


def check(name: str, layout: str, dtype: str, device: str) -> None:
    """Compares a product with the reference."""
    spec = TensorProductSpec(*CASES[name]) if name in CASES else PROBLEMS[name].spec
    kind = {"dtype": getattr(torch, dtype), "device": device}
    batch = TensorProduct(spec, layout=layout)
    convolutions = [TensorProductConv(spec, layout=layout, deterministic=fixed) for fixed in (True, False)]
    for rows in ROWS:
        assert_product(batch.to(device), random_operands(spec, rows, rows, batch=True, **kind))
        for convolution in convolutions:
            assert_product(convolution.to(device), random_operands(spec, NODES, rows, **kind))


def check_model(name: str, _: str, dtype: str, device: str) -> None:
    """Patches a small model of a library, which compares it with what it was, and takes some steps."""
    # There are no allocations of tensors of their own while a CUDA graph is recorded.
    Evaluation.__init__ = partialmethod(Evaluation.__init__, capture=False)  # type: ignore[method-assign,assignment]
    models = import_module(f"{name}_models")
    is_mace = name == "mace"
    model = models.energy_model(dtype=getattr(torch, dtype)) if is_mace else models.model(dtype=dtype)
    calculator = eqaccel.Calculator(model, device=device)
    for atoms in models.structures():
        atoms.calc = calculator
        for _ in range(3):  # candidates for neighbours are found anew, and kept
            atoms.get_forces()
            atoms.rattle(0.01)


if __name__ == "__main__":
    sys.exit(main())
