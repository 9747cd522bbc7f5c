"""Families of kernels: all that handles kernels finds each of them by the name in its payload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime_checks import make_payload

import eqaccel
from eqaccel import (
    Linear,
    LinearSpec,
    MatrixProduct,
    MatrixProductSpec,
    Polynomial,
    PolynomialSpec,
    TensorProduct,
    TensorProductSpec,
    runtime,
)
from eqaccel.codegen import Direction
from eqaccel.errors import OperandError
from eqaccel.families import FAMILIES
from eqaccel.families.gate import Activation, GateSpec
from eqaccel.families.polynomial import Term
from eqaccel.families.radial_basis import RadialBasisSpec
from eqaccel.families.radial_layer import RadialLayerSpec
from eqaccel.families.radial_network import RadialNetworkSpec
from eqaccel.families.silu import SiluSpec
from eqaccel.ops import Gate, KernelModule, Neighbors, RadialBasis, RadialLayer, RadialNetwork, ScaledSilu
from eqaccel.prepare.tuning import TASKS
from eqaccel.targets import TARGETS, host_target
from eqaccel.testing import ERROR_CONSTANT

SPECS: dict[str, Any] = {
    "tensor_product": TensorProductSpec.channelwise("6x0e+5x1o", "0e+1o", "6x0e+5x1o").with_layout("mul_ir", True),
    "polynomial": PolynomialSpec(3, 2, 2, (Term(0, 1, (0,), 1.5), Term(1, 0, (0, 1), -2.0), Term(1, 1, (2,), 0.5))),
    "radial_basis": RadialBasisSpec(3, 5.0, 6, 0.5),
    "radial_layer": RadialLayerSpec(3, 8, 1.5, 0.5),
    "radial_network": RadialNetworkSpec((3, 8, 16), (1.5, -1.0), (0.5, 0.25)),
    "silu": SiluSpec(1.5, 0.5),
    "gate": GateSpec.of_irreps(3, "2x1o", Activation("silu", 1.5)),
    "linear": LinearSpec("3x0e+2x1o", "2x0e+4x1o", ((0, 0, 1.5), (1, 1, -0.5)), 2),
    "matrix_product": MatrixProductSpec(),
    "neighbors": None,
}
MODULES: dict[str, type[KernelModule]] = {
    "tensor_product": TensorProduct,
    "polynomial": Polynomial,
    "radial_basis": RadialBasis,
    "radial_layer": RadialLayer,
    "radial_network": RadialNetwork,
    "silu": ScaledSilu,
    "gate": Gate,
    "linear": Linear,
    "matrix_product": MatrixProduct,
    "neighbors": Neighbors,
}
OPERANDS = {
    "tensor_product": {"x": (7, 21), "y": (7, 4), "w": (7, 22)},
    "polynomial": {"x": (7, 3), "w": (7, 2)},
    "radial_basis": {"x": (7, 1), "w": (3,)},
    "radial_layer": {"x": (7, 3), "w": (3, 8)},
    "radial_network": {"x": (7, 3), "w": (152,)},
    "silu": {"x": (7, 3)},
    "gate": {"x": (7, 11)},
    "linear": {"x": (7, 9), "w": (28,), "y": (7, 2)},
    "matrix_product": {"a": (7, 4), "b": (4, 6)},
}


def _module(name: str) -> KernelModule:
    return MODULES[name]() if SPECS[name] is None else MODULES[name](SPECS[name])


def test_each_has_a_folder() -> None:
    folders = [path.parent.name for path in Path(eqaccel.__file__).parent.glob("families/*/__init__.py")]
    assert sorted(folders) == sorted(FAMILIES) == sorted(SPECS)
    assert set(TASKS) <= set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_payload_names_its_family(name: str) -> None:
    content, key = FAMILIES[name].payload(SPECS[name])
    assert runtime.Program(content).family == name
    module = _module(name)
    assert (module.family, module.key, module.spec) == (FAMILIES[name], key, SPECS[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_are_not_left_behind(name: str, device: torch.device) -> None:
    """State dicts do not have them."""
    module = _module(name)
    content = module.payload.to(device, copy=True)
    for leave in (lambda: module.to("meta"), lambda: module.to_empty(device=device), lambda: module.double()):
        leave()
        assert module.payload.is_meta or torch.equal(module.payload, content)
        assert module.key == _module(name).key
    assert module.payload.device.type == device.type


@pytest.mark.parametrize("name", OPERANDS)
def test_modules_without_kernels_compute_nothing(name: str, device: torch.device) -> None:
    """What torch would take for shapes alone, and give memory that nobody has written."""
    module = _module(name).to("meta")
    operands = [torch.ones(*shape, device=device) for shape in OPERANDS[name].values()]
    with pytest.raises(OperandError, match=rf"all operands on the device 'meta', or none, got one on {device.type}"):
        module(*operands)


@pytest.mark.parametrize(("meta", "got"), [("family=sorcery\n", "'sorcery'"), ("", "''")])
def test_other_families_are_refused(meta: str, got: str) -> None:
    content = make_payload(meta="").replace(
        b"meta 22\nfamily=tensor_product\n\n", f"meta {len(meta)}\n{meta}\n".encode()
    )
    names = ", ".join(FAMILIES)
    with pytest.raises(
        ValueError, match=rf"expected a family .* \({names}\), got {got}: make or export the model again"
    ):
        runtime.Program(content)


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_that_exist(name: str) -> None:
    """All of a family everywhere, but of matrix products those for CPUs, and those for tensor cores that pay; of radial
    networks those for tensor cores."""
    programs = {
        direction: runtime.Program(made[0])
        for direction in Direction
        if (made := FAMILIES[name].payload_of(SPECS[name], direction)) is not None
    }
    assert tuple(programs) == FAMILIES[name].directions
    program = programs[Direction.FORWARD]
    found = {
        (backend, scalar, direction.value, arch): of.compile_arch(backend, scalar, direction.value, arch)
        for backend, arch in (
            ("cpu", None),
            ("cuda", "sm_80"),
            ("cuda", "sm_90"),
            ("cuda", "sm_100"),
            ("hip", "gfx90a"),
        )
        for scalar in ("float32", "float64")
        for direction, of in programs.items()
    }
    if name == "matrix_product":
        assert {key: arch for key, arch in found.items() if arch is not None} == {
            ("cpu", "float32", "forward", None): "",
            ("cpu", "float64", "forward", None): "",
            ("cuda", "float32", "forward", "sm_80"): "sm_80",
            ("cuda", "float32", "forward", "sm_90"): "sm_90a",
        }
    elif name == "radial_network":
        of_tensor_cores = {key: key[3] for key in found if key[:2] == ("cuda", "float32")}
        assert {key: arch for key, arch in found.items() if arch is not None} == of_tensor_cores
        assert programs[Direction.FORWARD].compile_arch("cuda", "float32", "forward", "sm_75") is None
    elif name == "neighbors":
        assert all((arch is not None) == (key[0] != "cpu" and key[2] == "forward") for key, arch in found.items())
        with pytest.raises(ValueError, match="expected a family whose kernels take eq_operands, got neighbors"):
            program.workspace_bytes("cpu", "float32", "forward", {})
    else:
        assert all(arch == (key[3] or "") for key, arch in found.items())


def test_derivatives_without_kernels_take_all_that_there_are() -> None:
    forward, backward, second, third = Direction
    assert FAMILIES["matrix_product"].serving([backward]) == [forward]
    assert FAMILIES["matrix_product"].serving([forward, backward]) == [forward]
    assert FAMILIES["tensor_product"].serving([backward]) == [backward]
    assert FAMILIES["tensor_product"].serving([third]) == [third]
    assert FAMILIES["silu"].serving([third]) == [forward, backward, second]
    assert FAMILIES["linear"].serving([backward]) == [backward]
    assert FAMILIES["linear"].serving([forward, second]) == [forward, second]
    assert all(family.serving([]) == [] for family in FAMILIES.values())


@pytest.mark.parametrize("name", OPERANDS)  # neighbours: tests/ops/test_neighbors.py
def test_modules_compute_what_the_reference_says(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    operands = {n: torch.randn(*shape, generator=generator).double() for n, shape in OPERANDS[name].items()}
    module = _module(name)
    # The executor of tensor products takes rows in (2l+1, mul).
    if name == "tensor_product":
        module = TensorProduct(SPECS[name], layout="ir_mul")
    found = module(*operands.values())
    arrays = {n: operand.numpy() for n, operand in operands.items()}
    expected, scale = (
        FAMILIES[name].reference(SPECS[name], Direction.FORWARD, absolute=flag, **arrays).z for flag in (False, True)
    )
    bound = ERROR_CONSTANT * np.finfo(np.float64).eps * scale
    assert (np.abs(found.numpy() - expected) <= bound).all()


@pytest.mark.parametrize(
    "name", ["tensor_product", "polynomial", "radial_basis", "radial_layer", "silu", "gate", "linear"]
)
def test_the_source_of_this_machine_is_what_is_shipped(name: str) -> None:
    for direction in FAMILIES[name].directions:
        made = FAMILIES[name].payload_of(SPECS[name], direction)
        assert made is not None
        program = runtime.Program(made[0])
        text = FAMILIES[name].source(SPECS[name], direction, host_target(), 4)
        assert program.source("cpu", "float32", direction.value) == text
        text = FAMILIES[name].source(SPECS[name], direction, TARGETS["sm_86"], 8)
        assert program.source("cuda", "float64", direction.value, "sm_86") == text
