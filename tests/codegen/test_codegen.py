"""Generated text: it compiles for every target, without spills where speed matters, and is reproducible."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
from hosts import assemble_hip, assert_cuda_texts_compile, needs_hipcc

from eqaccel import runtime
from eqaccel.codegen import COMMON, SCALAR_BYTES, Direction
from eqaccel.families.tensor_product import (
    TENSOR_PRODUCT,
    Layout,
    TensorProductSpec,
    body_of,
    make_plan,
    payload,
)
from eqaccel.targets import TARGETS, host_target

MAIN = {
    "mace-large": ("128x0e+128x1o+128x2e", "128x0e+128x1o+128x2e+128x3o"),
    "mace-medium": ("128x0e+128x1o", "128x0e+128x1o+128x2e"),
    "mp0-first": ("128x0e", "128x0e+128x1o+128x2e+128x3o"),
    "mp0-second": ("128x0e+128x1o", "128x0e+128x1o+128x2e+128x3o"),
}
SPECS = {
    name: TensorProductSpec.channelwise(irreps_in1, "0e+1o+2e+3o", irreps_out)
    for name, (irreps_in1, irreps_out) in MAIN.items()
}
# Fewer paths than models have, for NVRTC takes seconds for them, but blocks of every degree and size.
# `./run kernels` compiles those of the benchmarks.
_RAGGED, _DEGREES = "33x0e+5x1o+1x2e", "128x0e+64x1o+32x2e+32x3o"
OTHERS = {
    "ragged": TensorProductSpec.channelwise(_RAGGED, "0e+1o+2e", _RAGGED),
    "degrees": TensorProductSpec.channelwise(_DEGREES, "0e+1o", _DEGREES),
}


def shipped(spec: TensorProductSpec, backend: str, scalar: str, direction: Direction, arch: str) -> str:
    """The source that a machine finds in a payload."""
    made = TENSOR_PRODUCT.payload_of(spec, direction)
    assert made is not None
    return runtime.Program(made[0]).source(backend, scalar, direction.value, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", MAIN)
def test_main_cuda_kernels_compile_without_spills(name: str, direction: Direction, arch: str) -> None:
    _, log = runtime.compile_cuda(shipped(SPECS[name], "cuda", "float32", direction, arch), arch)
    kernels = [uses for kernel, uses in runtime.resources(log).items() if kernel.startswith("eq_main_")]
    assert kernels
    for kernel in kernels:
        assert kernel["spill_store_bytes"] == 0, log
        assert kernel["stack_bytes"] == 0, log  # everything is inlined
        assert kernel["registers"] <= 255


@pytest.mark.parametrize(("layout", "by_rows"), [("ir_mul", False), ("mul_ir", True)])
@pytest.mark.parametrize("direction", COMMON)
@pytest.mark.parametrize("name", ["mace-large", "mace-medium", "mp0-second"])
def test_cuda_kernels_of_other_operands_do_not_spill(
    name: str, direction: Direction, layout: Layout, by_rows: bool
) -> None:
    spec = SPECS[name].with_layout(layout, by_rows)
    _, log = runtime.compile_cuda(shipped(spec, "cuda", "float32", direction, "sm_90"), "sm_90")
    assert runtime.resources(log)["eq_main_0"]["spill_store_bytes"] == 0, log


@pytest.mark.parametrize(
    ("turn", "name", "scalar"), [(n, *pair) for n, pair in enumerate(itertools.product(OTHERS, SCALAR_BYTES))]
)
def test_every_cuda_kernel_compiles(turn: int, name: str, scalar: str, tmp_path: Path) -> None:
    """In turns, so that kernels of each direction and dtype get machine code for each architecture."""
    cases = itertools.product(Direction, ("sm_80", "sm_90", "sm_100"))
    texts = [(arch, shipped(OTHERS[name], "cuda", scalar, direction, arch)) for direction, arch in cases]
    assert_cuda_texts_compile(texts, tmp_path, turn)


# Coefficients of zero beside others, and alone in a block.
SOME_ZEROS = [(0, 0, 0, "uvu", True, 0.0), (1, 0, 1, "uvu", True, 0.0), (1, 1, 1, "uvu", True)]


def test_paths_of_zero_compile(tmp_path: Path) -> None:
    specs = [TensorProductSpec("3x0e+4x1o", "0e+1e", "3x0e+4x1o", paths) for paths in (SOME_ZEROS, SOME_ZEROS[:2])]
    cases = itertools.product(specs, Direction)
    texts = [("sm_90", shipped(spec, "cuda", "float32", direction, "sm_90")) for spec, direction in cases]
    assert_cuda_texts_compile(texts, tmp_path)


# Dense matrices of more and of fewer channels than lanes, and pairs of every kind.
MODES = TensorProductSpec(
    "6x0e+3x1o",
    "2x0e+3x1o",
    "40x0e+7x1o+3x1o+6x1o+3x0e",
    [
        (0, 0, 0, "uvw"),
        (0, 1, 1, "uvw"),
        (0, 1, 2, "uvv"),
        (0, 1, 3, "uvu"),
        (1, 1, 4, "uvu<v"),
        (1, 1, 0, "uuw"),
        (1, 1, 4, "uuu", False),
    ],
)


@pytest.mark.parametrize(
    ("arch", "scalar", "directions"),
    [
        ("sm_90", "float32", COMMON),
        ("sm_75", "float32", (Direction.BACKWARD,)),
        ("sm_80", "float64", (Direction.FORWARD,)),
        ("sm_100", "float64", (Direction.DOUBLE_BACKWARD,)),
    ],
)
def test_cuda_kernels_of_every_mode_compile_without_spills(
    arch: str, scalar: str, directions: tuple[Direction, ...]
) -> None:
    for direction in directions:
        _, log = runtime.compile_cuda(shipped(MODES, "cuda", scalar, direction, arch), arch)
        assert runtime.resources(log)["eq_main_0"]["spill_store_bytes"] == 0, log


@needs_hipcc
@pytest.mark.parametrize("direction", Direction)
def test_hip_text_compiles(direction: Direction, tmp_path: Path) -> None:
    assemble_hip(shipped(SPECS["mp0-second"], "hip", "float32", direction, "gfx90a"), tmp_path)


@needs_hipcc
def test_hip_text_of_every_mode_compiles(tmp_path: Path) -> None:
    assemble_hip(shipped(MODES, "hip", "float32", Direction.DOUBLE_BACKWARD, "gfx90a"), tmp_path)


def test_payload_is_reproducible_and_names_its_paths() -> None:
    spec = SPECS["mp0-second"]
    content, key = payload(spec)
    payload.cache_clear()
    assert payload(spec) == (content, key)
    assert 0 <= key < 2**63
    for path in spec.paths:
        assert str(path).encode() in content


@pytest.mark.parametrize("name", SPECS)
def test_numbers_that_are_equal_on_paper_are_equal_in_the_text(name: str) -> None:
    """Each constant is rounded once: no two of them differ by rounding alone, and one is not 0.9999999999999999."""
    for target, direction in itertools.product(("sm_90", "cpu"), Direction):
        plan = make_plan(SPECS[name], direction, TARGETS.get(target) or host_target(), 4)
        found = {abs(float(number)) for number in re.findall(r"\d+\.\d+(?:e-?\d+)?", body_of(plan))}
        values = sorted(found | {1.0})
        rounding = 16 * sys.float_info.epsilon  # more than products of a few rounded factors are apart
        assert all(high / low > 1 + rounding for low, high in itertools.pairwise(values) if low)
