"""Weights in bfloat16: which specs have them, what plans and texts make of it, and that all of it compiles."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hosts import assemble_hip, assert_cuda_texts_compile, needs_hipcc, needs_nvrtc

from eqaccel import TensorProductSpec, runtime
from eqaccel.benchmarks.problems import PROBLEMS
from eqaccel.codegen import Direction
from eqaccel.errors import UnsupportedError
from eqaccel.families.tensor_product import TENSOR_PRODUCT, UNTUNED, gpu_plans, make_plan, payload, source
from eqaccel.families.tensor_product.plan.model import staged
from eqaccel.targets import MACHINE_CLASSES, TARGETS

# The last one has paths whose weights begin at odd places.
SPECS = {
    "mace-large": PROBLEMS["mace-large"].spec,
    "mp0-first": PROBLEMS["mp0-first"].spec,
    "nequip-l": PROBLEMS["nequip-l"].spec,
    "ragged": TensorProductSpec.channelwise("5x0e+3x1o+2x2e", "0e+1o+2e", "5x0e+3x1o+2x2e"),
}
ROUNDED = {name: spec.with_bfloat16_weights() for name, spec in SPECS.items()}
READ_ROUNDED = [Direction.FORWARD, Direction.BACKWARD]


def test_a_spec_says_it() -> None:
    spec, rounded = SPECS["ragged"], ROUNDED["ragged"]
    assert not spec.bfloat16_weights
    assert rounded.bfloat16_weights
    assert rounded != spec
    assert rounded.digest != spec.digest
    assert rounded.paths == spec.paths
    assert rounded.with_bfloat16_weights() == rounded
    assert "weights in bfloat16" in repr(rounded)
    assert "bfloat16" in str(rounded)
    assert "bfloat16" not in repr(spec) + str(spec)
    assert payload(rounded)[1] != payload(spec)[1]


def test_specs_of_files_without_the_field_have_full_weights() -> None:
    older = object.__new__(TensorProductSpec)
    vars(older).update({name: value for name, value in vars(SPECS["ragged"]).items() if name != "bfloat16_weights"})
    assert not older.bfloat16_weights
    assert older == SPECS["ragged"]


@pytest.mark.parametrize(
    "spec",
    [
        TensorProductSpec("2x0e", "1x0e", "3x0e", [(0, 0, 0, "uvw")]),
        TensorProductSpec.channelwise("2x0e", "0e", "0e", shared_weights=True),
        TensorProductSpec("2x0e", "1x0e", "2x0e", [(0, 0, 0, "uvu", False)]),
    ],
    ids=["dense", "shared", "none"],
)
def test_other_specs_are_refused(spec: TensorProductSpec) -> None:
    with pytest.raises(UnsupportedError, match=r"spec: expected a product of mode uvu .* got .* keep them in float32"):
        spec.with_bfloat16_weights()


@pytest.mark.parametrize("scalar_bytes", [4, 8])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", SPECS)
def test_rows_take_half_of_the_shared_memory(name: str, direction: Direction, scalar_bytes: int) -> None:
    for target in MACHINE_CLASSES:
        full, half = (make_plan(spec, direction, target, scalar_bytes) for spec in (SPECS[name], ROUNDED[name]))
        rounds = scalar_bytes == 4 and direction in READ_ROUNDED
        for kernel in half.kernels:
            assert kernel.weight_bytes == (2 if rounds else scalar_bytes)
            w = sum(span.length for span in kernel.w_spans)
            assert w <= kernel.w_staged <= w + 8 * len(kernel.w_spans)
            assert all(span.staged * kernel.weight_bytes % 16 == 0 for span in kernel.w_spans)
            twice = direction.tangents
            x_bytes = staged(kernel.x_spans) * scalar_bytes
            assert kernel.row_bytes == twice * (x_bytes + kernel.w_staged * kernel.weight_bytes)
        if not rounds:
            assert half.kernels == tuple(replace(kernel, spec=half.spec) for kernel in full.kernels)
    plans = gpu_plans(ROUNDED[name], direction, scalar_bytes)
    assert plans
    assert all(plan.shared_bytes() <= plan.target.shared_bytes for plan in plans)


@pytest.mark.parametrize("direction", Direction)
def test_only_texts_of_rounded_weights_say_so(direction: Direction) -> None:
    for target in ("cpu-avx2", "sm_90", "gfx90a"):
        texts = [TENSOR_PRODUCT.source(s, direction, TARGETS[target], 4) for s in (SPECS["ragged"], ROUNDED["ragged"])]
        assert "#define EQ_BFLOAT16_WEIGHTS\n" not in texts[0]
        assert "#define EQ_BFLOAT16_WEIGHTS\n" in texts[1]


ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_100"]


def shipped(name: str, direction: Direction, arch: str) -> str:
    """The source that a GPU finds in a payload.

    Rows whose spans do not begin at multiples of 16 bytes are not copied in bulk, which would be told by nothing.
    """
    text = runtime.Program(payload(ROUNDED[name])[0]).source("cuda", "float32", direction.value, arch)
    granules = [int(number) for number in re.findall(r"granule = (\d+);", text)]
    assert all((granule % 4 == 0) == (name != "ragged") for granule in granules)
    return text


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("direction", READ_ROUNDED)
def test_main_kernels_compile_without_spills(direction: Direction, arch: str) -> None:
    log = runtime.compile_cuda(shipped("mp0-first", direction, arch), arch)[1]
    kernels = [uses for kernel, uses in runtime.resources(log).items() if kernel.startswith("eq_main")]
    assert not sum(uses["spill_store_bytes"] for uses in kernels)


@needs_nvrtc
def test_kernels_for_gpus_compile(tmp_path: Path) -> None:
    cases = itertools.product(("nequip-l", "ragged"), READ_ROUNDED, ARCHITECTURES)
    assert_cuda_texts_compile([(case[-1], shipped(*case)) for case in cases], tmp_path)


@needs_hipcc
@pytest.mark.parametrize("direction", READ_ROUNDED)
def test_kernels_for_hip_compile(direction: Direction, tmp_path: Path) -> None:
    plan = make_plan(ROUNDED["ragged"], direction, TARGETS["gfx90a"], 4, UNTUNED)
    assemble_hip(source(plan), tmp_path)


def test_a_launch_without_torch_takes_the_bits() -> None:
    spec = ROUNDED["ragged"]
    program = runtime.Program(payload(spec)[0])
    generator = np.random.default_rng(0)
    x, y, w = (generator.standard_normal((3, n), dtype=np.float32) for n in (spec.x_dim, spec.y_dim, spec.weight_numel))
    bits = (w.view(np.uint32) >> 16).astype(np.uint16)  # rounded towards zero, which numbers here are not
    cut = (bits.astype(np.uint32) << 16).view(np.float32)
    sizes = {"num_receivers": 3, "num_senders": 3, "num_edges": 3, "w_stride": spec.weight_numel}
    found, expected = (np.zeros((3, spec.z_dim), np.float32) for _ in range(2))
    runtime.launch_cpu(program, "float32", "forward", {"x": x, "y": y, "w": bits, "z": found, **sizes})
    full = runtime.Program(payload(SPECS["ragged"])[0])
    runtime.launch_cpu(full, "float32", "forward", {"x": x, "y": y, "w": cut, "z": expected, **sizes})
    assert np.array_equal(found, expected)
    with pytest.raises(ValueError, match="w: expected dtype uint16, got float32"):
        runtime.launch_cpu(program, "float32", "forward", {"x": x, "y": y, "w": w, "z": found, **sizes})
