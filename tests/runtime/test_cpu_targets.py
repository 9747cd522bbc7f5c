"""Kernels for each kind of CPU: they hold the instructions of that kind only, and run on every CPU that has them."""

import platform
import re
import subprocess

import pytest
import torch

from eqaccel import TensorProductConv, TensorProductSpec, runtime
from eqaccel.codegen import Direction, payload_key
from eqaccel.families.polynomial import PolynomialSpec, Term, polynomial_payload
from eqaccel.families.tensor_product import make_plan, source
from eqaccel.targets import TARGETS
from eqaccel.testing import assert_product, random_operands

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="these are targets of x86-64")

SPEC = TensorProductSpec.channelwise("64x0e+32x1o", "0e+1o", "0e+1o")
POLYNOMIAL = PolynomialSpec(2, 2, 2, (Term(0, 1, (0, 1, 1), 0.5), Term(1, 0, (1,), -1.5)))
AVX = r"v\w+ .*|.*%[yz]mm.*"
AVX512 = r".*%(zmm|k[0-7]|[xy]mm(1[6-9]|2\d|3[01])).*"


def instructions(code: bytes, folder) -> list[str]:
    """What a compiled kernel holds, as mnemonics and operands."""
    path = folder / "kernel.so"
    path.write_bytes(code)
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split("\t", 1)[1] for line in text.splitlines() if "\t" in line]


@pytest.mark.parametrize("scalar", ["float32", "float64"])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("target", "foreign"), [("cpu-generic", AVX), ("cpu-avx2", AVX512)], ids=["generic", "avx2"])
def test_kernels_hold_no_instruction_that_their_target_lacks(target, foreign, direction, scalar, tmp_path):
    plan = make_plan(SPEC, direction, TARGETS[target], 4 if scalar == "float32" else 8)
    polynomial = runtime.Program(polynomial_payload(POLYNOMIAL)[0]).source("cpu", scalar, direction.value)
    for text in (source(plan), polynomial):
        found = instructions(runtime.compile_cpu(text, target)[0], tmp_path)
        assert any("mulp" in line for line in found), "a kernel multiplies vectors"
        assert [line for line in found if re.fullmatch(foreign, line)] == []


# The largest of these graphs fills the caches, so that results bypass them.
@pytest.mark.parametrize(("num_edges", "layout"), [(40, "mul_ir"), (40, "ir_mul"), (25_000, "ir_mul")])
def test_kernels_of_every_cpu_run_here(num_edges, layout, dtype):
    module = TensorProductConv(SPEC, layout=layout)
    scalar = str(dtype).removeprefix("torch.")
    content = module.payload.numpy().tobytes()
    for direction in Direction:
        plan = make_plan(SPEC, direction, TARGETS["cpu-generic"], dtype.itemsize)
        code = runtime.compile_cpu(source(plan), "cpu-generic")[0]
        content += f"binary/cpu-generic/{direction.value}/{scalar} {len(code)}\n".encode() + code + b"\n"
    compiled = runtime.Program(content).compile("cpu", scalar, "forward")
    assert compiled["key"] == "precompiled-cpu-generic"
    module.key, module.payload = payload_key(content), torch.frombuffer(bytearray(content), dtype=torch.uint8)
    assert_product(module, random_operands(SPEC, num_edges // 20, num_edges, dtype=dtype))
