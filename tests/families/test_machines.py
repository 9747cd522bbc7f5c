"""Machines of every class have kernels: plans that fit their shared memory, chosen by architecture and by device."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from executor_checks import assert_computes_the_same
from folders import TESTS

from eqaccel import TensorProductConv, TensorProductSpec, runtime
from eqaccel.__main__ import main
from eqaccel.benchmarks.problems import PROBLEMS
from eqaccel.codegen import Direction, payload_key
from eqaccel.errors import CompileError, SettingsError, SharedMemoryError, UnsupportedError
from eqaccel.families.tensor_product import (
    TENSOR_PRODUCT,
    body_of,
    check,
    gpu_plans,
    make_plan,
    payload,
    travelling_plan,
)
from eqaccel.targets import MACHINE_CLASSES, TARGETS, Target
from eqaccel.testing import assert_product, random_operands

NAMES = [name for name, problem in PROBLEMS.items() if problem.mode == "uvu"]
SMALL_MACHINES = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99, "gfx90a": 64}
# Its kernels are other ones on each class of machines: of whole multiplicities, of less, and with shorter pipelines.
LARGE = PROBLEMS["mace-large"].spec


def _shared_bytes(source: str) -> int:
    """What the kernel of a source that takes most says of itself."""
    return max(int(number) for number in re.findall(r"shared_bytes = (\d+);", source))


@pytest.mark.parametrize("scalar_bytes", [4, 8])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", NAMES)
def test_every_class_has_a_plan_that_fits(name: str, direction: Direction, scalar_bytes: int) -> None:
    spec = PROBLEMS[name].spec
    plans = gpu_plans(spec, direction, scalar_bytes)
    assert plans[0] == make_plan(spec, direction, MACHINE_CLASSES[0], scalar_bytes)
    for target in MACHINE_CLASSES:
        assert any(plan.shared_bytes() <= target.shared_bytes for plan in plans)
    for plan in plans:
        assert plan.shared_bytes() <= plan.target.shared_bytes
        assert sorted(p.number for s in plan.segments for p in s.paths) == list(range(len(spec.paths)))


BYTES_OF_ONE_CLASS = {"mp0-first": 177251, "mp0-second": 390844, "mace-large": 793209, "nequip-l": 1254185}
"""Of payloads at commit 294c58d, which had the plans of one class of GPUs."""


@pytest.mark.parametrize("name", BYTES_OF_ONE_CLASS)
def test_payloads_for_all_classes_are_hardly_larger(name: str) -> None:
    assert len(payload(PROBLEMS[name].spec)[0]) <= 1.3 * BYTES_OF_ONE_CLASS[name]


@pytest.mark.parametrize("direction", Direction)
def test_plans_of_all_classes_compute_the_same(direction: Direction) -> None:
    spec = TensorProductSpec.channelwise("5x0e+5x1o+5x2e", "0e+1o+2e", "5x0e+5x1o+5x2e+5x3o")
    operands = check.problem(spec, direction)
    graph = {"receiver": check.RECEIVER, "sender": check.SENDER, "num_receivers": 3}
    whole = make_plan(spec, direction, MACHINE_CLASSES[0], 8)
    size, kernels = whole.shared_bytes(), set()
    while size > 1500:  # until each path has a kernel of its own
        size = size * 3 // 4
        try:
            plan = make_plan(spec, direction, Target("small", True, shared_bytes=size), 8)
        except UnsupportedError:
            break
        assert plan.shared_bytes() <= size
        kernels.add(len(plan.kernels))
        assert_computes_the_same(plan, whole, **operands, **graph)
    assert max(kernels) > 1


def test_a_path_that_fits_no_machine_is_refused() -> None:
    spec = TensorProductSpec.channelwise("40000x0e", "0e", "40000x0e")
    with pytest.raises(UnsupportedError, match=r"expected rows that fit the 232448 bytes .* of gpu-227, got a path "):
        make_plan(spec, Direction.FORWARD, MACHINE_CLASSES[0], 4)
    program = runtime.Program(payload(spec)[0])
    assert "namespace" in program.source("cpu", "float32", "forward")
    with pytest.raises(SharedMemoryError, match=r"no plan of the float32 forward kernel fits .* sm_90"):
        program.source("cuda", "float32", "forward", "sm_90")


@pytest.mark.parametrize("arch", [*SMALL_MACHINES, "sm_90", "sm_100"])
def test_an_architecture_gets_the_kernel_of_its_class(arch: str) -> None:
    backend = "hip" if arch.startswith("gfx") else "cuda"
    for direction in Direction:
        made = TENSOR_PRODUCT.payload_of(LARGE, direction)
        assert made is not None
        program = runtime.Program(made[0])
        for scalar, scalar_bytes in (("float32", 4), ("float64", 8)):
            plan = travelling_plan(LARGE, direction, TARGETS[arch], scalar_bytes)
            source = program.source(backend, scalar, direction.value, arch)
            assert _shared_bytes(source) == plan.shared_bytes() <= TARGETS[arch].shared_bytes


def test_a_class_that_is_short_of_registers_has_a_plan_of_its_own() -> None:
    """On sm_120 the plan of larger machines spills, though it fits: blocks in another order do not."""
    spec, direction = PROBLEMS["mp0-second"].spec, Direction.DOUBLE_BACKWARD
    most, own = gpu_plans(spec, direction, 4)
    assert (most.target.name, own.target.name) == ("gpu-227", "gpu-99")
    assert max(most.shared_bytes(), own.shared_bytes()) <= min(target.shared_bytes for target in MACHINE_CLASSES)
    operands = check.problem(spec, direction)
    graph = {"receiver": check.RECEIVER, "sender": check.SENDER, "num_receivers": 3}
    assert_computes_the_same(own, most, **operands, **graph)
    program = runtime.Program(payload(spec)[0])
    for arch in (*SMALL_MACHINES, "sm_90"):
        plan = own if TARGETS[arch].shared_bytes == own.target.shared_bytes else most
        assert travelling_plan(spec, direction, TARGETS[arch], 4) == plan
        source = program.source("hip" if arch.startswith("gfx") else "cuda", "float32", direction.value, arch)
        assert source.endswith(body_of(plan))
    log = runtime.compile_cuda(program.source("cuda", "float32", direction.value, "sm_120"), "sm_120")[1]
    assert runtime.resources(log)["eq_main_0"]["spill_store_bytes"] == 0


def test_an_architecture_that_nothing_is_known_of_gets_the_smallest_kernel() -> None:
    program = runtime.Program(payload(LARGE)[0])
    sizes = [plan.shared_bytes() for plan in gpu_plans(LARGE, Direction.DOUBLE_BACKWARD, 8)]
    assert _shared_bytes(program.source("cuda", "float64", "double_backward", "sm_199")) == min(sizes) < max(sizes)


def test_a_setting_makes_a_device_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    program = runtime.Program(payload(LARGE)[0])
    for kib in (163, 99, 64):
        monkeypatch.setenv("EQACCEL_SHARED_KIB", str(kib))
        plan = travelling_plan(LARGE, Direction.DOUBLE_BACKWARD, Target("", True, shared_bytes=kib * 1024), 8)
        source = program.source("cuda", "float64", "double_backward", "sm_90")
        assert _shared_bytes(source) == plan.shared_bytes() <= kib * 1024
    monkeypatch.setenv("EQACCEL_SHARED_KIB", "much")
    with pytest.raises(SettingsError, match="EQACCEL_SHARED_KIB: expected a whole number from 1 to 1024, got 'much'"):
        program.source("cuda", "float64", "double_backward", "sm_90")


def test_a_binary_is_left_where_it_does_not_fit() -> None:
    """That of sm_80 runs on sm_86, which has less shared memory."""
    small = b"binary/sm_80/forward/float32 5\ncubin\n"
    large = b"binary/sm_80/double_backward/float64 5\ncubin\n"
    content = payload(LARGE)[0]
    program = runtime.Program(content + small + large)
    assert program.compile("cuda", "float32", "forward", "sm_86")["key"] == "precompiled-sm_80"
    source = program.source("cuda", "float64", "double_backward", "sm_86")
    assert source == runtime.Program(content).source("cuda", "float64", "double_backward", "sm_86")
    assert program.source("cuda", "float64", "double_backward", "sm_80") != source


def test_plan_and_layout_have_to_agree() -> None:
    source = runtime.Program(payload(PROBLEMS["tiny"].spec)[0]).source("cuda", "float32", "forward", "sm_90")
    number = _shared_bytes(source)
    with pytest.raises(CompileError) as error:
        runtime.compile_cuda(source.replace(f"shared_bytes = {number};", f"shared_bytes = {number + 16};"), "sm_90")
    assert "count shared memory alike" in error.value.log


@pytest.mark.parametrize("arch", ["sm_86", "gfx90a"])
def test_show_prints_what_is_shipped(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    problem = PROBLEMS["tiny"]
    irreps = (problem.in1, problem.in2, problem.out)
    assert main(["show", *irreps, "--target", arch, "--direction", "backward", "--stage", "source"]) == 0
    backend = "hip" if arch.startswith("gfx") else "cuda"
    shipped = runtime.Program(payload(problem.spec)[0]).source(backend, "float32", "backward", arch)
    assert capsys.readouterr().out.rstrip("\n") == shipped.rstrip("\n")


@pytest.mark.gpu
def test_copies_of_older_machines_run_here(dtype: torch.dtype) -> None:
    """Those of compute capability 8, in the background, and of 7.5, through registers."""
    spec = TensorProductSpec.channelwise("64x0e+33x1o+32x2e", "0e+1o+2e", "64x0e+33x1o+32x2e")
    operands = random_operands(spec, 7, 90, dtype=dtype, device="cuda")
    for newest in (b">= 900", b">= 800"):
        module = TensorProductConv(spec).cuda()
        content = payload(spec)[0]
        for capability in (b">= 900", b">= 800"):
            if capability >= newest:
                content = content.replace(b"__CUDA_ARCH__ " + capability, b"__CUDA_ARCH__ >= 999")
        module.key, module.payload = (
            payload_key(content),
            torch.frombuffer(bytearray(content), dtype=torch.uint8).cuda(),
        )
        assert_product(module, operands)


@pytest.mark.gpu
@pytest.mark.parametrize("kib", [163, 99, 64])
def test_kernels_of_smaller_machines_run_here(kib: int) -> None:
    tests = ["families/test_large_products.py", "families/test_matrix_product.py", "ops/test_derivatives.py"]
    tests += ["ops/test_ops.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "cuda"]
    done = subprocess.run(
        [*command, *(str(TESTS / name) for name in tests)],
        env=os.environ | {"EQACCEL_SHARED_KIB": str(kib)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.gpu
def test_doctor_names_the_class_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "KiB of shared memory a block" in capsys.readouterr().out
