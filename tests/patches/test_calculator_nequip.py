"""A patched NequIP calculator: the class, properties, numbers and manners of the original, by another way."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")

import nequip_models as nm
from eqaccel.patches.calculator import step_state
from eqaccel.patches.rounding import ROUNDING
from nequip.integrations.ase import NequIPCalculator

import eqaccel
from eqaccel.errors import StructureError

pytestmark = [pytest.mark.usefixtures("nequip_defaults"), pytest.mark.filterwarnings("ignore")]


def calculator(device: torch.device, kind: str = "small", dtype: str = "float64", **options: Any) -> Any:
    return NequIPCalculator(nm.model(kind, dtype=dtype), device=device, transforms=nm.transforms(), **options)


def patch(target: Any) -> Any:
    """Without verification of the model, which has tests of its own and takes seconds."""
    return eqaccel.patch(target, verify=False)


def results(calculator: Any, atoms: Any) -> dict[str, Any]:
    calculator.reset()
    calculator.calculate(atoms)
    return dict(calculator.results)


def assert_same(fast: dict[str, Any], plain: dict[str, Any], dtype: str = "float64") -> None:
    """Every result is of the same kind, and differs by the rounding of a network; energies are sums over atoms."""
    assert fast.keys() == plain.keys()
    bound, work = ROUNDING * np.finfo(dtype).eps, 10 * float(np.abs(plain["forces"]).sum())
    for name, value in plain.items():
        other = fast[name]
        assert (type(other), other.dtype, other.shape) == (type(value), value.dtype, value.shape), name
        scale = np.abs(value).sum() + (work if "energ" in name else 0.0)
        assert np.abs(other - value).max() <= bound * scale, name


@pytest.mark.parametrize(("kind", "dtype"), [("small", "float32"), ("small", "float64"), ("parity", "float64")])
def test_all_properties(kind: str, dtype: str, device: torch.device) -> None:
    plain, fast = calculator(device, kind, dtype), patch(calculator(device, kind, dtype))
    assert type(fast).__name__ == "NequIPCalculator"
    assert isinstance(fast, NequIPCalculator)
    for atoms in nm.structures():
        for number in range(2):
            atoms.positions += 0.05 * np.random.default_rng(number).normal(size=atoms.positions.shape)
            assert_same(results(fast, atoms), results(plain, atoms), dtype)
    assert step_state(fast).calls == 4
    assert eqaccel.report(fast).rows[0].accelerated


def test_pieces_of_edges(device: torch.device) -> None:
    fast, atoms = patch(calculator(device)), nm.structures()[0]
    whole = results(fast, atoms)
    step_state(fast).step.weight_bytes = 3000
    step_state(fast).step._capture = None
    assert_same(results(fast, atoms), whole)


def test_units(device: torch.device) -> None:
    options = {"energy_units_to_eV": 2.0, "length_units_to_A": 0.5}
    plain, fast = calculator(device, **options), patch(calculator(device, **options))
    assert_same(results(fast, nm.structures()[0]), results(plain, nm.structures()[0]))


def test_copies_pickles_and_unpatch(device: torch.device) -> None:
    fast, atoms = patch(calculator(device)), nm.structures()[0]
    expected = results(fast, atoms)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert_same(results(twin, atoms), expected)
        assert step_state(twin).calls == 1
        assert_same(results(eqaccel.unpatch(twin), atoms), expected)
        assert type(twin) is NequIPCalculator


def test_a_changed_model_is_noticed(device: torch.device) -> None:
    fast, plain, atoms = patch(calculator(device)), calculator(device), nm.structures()[0]
    before = results(fast, atoms)
    assert all(parameter.requires_grad for parameter in fast.model.parameters())
    assert not any(parameter.requires_grad for parameter in step_state(fast).step.potentials[0].parameters())
    for calc in (fast, plain):
        with torch.no_grad():
            for parameter in calc.model.parameters():
                parameter.mul_(1.01)
    expected = results(plain, atoms)
    assert abs(expected["energy"] - before["energy"]) > 1e-6
    assert_same(results(fast, atoms), expected)


class Recording(NequIPCalculator):
    """A user's own calculator."""

    def save_extra_outputs(self, out: dict[str, Any]) -> None:
        self.features = out["node_features"]


def test_a_derived_class_keeps_its_methods(device: torch.device) -> None:
    own = patch(Recording(nm.model(), device=device, transforms=nm.transforms()))
    results(own, nm.structures()[0])
    assert own.features.size(0) == len(nm.structures()[0])
    assert "Recording has a save_extra_outputs method of its own" in eqaccel.report(own).rows[0].note


def test_unknown_elements(device: torch.device) -> None:
    fast, wrong = patch(calculator(device)), nm.structures()[0]
    wrong.numbers[0] = 79
    with pytest.raises(StructureError, match=r"atoms: expected elements that the model knows .* got \[79\]"):
        results(fast, wrong)
