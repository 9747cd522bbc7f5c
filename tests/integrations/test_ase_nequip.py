"""`eqaccel.Calculator` with NequIP models: built in code, packaged, exported; against NequIP's own calculator."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")
pytest.importorskip("ase", reason="needs ase")

import calculator_checks as cc
import nequip_models as nm
from ase import Atoms
from nequip.integrations.ase import NequIPCalculator

import eqaccel
from eqaccel.errors import CalculatorError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nequip_defaults")]


def library(device: torch.device | str = "cpu", **changes: Any) -> NequIPCalculator:
    """NequIP's own calculator."""
    return NequIPCalculator(nm.model(**changes), str(device), transforms=nm.transforms())


def calculator(model: Any = None, **options: Any) -> eqaccel.Calculator:
    """A calculator of a small model, without the verification, which has tests of its own."""
    return eqaccel.Calculator(nm.model() if model is None else model, **{"verify": False, "device": "cpu"} | options)


def structures() -> list[Atoms]:
    """Structures that NequIP's calculator takes: it wants a cell to divide by, and an edge."""
    return [atoms for atoms in (*nm.structures(), *cc.variety()) if len(atoms) > 1 and atoms.cell.rank in (0, 3)]


@pytest.fixture(params=["module", "package", "exported file"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "module":
        return nm.model()
    if request.param == "package":
        nm.packaged(nm.model(), tmp_path / "my.nequip.zip")
        return tmp_path / "my.nequip.zip"
    eqaccel.export(eqaccel.patch(nm.model(), verify=False), tmp_path / "my.pt", verify=False)
    return str(tmp_path / "my.pt")


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_every_kind_of_source(source: Any, device: torch.device, default: torch.dtype) -> None:
    wanted = library(device)
    torch.set_default_dtype(default)
    found = eqaccel.Calculator(source, device=device)
    for atoms in structures() * 2:
        atoms.rattle(0.01, seed=1)
        results = cc.results_of(found, atoms)
        assert torch.get_default_dtype() == default
        torch.set_default_dtype(torch.float64)
        cc.assert_same(results, cc.results_of(wanted, atoms), abs(atoms.cell.volume), torch.finfo(torch.float64).eps)
        torch.set_default_dtype(default)
    assert (found.model is None) == isinstance(source, str)


def test_batch(source: Any, device: torch.device) -> None:
    cc.assert_batch_is_single_calls(eqaccel.Calculator(source, device=device, verify=False))


@pytest.mark.parametrize("move", [cc.relaxation, cc.barostat])
def test_moves_as_with_the_library(move: Any, device: torch.device) -> None:
    cc.assert_follows(calculator(device=device), library(device), cc.variety()[-1], move)


def test_a_module_is_patched_in_place() -> None:
    model = nm.model()
    found = calculator(model)
    assert found.model is model
    assert nm.replaced_layers(model) == 3
    eqaccel.unpatch(found)
    with pytest.raises(CalculatorError, match="is not patched"):
        cc.results_of(found, cc.variety()[0])


def test_dtype_is_that_of_the_model() -> None:
    assert calculator(nm.model(dtype="float32")).parameters["dtype"] == "float32"
    model = nm.model()
    with pytest.raises(CalculatorError, match="dtype: NequIP models keep the type that they were built in"):
        calculator(model, dtype="float32")
    assert nm.replaced_layers(model) == 0


def test_single_precision(device: torch.device) -> None:
    found, wanted = calculator(nm.model(dtype="float32"), device=device), library(device, dtype="float32")
    cc.assert_same_on(found, wanted, nm.structures()[:1], torch.finfo(torch.float32).eps)


def test_types_with_other_names() -> None:
    names = {"H": "light", "C": "black", "O": "red"}
    changes = {
        "type_names": list(names.values()),
        "per_type_energy_scales": {names[s]: v for s, v in (("H", 0.5), ("C", 1.0), ("O", 1.5))},
        "per_type_energy_shifts": {names[s]: v for s, v in (("H", -1.0), ("C", -2.0), ("O", -3.0))},
    }
    with pytest.raises(CalculatorError, match=r"type_map: .* \(light, black, red\); pass for example"):
        calculator(nm.model(**changes))
    found = calculator(nm.model(**changes), type_map=names | {"N": "black"})
    cc.assert_same_on(found, calculator(), cc.variety()[:1])
    atoms = cc.variety()[0]
    expected = cc.results_of(found, atoms)["energy"]
    atoms.symbols[:] = "N"
    assert cc.results_of(found, atoms)["energy"] == expected
    with pytest.raises(CalculatorError, match=r"one of the model's types \(light, black, red\), got 'H': 'H'"):
        calculator(nm.model(**changes), type_map={"H": "H"})


def test_copies(source: Any) -> None:
    found, atoms = calculator(source), nm.structures()[0]
    cc.assert_copies(found, atoms, [copy.deepcopy])
    if isinstance(source, Path):
        with pytest.raises(pickle.PicklingError, match=r"out of a package .* eqaccel\.export"):
            pickle.dumps(found)
    else:
        cc.assert_copies(found, atoms, [lambda c: pickle.loads(pickle.dumps(c))])


def test_bad_structures(device: torch.device) -> None:
    cc.assert_refuses_bad_structures(calculator(device=device))
