"""`torch.set_default_device`, as many scripts call it: eqaccel makes its own tensors where it needs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from patch_checks import assert_close
from structures import crystal_and_molecule

import eqaccel

# Each library is there or not; nequip and sevenn set defaults of e3nn when they are imported, mace before it.
if HAS_MACE := importlib.util.find_spec("mace") is not None:
    import mace_models as mm
if HAS_NEQUIP := importlib.util.find_spec("nequip") is not None:
    import nequip_models as nm
if HAS_SEVENNET := importlib.util.find_spec("sevenn") is not None:
    import sevennet_models as sm

pytestmark = pytest.mark.filterwarnings("ignore")

MODELS: dict[str, tuple[bool, Callable[[], Any]]] = {
    "mace": (HAS_MACE, lambda: mm.energy_model(**mm.TINY)),
    "nequip": (HAS_NEQUIP, lambda: nm.model("small")),
    "sevennet": (HAS_SEVENNET, lambda: sm.model("0")),
}


@pytest.fixture(params=[name for name, (is_there, _) in MODELS.items() if is_there])
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param][1]()


@contextmanager
def elsewhere() -> Iterator[None]:
    """Inside of it tensors without a device are on a GPU, or where nothing can be computed."""
    torch.set_default_device("cuda" if torch.cuda.is_available() else "meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def results(calculator: Any) -> dict[str, np.ndarray]:
    """Of some steps."""
    atoms: Atoms = crystal_and_molecule(np.random.default_rng(3))[0]
    atoms.calc = calculator
    for _ in range(3):
        atoms.positions += 0.01
        atoms.get_forces()
    return {name: np.array(calculator.results[name]) for name in ("energy", "forces", "stress")}


def test_models_and_calculators(model: Any, device: torch.device) -> None:
    with elsewhere():
        fast = eqaccel.patch(model.to(device))
        found = results(eqaccel.Calculator(fast, device=device))
    for name, value in results(eqaccel.Calculator(fast, device=device)).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_files(model: Any, device: torch.device, tmp_path: Path) -> None:
    with elsewhere():
        eqaccel.export(eqaccel.patch(model.to(device)), tmp_path / "model.pt")
        found = results(eqaccel.Calculator(tmp_path / "model.pt", device=device))
    for name, value in results(eqaccel.Calculator(model, device=device)).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.skipif(not HAS_MACE, reason="needs mace-torch")
def test_tables_that_are_made_anew(device: torch.device) -> None:
    plain, fast = (mm.energy_model(**mm.TINY).to(device) for _ in range(2))
    batch = mm.batch(plain)
    other = mm.energy_model(**mm.TINY | {"r_max": 4.0}).state_dict()
    with elsewhere():
        for module in (plain, eqaccel.patch(fast)):
            module.load_state_dict(other)
    assert_close(fast(dict(batch))["forces"], plain(dict(batch))["forces"])
