"""A patched SevenNet calculator: the class, properties, numbers and manners of the original, by another way."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sevenn", reason="needs sevenn")

import sevennet_models as sm
import stepping_checks as sc
from ase import units
from ase.md.nptberendsen import NPTBerendsen
from ase.md.velocitydistribution import thermalize_momenta
from sevenn.calculator import SevenNetCalculator
from stepping_checks import patched, results_of

import eqaccel
from eqaccel.errors import StructureError
from eqaccel.patches.calculator import step_state

pytestmark = pytest.mark.filterwarnings("ignore")
assert_same = partial(sc.assert_same, dtype="float32")


def both(device: torch.device, **options: Any) -> tuple[Any, Any]:
    """A calculator, plain and patched."""
    return tuple(
        change(sm.calculator(sm.model("omni"), device=device, **options)) for change in (lambda plain: plain, patched)
    )


def test_all_properties(device: torch.device) -> None:
    plain, fast = both(device)
    assert isinstance(plain, SevenNetCalculator)
    sc.assert_all_properties(fast, plain, sm.structures(), "float32")


def test_pieces_of_edges(device: torch.device) -> None:
    sc.assert_same_in_pieces(both(device)[1], sm.structures(), "float32")


def test_programs() -> None:
    sc.assert_programs_are_the_same(both(torch.device("cpu"))[1], sm.structures())


def test_every_step_of_dynamics(device: torch.device) -> None:
    """Under a barostat, whose cell changes in every step; the plain calculator looks at the same structures."""
    plain, fast = both(device)
    atoms = sm.structures()[0]
    thermalize_momenta(atoms, temperature_K=900, rng=np.random.default_rng(0))
    atoms.calc = fast
    options = {"temperature_K": 900, "pressure_au": units.GPa, "taut": 50 * units.fs, "taup": 100 * units.fs}
    dynamics = NPTBerendsen(atoms, timestep=0.5 * units.fs, compressibility_au=0.01 / units.GPa, **options)
    start = atoms.cell.array.copy()
    for _ in dynamics.irun(steps=8):
        assert_same(dict(fast.results), results_of(plain, atoms))
    assert np.abs(atoms.cell.array - start).max() > 1e-6
    assert step_state(fast).calls > 8


def test_copies_pickles_and_unpatch(device: torch.device) -> None:
    sc.assert_copies(both(device)[1], SevenNetCalculator, sm.structures()[0], "float32")


def test_changes_are_noticed(device: torch.device) -> None:
    """Of the weights, and of the modality."""
    (plain, fast), atoms = both(device), sm.structures()[0]
    sc.assert_changes_are_noticed(fast, plain, atoms, 1e-3, "float32")
    expected = results_of(plain, atoms)
    plain.modal = fast.modal = "mpa"
    assert abs(results_of(plain, atoms)["energy"] - expected["energy"]) > 1.0
    assert_same(results_of(fast, atoms), results_of(plain, atoms))
    assert step_state(fast).calls == 3


@pytest.mark.parametrize("kind", ["0", "mf-ompa", "omni"])
def test_writes_that_torch_does_not_count(kind: str, device: torch.device) -> None:
    plain, fast = (sm.calculator(sm.model(kind), device=device) for _ in range(2))
    atoms = sm.structures()[0]
    sc.assert_uncounted_writes_are_noticed(patched(fast), plain, lambda c: c.model, atoms, 1e-3, "float32")


def test_changes_of_a_tensor_that_is_neither_a_parameter_nor_a_buffer() -> None:
    """As SevenNet has the frequencies of Bessel functions that are not trained; its own calculator keeps to a CPU."""
    basis = {"radial_basis_name": "bessel", "bessel_basis_num": 8, "trainable_coeff": False}
    plain, fast = (sm.calculator(sm.model("0", radial_basis=basis)) for _ in range(2))
    patched(fast)
    atoms = sm.structures()[0]

    def assign(functions: Any) -> None:
        functions.coeffs = 1.1 * functions.coeffs

    for change in (lambda f: f.coeffs.mul_(1.1), lambda f: f.coeffs.data.mul_(1.1), assign):
        before = results_of(fast, atoms)
        for calculator in (plain, fast):
            change(calculator.model.edge_embedding.basis_function)
        expected = results_of(plain, atoms)
        assert np.abs(expected["forces"] - before["forces"]).max() > 1e-2
        assert_same(results_of(fast, atoms), expected)
    assert step_state(fast).calls == 6


class Own(SevenNetCalculator):
    """A user's own calculator."""

    def output_to_results(self, output: dict[str, Any]) -> dict[str, Any]:
        return super().output_to_results(output) | {"lengths": output["edge_length"]}


def test_what_a_step_cannot_give_goes_the_ordinary_way(device: torch.device) -> None:
    atoms = sm.structures()[0]
    plain, fast = both(device, compute_atomic_virial=True)
    assert "stresses" in results_of(plain, atoms)
    assert_same(results_of(fast, atoms), results_of(plain, atoms))
    assert "it computes the virial of each atom (compute_atomic_virial)" in eqaccel.report(fast).rows[0].note
    own = patched(Own(sm.model("omni"), device=device, modal="mpa"))
    assert len(results_of(own, atoms)["lengths"]) == own.results["num_edges"]
    assert "Own has a output_to_results method of its own" in eqaccel.report(own).rows[0].note


def test_unknown_elements(device: torch.device) -> None:
    fast, wrong = both(device)[1], sm.structures()[0]
    for number in (0, 3, 79):
        wrong.numbers[0] = number
        with pytest.raises(StructureError, match=rf"elements that the model knows .*\[1, 6, 8\]\), got \[{number}\]"):
            results_of(fast, wrong)
