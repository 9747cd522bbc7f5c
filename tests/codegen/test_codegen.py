"""Generated text: it compiles for every target, without spills where speed matters, and is reproducible."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
from hosts import assemble_hip, needs_hipcc

from eqaccel import runtime
from eqaccel.codegen import Direction
from eqaccel.families.tensor_product import TensorProductSpec, body_of, make_plan, payload, plan_of, source
from eqaccel.targets import TARGETS, host_target

MAIN = {
    "mace-large": ("128x0e+128x1o+128x2e", "128x0e+128x1o+128x2e+128x3o"),
    "mace-medium": ("128x0e+128x1o", "128x0e+128x1o+128x2e"),
    "mp0-first": ("128x0e", "128x0e+128x1o+128x2e+128x3o"),
    "mp0-second": ("128x0e+128x1o", "128x0e+128x1o+128x2e+128x3o"),
}
OTHERS = {
    "ragged": ("33x0e+5x1o+1x2e", "33x0e+5x1o+1x2e"),
    "preset-L": ("128x0e+64x1o+32x2e+32x3o", "128x0e+64x1o+32x2e+32x3o"),
}
SPECS = {
    name: TensorProductSpec.channelwise(irreps_in1, "0e+1o+2e+3o", irreps_out)
    for name, (irreps_in1, irreps_out) in (MAIN | OTHERS).items()
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", MAIN)
def test_main_cuda_kernels_compile_without_spills(name: str, direction: Direction, arch: str) -> None:
    plan = make_plan(SPECS[name], direction, TARGETS["sm_90"], 4)
    _, log = runtime.compile_cuda(source(plan), arch)
    resources = runtime.resources(log)
    for number in range(len(plan.kernels)):
        kernel = resources[f"eq_main_{number}"]
        assert kernel["spill_store_bytes"] == 0, log
        assert kernel["registers"] <= 255


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("scalar_bytes", [4, 8])
@pytest.mark.parametrize("name", OTHERS)
def test_every_cuda_kernel_compiles(name: str, scalar_bytes: int, arch: str) -> None:
    for direction in Direction:
        runtime.compile_cuda(source(make_plan(SPECS[name], direction, TARGETS["sm_90"], scalar_bytes)), arch)


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
    ("arch", "scalar_bytes", "directions"),
    [
        ("sm_90", 4, tuple(Direction)),
        ("sm_75", 4, (Direction.BACKWARD,)),
        ("sm_80", 8, (Direction.FORWARD,)),
        ("sm_100", 8, (Direction.DOUBLE_BACKWARD,)),
    ],
)
def test_cuda_kernels_of_every_mode_compile_without_spills(
    arch: str, scalar_bytes: int, directions: tuple[Direction, ...]
) -> None:
    for direction in directions:
        plan = plan_of(MODES, direction, TARGETS[arch], scalar_bytes)
        _, log = runtime.compile_cuda(source(plan), arch)
        assert runtime.resources(log)["eq_main_0"]["spill_store_bytes"] == 0, log


@needs_hipcc
@pytest.mark.parametrize("direction", Direction)
def test_hip_text_compiles(direction: Direction, tmp_path: Path) -> None:
    assemble_hip(source(make_plan(SPECS["mp0-second"], direction, TARGETS["gfx90a"], 4)), tmp_path)


@needs_hipcc
def test_hip_text_of_every_mode_compiles(tmp_path: Path) -> None:
    assemble_hip(source(plan_of(MODES, Direction.DOUBLE_BACKWARD, TARGETS["gfx90a"], 4)), tmp_path)


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
