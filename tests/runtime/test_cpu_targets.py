"""Kernels for each kind of CPU: they hold the instructions of that kind only, and run on every CPU that has them."""

import functools
import platform
import re
import subprocess

import pytest
import torch

from eqaccel import TensorProductConv, TensorProductSpec, runtime
from eqaccel._runtime import cpu_targets
from eqaccel.codegen import COMMON, payload_key
from eqaccel.families.polynomial import PolynomialSpec, Term, polynomial_payload
from eqaccel.families.tensor_product import make_plan, plan_of, source
from eqaccel.targets import TARGETS
from eqaccel.testing import assert_product, random_operands

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="these are targets of x86-64")

SPEC = TensorProductSpec.channelwise("64x0e+32x1o", "0e+1o", "0e+1o")
RAGGED = {
    "channels": TensorProductSpec.channelwise("11x0e+3x1o+1x2e", "0e+1o", "0e+1o"),
    "pairs": TensorProductSpec("3x0e", "2x1o", "5x1o", [(0, 0, 0, "uvw", True)]),
}
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


@functools.cache
def kernels_for(target: str, spec: TensorProductSpec, dtype: torch.dtype) -> bytes:
    """Entries of a payload: the compiled kernels for a kind of CPU."""
    entries = b""
    for direction in COMMON:
        code = runtime.compile_cpu(source(plan_of(spec, direction, TARGETS[target], dtype.itemsize)), target)[0]
        name = f"binary/{target}/{direction.value}/{str(dtype).removeprefix('torch.')}"
        entries += f"{name} {len(code)}\n".encode() + code + b"\n"
    return entries


def with_kernels_for(target: str, spec: TensorProductSpec, layout: str, dtype: torch.dtype) -> TensorProductConv:
    """A convolution that holds these kernels, and takes them."""
    module = TensorProductConv(spec, layout=layout)
    content = module.payload.numpy().tobytes() + kernels_for(target, spec, dtype)
    compiled = runtime.Program(content).compile("cpu", str(dtype).removeprefix("torch."), "forward")
    assert compiled["key"] == f"precompiled-{target}"
    module.key, module.payload = payload_key(content), torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return module


@pytest.mark.parametrize("scalar", ["float32", "float64"])
@pytest.mark.parametrize("direction", COMMON)
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
    module = with_kernels_for("cpu-generic", SPEC, layout, dtype)
    assert_product(module, random_operands(SPEC, num_edges // 20, num_edges, dtype=dtype))


@pytest.mark.skipif("cpu-avx2" not in cpu_targets(), reason="the processor has no AVX2")
@pytest.mark.parametrize(
    ("name", "dtype"), [("channels", torch.float32), ("channels", torch.float64), ("pairs", torch.float32)]
)
def test_parts_of_vectors(name, dtype):
    """Of those with AVX2, which read what is left of a row past its last whole vector by instructions of their own."""
    module = with_kernels_for("cpu-avx2", RAGGED[name], "ir_mul", dtype)
    assert_product(module, random_operands(RAGGED[name], 4, 30, dtype=dtype))
