"""What the tests of torch-sim share, whatever the kind of model: wrappers before and after `patch`, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_sim as ts
from ase import Atoms
from ase.build import bulk
from eqaccel.patches.rounding import FACTOR, ROUNDING
from sabotage import SABOTAGES
from torch_sim.models.interface import validate_model_outputs

import eqaccel
from eqaccel.errors import VerificationError

ELEMENTS = (8, 14, 26)
"""What the conformance test of torch-sim needs, silicon and iron, and one more, as other tests have three."""

CUTOFF = 4.0
"""Angstrom: iron has neighbours in that test."""

STEPS = 6

Make = Callable[[torch.dtype], Any]
"""Makes a wrapper of a model, the same at every call."""


def crystals() -> list[Atoms]:
    """Cells of different sizes, shapes and elements; one is smaller than the cutoff."""
    rng = np.random.default_rng(4)
    silicon, iron = bulk("Si", cubic=True), bulk("Fe", "bcc", a=2.8) * (2, 1, 1)
    oxide = bulk("SiFe", "zincblende", a=5.0) * (2, 2, 1)
    oxide.numbers[::3] = 8
    structures = [silicon, iron, oxide]
    for atoms in structures:
        atoms.rattle(0.05, rng=rng)
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + 0.02 * rng.normal(size=(3, 3))), scale_atoms=True)
    return structures


def state_of(wrapper: Any, structures: list[Atoms]) -> Any:
    """The structures as one state of torch-sim's, where the wrapper computes, and in its dtype."""
    return ts.io.atoms_to_state(structures, wrapper.device, wrapper.dtype)


def computed(wrapper: Any, structures: list[Atoms]) -> dict[str, np.ndarray]:
    """Energies, forces and stresses of one batch."""
    return {name: value.cpu().numpy() for name, value in wrapper(state_of(wrapper, structures)).items()}


def assert_same(
    found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], structures: list[Atoms], dtype: torch.dtype
) -> None:
    """Results differ by the rounding, in the dtype of the model, of the sums of absolute values they are made of."""
    assert found.keys() == wanted.keys() >= {"energy", "forces", "stress"}
    work = CUTOFF * np.abs(wanted["forces"]).sum()
    volume = min(atoms.get_volume() for atoms in structures)
    scales = {"energy": np.abs(wanted["energy"]).sum() + work, "forces": work / CUTOFF}
    scales["stress"] = np.abs(wanted["stress"]).sum() + work / volume
    for name, scale in scales.items():
        assert found[name].dtype == wanted[name].dtype
        bound = FACTOR * ROUNDING * torch.finfo(dtype).eps * scale
        assert np.abs(found[name] - wanted[name]).max() <= bound, name


def assert_patched_in_place(make: Make, dtype: torch.dtype) -> None:
    """A wrapper is the same object that computes the same, conforms to torch-sim, and becomes what it was."""
    wrapper, structures = make(dtype), crystals()
    wanted = computed(wrapper, structures)
    assert eqaccel.patch(wrapper) is wrapper
    report = eqaccel.report(wrapper)
    assert report.accelerated > 0
    assert not report.unverified
    assert all(row.path.startswith("model.") for row in report.rows)
    assert_same(computed(wrapper, structures), wanted, structures, dtype)
    for number, atoms in enumerate(structures):  # of one structure after another of another size
        ends = np.cumsum([0, *map(len, structures)])[number : number + 2]
        alone = {"energy": wanted["energy"][[number]], "stress": wanted["stress"][[number]]}
        alone["forces"] = wanted["forces"][slice(*ends)]
        assert_same(computed(wrapper, [atoms]), alone, [atoms], dtype)
    validate_model_outputs(wrapper, wrapper.device, wrapper.dtype)
    assert eqaccel.unpatch(wrapper) is wrapper
    assert eqaccel.report(wrapper).accelerated == 0
    again = computed(wrapper, structures)
    if wrapper.device.type == "cpu":
        assert all(np.array_equal(value, again[name]) for name, value in wanted.items())
    else:  # whose sums of plain models have no order
        assert_same(again, wanted, structures, dtype)


def assert_refused_if_wrong(make: Make, family: str) -> None:
    """A patch that computes something else is taken back."""
    wrapper = make(torch.float64)
    modules = list(wrapper.modules())
    wrong = next(s for s in SABOTAGES if s.family == family and s.dtype == "both")
    with wrong.apply(), pytest.raises(VerificationError):
        eqaccel.patch(wrapper)
    assert eqaccel.report(wrapper).accelerated == 0
    assert all(a is b for a, b in zip(wrapper.modules(), modules, strict=True))


def nve(wrapper: Any) -> Any:
    """Dynamics whose structures are computed in several batches."""
    batcher = ts.BinningAutoBatcher(wrapper, memory_scales_with="n_atoms", max_memory_scaler=20)
    return integrated(wrapper, ts.nve, autobatcher=batcher)


def langevin(wrapper: Any) -> Any:
    """A thermostat, which draws random numbers."""
    return integrated(wrapper, ts.nvt_langevin)


def integrated(wrapper: Any, integrator: Any, **options: Any) -> Any:
    """The states after some steps from the same velocities."""
    torch.manual_seed(0)
    how = {"integrator": integrator, "n_steps": STEPS, "temperature": 300.0, "timestep": 0.001}
    return ts.integrate(state_of(wrapper, crystals()), wrapper, **how, **options)


def relaxed(wrapper: Any, optimizer: Any, convergence: Any = None) -> Any:
    """The states after some steps downhill, of which some are swapped for others in between."""
    batcher = ts.InFlightAutoBatcher(wrapper, memory_scales_with="n_atoms", max_memory_scaler=20)
    how = {"optimizer": optimizer, "max_steps": 3 * STEPS, "steps_between_swaps": STEPS // 2, "autobatcher": batcher}
    convergence = convergence or (lambda state, _: state.energy < torch.inf)  # every batch is done at the first swap
    return ts.optimize(state_of(wrapper, crystals()), wrapper, convergence_fn=convergence, **how)


def fire(wrapper: Any) -> Any:
    """Positions in cells that stay."""
    return relaxed(wrapper, ts.optimizers.fire)


def cell_fire(wrapper: Any) -> Any:
    """Positions and cells."""
    return relaxed(wrapper, ts.unit_cell_fire)


def frechet_fire(wrapper: Any) -> Any:
    """Positions and the logarithms of the deformations of cells."""
    return relaxed(wrapper, ts.frechet_cell_fire)


MOVES = (nve, langevin, fire, cell_fire, frechet_fire)


def assert_follows(make: Make, move: Callable[[Any], Any]) -> None:
    """A patched wrapper leads the same way: an error of forces moves atoms by itself times the square of the time."""
    plain = make(torch.float64)
    pull = np.abs(computed(plain, crystals())["forces"]).sum()
    wanted, found = move(plain), move(eqaccel.patch(make(torch.float64), verify=False))
    # In these units a step is at most 1 and no atom is lighter than 1; factor 10 for the growth of small differences.
    bound = 10 * STEPS**2 * FACTOR * ROUNDING * np.finfo(float).eps * max(pull, 1.0)
    assert found.n_systems == len(crystals())
    for name in ("positions", "cell"):
        assert float((getattr(found, name) - getattr(wanted, name)).abs().max()) <= bound, name
    start = state_of(plain, crystals())
    assert float((found.positions - start.positions).abs().max()) > 1e-4
