"""Generated text, kernel by kernel, as it stands in the folder golden: a change of it shows in review.

After a change that is meant, `pytest tests/codegen/test_golden_kernels.py --update-golden` writes the files anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eqaccel import LinearSpec, MatrixProductSpec, PolynomialSpec, TensorProductSpec
from eqaccel.codegen import Direction
from eqaccel.families import FAMILIES, KernelFamily
from eqaccel.families.gate import Activation, GateSpec
from eqaccel.families.polynomial import Term
from eqaccel.families.radial_basis import RadialBasisSpec
from eqaccel.families.radial_layer import RadialLayerSpec
from eqaccel.families.radial_network import RadialNetworkSpec
from eqaccel.families.silu import SiluSpec
from eqaccel.targets import TARGETS

FOLDER = Path(__file__).parent / "golden"


def _family(name: str) -> KernelFamily:
    """Of a spec: its name begins with that of the family."""
    return FAMILIES[name.partition("-")[0]]


SPECS: dict[str, Any] = {
    "tensor_product": TensorProductSpec.channelwise("32x0e+16x1o", "0e+1o", "32x0e+16x1o"),
    "tensor_product-modes": TensorProductSpec(
        "8x1o+4x0e", "2x1o+4x0e", "5x0e+16x1e+4x1o", [(0, 0, 0, "uvw"), (0, 0, 1, "uvuv", False), (1, 0, 2, "uvu")]
    ),
    "polynomial": PolynomialSpec(
        3, 2, 2, (Term(0, 0, (), 0.5), Term(0, 1, (0,), 1.5), Term(1, 0, (0, 1), -2.0), Term(1, 1, (0, 1, 2), 0.25))
    ),
    "radial_basis": RadialBasisSpec(8, 6.0, 5, 0.5),
    "radial_layer": RadialLayerSpec(8, 36, 1.5, 0.5),
    "radial_network": RadialNetworkSpec((8, 64, 64), (1.5, 1.5), (0.5, 0.125)),
    "silu": SiluSpec(1.5, 0.5),
    "gate": GateSpec.of_irreps(17, "5x1o+3x2e", Activation("silu", 1.5)),
    "linear": LinearSpec("8x0e+4x1o+3x0e", "5x0e+6x1o", ((0, 0, 0.5), (2, 0, -1.5), (1, 1, 2.0)), 3),
    "matrix_product": MatrixProductSpec(),
    "matrix_product-mma": MatrixProductSpec(),
    "matrix_product-rounded": MatrixProductSpec("rounded"),
    "matrix_product-rounded-mma": MatrixProductSpec("rounded"),
    "neighbors": None,
}
TARGETS_OF = {
    "tensor_product": ("cpu-avx2", "sm_90"),
    "tensor_product-modes": ("cpu-avx2", "sm_90"),
    "polynomial": ("cpu-avx2",),
    "radial_basis": ("cpu-avx2",),
    "radial_layer": ("cpu-avx2",),
    "radial_network": ("sm_90",),
    "silu": ("cpu-avx2",),
    "gate": ("cpu-avx2",),
    "linear": ("cpu-avx2", "sm_90"),
    "matrix_product": ("cpu-avx2", "sm_90"),
    "matrix_product-mma": ("sm_80",),
    "matrix_product-rounded": ("sm_90",),
    "matrix_product-rounded-mma": ("sm_80",),
    "neighbors": ("sm_90",),
}
KERNELS = [
    (name, direction, target)
    for name, spec in SPECS.items()
    for direction in _family(name).directions
    if _family(name).payload_of(spec, direction) is not None
    for target in TARGETS_OF[name]
]


def test_there_is_one_of_each_family() -> None:
    assert {_family(name).name for name in SPECS} == set(FAMILIES)


@pytest.mark.parametrize(("name", "direction", "target"), KERNELS)
def test_golden_kernel(name: str, direction: Direction, target: str, request: pytest.FixtureRequest) -> None:
    kernel = (SPECS[name], direction, TARGETS[target], 4)
    plan = _family(name).explain(*kernel).rstrip()
    text = "".join(f"// {line}\n" for line in plan.split("\n")) + _family(name).body(*kernel)
    if not TARGETS[target].is_gpu:
        tables = _family(name).cpu_tables(SPECS[name], direction)
        text += "".join(f"// tables: {line}\n" for line in tables.splitlines())
    file = FOLDER / f"{name}-{direction.value}-{TARGETS[target].backend}.txt"
    if request.config.getoption("--update-golden"):
        file.write_text(text)
    assert text == file.read_text(), f"the text of {file.name} has changed; --update-golden if it was to"


def test_there_are_no_others() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {
        f"{name}-{direction.value}-{TARGETS[target].backend}.txt" for name, direction, target in KERNELS
    }


@pytest.mark.parametrize("direction", Direction)
def test_what_is_not_there_is_the_same_text(direction: Direction) -> None:
    polynomial, product = (FAMILIES[name] for name in ("polynomial", "tensor_product"))
    kernels = [(direction, target, scalar_bytes) for target in TARGETS.values() for scalar_bytes in (4, 8)]
    assert len({polynomial.body(SPECS["polynomial"], *kernel) for kernel in kernels}) == 1
    spec = SPECS["tensor_product"]
    assert product.body(spec, direction, TARGETS["gfx90a"], 4) == product.body(spec, direction, TARGETS["sm_90"], 4)
