"""A patched SevenNet calculator: the class, properties, numbers and manners of the original, by another way."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sevenn", reason="needs sevenn")

import sevennet_models as sm
from ase import units
from ase.md.nptberendsen import NPTBerendsen
from ase.md.velocitydistribution import thermalize_momenta
from eqaccel.patches.calculator import step_state
from eqaccel.patches.rounding import ROUNDING
from sevenn.calculator import SevenNetCalculator

import eqaccel
from eqaccel.errors import StructureError

pytestmark = pytest.mark.filterwarnings("ignore")


def patch(target: Any) -> Any:
    """Without verification of the model, which has tests of its own and takes seconds."""
    return eqaccel.patch(target, verify=False)


def both(device: torch.device, **options: Any) -> tuple[Any, Any]:
    """A calculator, plain and patched."""
    return tuple(
        change(sm.calculator(sm.model("omni"), device=device, **options)) for change in (lambda plain: plain, patch)
    )


def results(calculator: Any, atoms: Any) -> dict[str, Any]:
    calculator.reset()
    calculator.calculate(atoms)
    return dict(calculator.results)


def assert_same(fast: dict[str, Any], plain: dict[str, Any]) -> None:
    """Every result is of the same kind, and differs by the rounding of a network; energies are sums over atoms."""
    assert fast.keys() == plain.keys()
    bound, work = ROUNDING * np.finfo("float32").eps, 10 * float(np.abs(plain["forces"]).sum())
    for name, value in plain.items():
        other = fast[name]
        assert type(other) is type(value), name
        assert np.asarray(other).dtype == np.asarray(value).dtype, name
        assert np.shape(other) == np.shape(value), name
        scale = np.abs(value).sum() + (work if "energ" in name else 0.0)
        assert np.abs(np.asarray(other) - value).max() <= bound * scale, name


def test_all_properties(device: torch.device) -> None:
    plain, fast = both(device)
    assert type(fast).__name__ == "SevenNetCalculator"
    assert isinstance(fast, SevenNetCalculator)
    for atoms in sm.structures():
        for number in range(2):
            atoms.positions += 0.05 * np.random.default_rng(number).normal(size=atoms.positions.shape)
            assert_same(results(fast, atoms), results(plain, atoms))
    assert step_state(fast).calls == 4
    assert eqaccel.report(fast).rows[0].accelerated


def test_pieces_of_edges(device: torch.device) -> None:
    fast, atoms = both(device)[1], sm.structures()[0]
    whole = results(fast, atoms)
    step_state(fast).step.weight_bytes = 3000
    step_state(fast).step._capture = None
    assert_same(results(fast, atoms), whole)


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
        assert_same(dict(fast.results), results(plain, atoms))
    assert np.abs(atoms.cell.array - start).max() > 1e-6
    assert step_state(fast).calls > 8


def test_copies_pickles_and_unpatch(device: torch.device) -> None:
    fast, atoms = both(device)[1], sm.structures()[0]
    expected = results(fast, atoms)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert_same(results(twin, atoms), expected)
        assert step_state(twin).calls == 1
        assert_same(results(eqaccel.unpatch(twin), atoms), expected)
        assert type(twin) is SevenNetCalculator


def test_changes_are_noticed(device: torch.device) -> None:
    """Of the weights, and of the modality."""
    (plain, fast), atoms = both(device), sm.structures()[0]
    before = results(fast, atoms)
    for calculator in (plain, fast):
        with torch.no_grad():
            for parameter in calculator.model.parameters():
                parameter.mul_(1.01)
    expected = results(plain, atoms)
    assert abs(expected["energy"] - before["energy"]) > 1e-3
    assert_same(results(fast, atoms), expected)
    plain.modal = fast.modal = "mpa"
    assert abs(results(plain, atoms)["energy"] - expected["energy"]) > 1.0
    assert_same(results(fast, atoms), results(plain, atoms))
    assert step_state(fast).calls == 3


class Own(SevenNetCalculator):
    """A user's own calculator."""

    def output_to_results(self, output: dict[str, Any]) -> dict[str, Any]:
        return super().output_to_results(output) | {"lengths": output["edge_length"]}


def test_what_a_step_cannot_give_goes_the_ordinary_way(device: torch.device) -> None:
    atoms = sm.structures()[0]
    plain, fast = both(device, compute_atomic_virial=True)
    assert "stresses" in results(plain, atoms)
    assert_same(results(fast, atoms), results(plain, atoms))
    assert "it computes the virial of each atom (compute_atomic_virial)" in eqaccel.report(fast).rows[0].note
    own = patch(Own(sm.model("omni"), device=device, modal="mpa"))
    assert len(results(own, atoms)["lengths"]) == own.results["num_edges"]
    assert "Own has a output_to_results method of its own" in eqaccel.report(own).rows[0].note


def test_unknown_elements(device: torch.device) -> None:
    fast, wrong = both(device)[1], sm.structures()[0]
    for number in (0, 3, 79):
        wrong.numbers[0] = number
        with pytest.raises(StructureError, match=rf"elements that the model knows .*\[1, 6, 8\]\), got \[{number}\]"):
            results(fast, wrong)
