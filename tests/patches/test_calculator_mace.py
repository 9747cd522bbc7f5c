"""A patched MACE calculator: the class, properties, numbers and manners of the original, by another way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mace", reason="needs mace")

import mace_models as mm
from ase import units
from ase.build import bulk
from ase.calculators.mixing import SumCalculator
from ase.filters import FrechetCellFilter
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS
from mace.calculators import MACECalculator
from patch_checks import RELATIVE
from recordings import record_on_cpus
from stepping_checks import (
    assert_programs_are_the_same,
    assert_same_in_pieces,
    assert_uncounted_writes_are_noticed,
    without_pairs,
)
from structures import crystal_and_molecule

import eqaccel
from eqaccel import report, unpatch
from eqaccel.errors import StructureError
from eqaccel.patches.calculator import step_state
from eqaccel.patches.rounding import ROUNDING
from eqaccel.prepare import scalar_name

pytestmark = pytest.mark.filterwarnings("ignore")

_OF_MODELS = ("heads", "atomic_energies", "atomic_inter_scale", "atomic_inter_shift", "seed")


def patch(target: Any) -> Any:
    """Without verification of the model, which has tests of its own and takes seconds."""
    return eqaccel.patch(target, verify=False)


def model(seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A model whose first read-out is its own."""
    made = mm.energy_model(**changes)
    with torch.no_grad():
        made.readouts[0].linear.weight.mul_(1.0 + 0.1 * seed)
    return made


def calculator(device: torch.device, dtype: torch.dtype = torch.float64, models: int = 1, **options: Any) -> Any:
    changes = {name: options.pop(name) for name in _OF_MODELS if name in options}
    seed = changes.pop("seed", 0)
    made = [model(seed + number, **changes) for number in range(models)]
    return MACECalculator(models=made, device=str(device), default_dtype=scalar_name(dtype), **options)


def structures(device: torch.device) -> list[Any]:
    return list(crystal_and_molecule(np.random.default_rng(0)))


def assert_same(fast: dict[str, Any], plain: dict[str, Any], dtype: torch.dtype) -> None:
    """Every result is of the same kind, and differs by the rounding of a network; energies are sums over atoms."""
    assert fast.keys() == plain.keys()
    bound = ROUNDING * torch.finfo(dtype).eps
    work = 10 * float(np.abs(plain["forces"]).sum())
    for name, value in plain.items():
        other = fast[name]
        assert type(other) is type(value), name
        assert getattr(other, "dtype", None) == getattr(value, "dtype", None), name
        assert np.shape(other) == np.shape(value), name
        scale = np.abs(value).sum() + (work if "energ" in name else 0.0)
        assert np.abs(np.asarray(other) - np.asarray(value)).max() <= bound * scale, name


def results(calculator: Any, atoms: Any) -> dict[str, Any]:
    calculator.reset()
    calculator.calculate(atoms)
    return dict(calculator.results)


def test_all_properties(device: torch.device, dtype: torch.dtype) -> None:
    plain, fast = calculator(device, dtype), calculator(device, dtype)
    assert patch(fast) is fast
    assert type(fast).__name__ == "MACECalculator"
    assert isinstance(fast, MACECalculator)
    for atoms in structures(device):
        for number in range(2):
            atoms.positions += 0.05 * np.random.default_rng(number).normal(size=atoms.positions.shape)
            assert_same(results(fast, atoms), results(plain, atoms), dtype)
        assert_same(results(fast, atoms), results(plain, atoms), dtype)
    assert step_state(fast).calls == 6
    row = report(fast).rows[0]
    assert (row.path, row.kind, row.accelerated) == ("calculate", "MACECalculator", True)


def test_every_kind_of_block(device: torch.device) -> None:
    for interaction in mm.INTERACTIONS:
        made = mm.energy_model(interaction, **mm.TINY | {"hidden_irreps": "4x0e+4x1o"}).double()
        plain = MACECalculator(models=copy.deepcopy(made), device=str(device), default_dtype="float64")
        fast = patch(MACECalculator(models=made, device=str(device), default_dtype="float64"))
        for atoms in structures(device):
            expected = results(plain, atoms)
            for _ in range(2):  # of which a GPU records the second
                assert_same(results(fast, atoms), expected, torch.float64)
        assert step_state(fast).calls == 4, step_state(fast).note()


def test_weights_once_a_pair_of_atoms(device: torch.device) -> None:
    """In a cell so small that an atom is its own neighbour, in both directions, too."""
    changes = {"distance_transform": "Agnesi"}
    atoms_of = [*structures(device), bulk("C", "diamond", 2.4), bulk("C", "sc", 1.7)]
    atoms_of[2].rattle(0.05, seed=1)
    plain, fast, alone = (
        MACECalculator(models=mm.energy_model(**changes), device=str(device), default_dtype="float64") for _ in range(3)
    )
    for made in (fast, alone):
        patch(made)
    for atoms in atoms_of:
        found, again, others = results(fast, atoms), results(fast, atoms), [results(plain, atoms)]
        assert all(np.array_equal(found[name], again[name]) for name in found)
        with without_pairs():
            others.append(results(alone, atoms))
        if len(atoms) == 1:  # forces are the rounding of what its images do to it
            pull = np.abs(found["stress"]).sum() * atoms.get_volume() / atoms.cell.lengths().min()
            for result in (found, *others):
                assert np.abs(result["forces"]).max() <= ROUNDING * np.finfo(np.float64).eps * pull
                result["forces"] = np.zeros_like(result["forces"])
        for other in others:
            assert_same(found, other, torch.float64)
    assert "once a pair" in step_state(fast).note()
    assert "once a pair" not in step_state(alone).note()


def test_pieces_of_edges(device: torch.device) -> None:
    assert_same_in_pieces(patch(calculator(device)), structures(device), "float64")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_programs(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    assert_programs_are_the_same(patch(calculator(cpu, dtype)), structures(cpu))


def test_committee(device: torch.device) -> None:
    plain, fast = (calculator(device, torch.float32, models=2) for _ in range(2))
    patch(fast)
    for atoms in structures(device):
        assert_same(results(fast, atoms), results(plain, atoms), torch.float32)


def test_several_heads(device: torch.device) -> None:
    heads = {
        "heads": ["pbe", "scan"],
        "atomic_energies": np.array([[-3.0, -2.0, -1.0], [-3.5, -2.5, -0.5]]),
        "atomic_inter_scale": [1.1, 0.9],
        "atomic_inter_shift": [0.1, -0.2],
    }
    for head in heads["heads"]:
        plain, fast = calculator(device, **heads, head=head), patch(calculator(device, **heads, head=head))
        atoms = structures(device)[0]
        assert_same(results(fast, atoms), results(plain, atoms), torch.float64)
    for head in ("pbe", "none of them", None):
        fast.head = plain.head = head  # behind its back
        assert_same(results(fast, atoms), results(plain, atoms), torch.float64)


def test_units(device: torch.device) -> None:
    options = {"energy_units_to_eV": 2.0, "length_units_to_A": 0.5}
    plain, fast = calculator(device, **options), patch(calculator(device, **options))
    atoms = structures(device)[0]
    assert_same(results(fast, atoms), results(plain, atoms), torch.float64)


def test_what_is_no_step_goes_the_ordinary_way(device: torch.device) -> None:
    plain, fast = calculator(device), patch(calculator(device))
    atoms = structures(device)[0]
    for name in ("get_descriptors", "get_hessian"):
        expected = getattr(plain, name)(atoms)
        assert np.abs(getattr(fast, name)(atoms) - expected).max() <= ROUNDING * 2e-16 * np.abs(expected).sum()
    stresses = calculator(device, compute_atomic_stresses=True)
    assert_same(results(patch(copy.deepcopy(stresses)), atoms), results(stresses, atoms), torch.float64)


class Doubling(MACECalculator):
    """A user's own calculator."""

    def calculate(self, *arguments: Any, **options: Any) -> None:
        super().calculate(*arguments, **options)
        self.results["energy"] *= 2


@pytest.mark.parametrize("name", ["Doubling", "MACECalculator"])
def test_a_derived_class_keeps_its_methods(name: str, device: torch.device) -> None:
    """Whatever it is called."""
    atoms = structures(device)[0]
    own = patch(type(name, (Doubling,), {})(models=model(seed=0).double(), device=str(device), default_dtype="float64"))
    assert results(own, atoms)["energy"] == pytest.approx(
        2 * results(calculator(device), atoms)["energy"], rel=RELATIVE
    )
    assert f"{name} has a calculate method of its own" in report(own).rows[0].note


@pytest.mark.parametrize("whole_class", [False, True])
def test_methods_that_were_put_into_a_calculator(
    whole_class: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute, whether it is in the calculator or in its class."""
    atoms, calculators = structures(device)[0], [calculator(device), patch(calculator(device))]
    for own in [MACECalculator] if whole_class else calculators:
        convert = own._atoms_to_batch
        monkeypatch.setattr(
            own, "_atoms_to_batch", lambda *args, convert=convert: convert(*args[:-1], scaled(args[-1]))
        )
    plain, fast = (results(own, atoms) for own in calculators)
    assert_same(fast, plain, torch.float64)
    assert "MACECalculator has a _atoms_to_batch method of its own" in report(calculators[1]).rows[0].note


def scaled(atoms: Any) -> Any:
    """The same structure, stretched."""
    other = atoms.copy()
    other.set_cell(other.cell.array * 1.01, scale_atoms=True)
    return other


def trajectory(calculator: Any, atoms: Any, run: Callable[[Any], None]) -> np.ndarray:
    atoms = atoms.copy()
    atoms.calc = calculator
    run(atoms)
    return np.concatenate([atoms.positions.ravel(), atoms.cell.array.ravel()])


def dynamics(atoms: Any) -> None:
    atoms.set_momenta(np.random.default_rng(0).normal(size=(len(atoms), 3)))
    VelocityVerlet(atoms, 0.5 * units.fs).run(8)


def relaxation(atoms: Any) -> None:
    BFGS(FrechetCellFilter(atoms), logfile=None).run(steps=4)


@pytest.mark.parametrize("run", [dynamics, relaxation])
def test_trajectories(run: Callable[[Any], None], device: torch.device) -> None:
    plain, fast = calculator(device), patch(calculator(device))
    atoms = structures(device)[0]
    expected, found = trajectory(plain, atoms, run), trajectory(fast, atoms, run)
    # Rounding of forces, 1e-13 of them, grows by less than a factor of ten a step.
    assert np.abs(found - expected).max() <= 1e-8
    assert np.array_equal(trajectory(fast, atoms, run), found), "the same again, to the last bit"


def test_copies_and_pickles(device: torch.device) -> None:
    fast = patch(calculator(device))
    atoms = structures(device)[0]
    expected = results(fast, atoms)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert step_state(twin).step is None
        assert_same(results(twin, atoms), expected, torch.float64)
        assert step_state(twin).calls == 1
        assert_same(results(unpatch(twin), atoms), expected, torch.float64)
        assert type(twin) is MACECalculator
    assert step_state(fast).calls == 1


def test_sums_of_calculators(device: torch.device) -> None:
    atoms = structures(device)[0]
    total = patch(SumCalculator([calculator(device), calculator(device)]))
    atoms.calc = total
    single = results(calculator(device), atoms)
    assert atoms.get_potential_energy() == pytest.approx(2 * single["energy"], rel=RELATIVE)
    assert [row.path for row in report(total).rows[:2]] == ["calcs.0.calculate", "calcs.1.calculate"]


def scale_in_place(model: Any) -> None:
    with torch.no_grad():
        model.readouts[0].linear.weight.mul_(1.5)


def assign_data(model: Any) -> None:
    model.readouts[0].linear.weight.data = 1.5 * model.readouts[0].linear.weight.data


def new_parameter(model: Any) -> None:
    linear = model.readouts[0].linear
    linear.weight = torch.nn.Parameter(1.5 * linear.weight.detach())


def load_state(model: Any) -> None:
    state = copy.deepcopy(model.state_dict())
    state["readouts.0.linear.weight"] *= 1.5
    model.load_state_dict(state)


def scale_buffer(model: Any) -> None:
    model.scale_shift.scale.mul_(1.5)


def new_module(model: Any) -> None:
    model.readouts[0] = copy.deepcopy(model.readouts[0])
    scale_in_place(model)


def new_activations(model: Any) -> None:
    for part in (model.readouts[1].non_linearity.acts[0], model.interactions[0].conv_tp_weights.layer0.act):
        part.f = torch.tanh


CHANGES = [scale_in_place, assign_data, new_parameter, load_state, scale_buffer, new_module, new_activations]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_noticed(
    change: Callable[[Any], None], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_on_cpus(monkeypatch, device)
    fast, plain = patch(calculator(device)), calculator(device)
    atoms = structures(device)[0]
    before = results(fast, atoms)
    assert results(fast, atoms)["energy"] == pytest.approx(before["energy"], rel=RELATIVE)
    assert sum(step_state(fast).step.captures.values()) == 1
    for calc in (fast, plain):
        change(calc.models[0])
    expected = results(plain, atoms)
    assert abs(expected["energy"] - before["energy"]) > 1e-6
    assert_same(results(fast, atoms), expected, torch.float64)


@pytest.mark.parametrize("changes", [{}, {"pair_repulsion": True, "distance_transform": "Agnesi"}])
def test_writes_that_torch_does_not_count(changes: dict[str, Any], device: torch.device) -> None:
    made = [MACECalculator(models=[model(**changes)], device=str(device), default_dtype="float64") for _ in range(2)]
    atoms = structures(device)[0]
    assert_uncounted_writes_are_noticed(patch(made[0]), made[1], lambda c: c.models[0], atoms, 1e-3, "float64")


def test_another_model_another_type_and_no_patch(device: torch.device) -> None:
    fast = patch(calculator(device))
    atoms = structures(device)[0]
    results(fast, atoms)
    other = calculator(device, seed=5)
    fast.models = [patch(model(seed=5).double().to(device))]
    assert_same(results(fast, atoms), results(other, atoms), torch.float64)
    fast.models = other.models  # which is not patched
    assert_same(results(fast, atoms), results(other, atoms), torch.float64)
    assert "is not patched" in report(fast).rows[0].note


def test_recorded_steps_follow_structures(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpus(monkeypatch, device)
    fast, plain, atoms = patch(calculator(device)), calculator(device), structures(device)[0]
    fast.calculate(atoms), fast.calculate(atoms)
    step = step_state(fast).step
    swapped, sheared, moved, fewer = (atoms.copy() for _ in range(4))
    swapped.numbers[[0, 1]] = swapped.numbers[[1, 0]]
    sheared.set_cell(sheared.cell.array @ (np.eye(3) + 0.05 * np.eye(3, k=1)), scale_atoms=True)
    moved.positions[3] += 1.0
    del fewer[5]
    for changed in (swapped, sheared, moved, fewer):
        for _ in range(2):  # without a reset, which dynamics have no use for
            fast.calculate(changed)
        assert_same(fast.results, results(plain, changed), torch.float64)
    assert step_state(fast).step is step
    wrong = atoms.copy()
    wrong.positions[0] = np.nan
    with pytest.raises(StructureError):
        fast.calculate(wrong)
    assert not fast.results
    fast.calculate(fewer)
    step_state(fast)._types = (fewer.numbers.copy(), np.zeros(7, dtype=np.int64))  # a guess that is wrong
    fast.calculate(fewer)
    assert_same(fast.results, results(plain, fewer), torch.float64)


def test_hooks_are_called(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpus(monkeypatch, device)
    fast, atoms, seen = patch(calculator(device)), structures(device)[0], []
    results(fast, atoms), results(fast, atoms)
    handle = fast.models[0].register_forward_hook(lambda *_: seen.append(1))
    results(fast, atoms)
    assert seen
    handle.remove()
    results(fast, atoms)
    assert len(seen) == 1
    assert step_state(fast).calls == 3


def test_bad_structures(device: torch.device) -> None:
    fast, atoms = patch(calculator(device)), structures(device)[0]
    wrong = atoms.copy()
    wrong.numbers[0] = 79
    with pytest.raises(StructureError, match=r"atoms: expected elements that the model knows .* got \[79\]"):
        results(fast, wrong)
    wrong = atoms.copy()
    wrong.positions[3, 1] = np.nan
    with pytest.raises(StructureError, match="for atom 3"):
        results(fast, wrong)
    assert_same(results(fast, atoms), results(calculator(device), atoms), torch.float64)


def test_positions_in_single_precision(device: torch.device) -> None:
    """A program may put them among the arrays of a structure."""
    plain, fast, atoms = calculator(device), patch(calculator(device)), structures(device)[0]
    atoms.arrays["positions"] = atoms.positions.astype(np.float32)
    for _ in range(2):
        assert_same(results(fast, atoms), results(plain, atoms), torch.float64)
        atoms.rattle(0.01, seed=1)


@pytest.mark.parametrize("distance", [0.0, 1e-8, 1e-3])
def test_atoms_in_one_place(distance: float, device: torch.device) -> None:
    """What the model itself gives for atoms that overlap: nothing defined for the same point, numbers beside it."""
    plain, fast, atoms = calculator(device), patch(calculator(device)), structures(device)[1]
    before = results(fast, atoms)
    overlapping = atoms.copy()
    overlapping.positions[1] = overlapping.positions[0] + [distance, 0, 0]
    found, wanted = results(fast, overlapping), results(plain, overlapping)
    if distance:
        assert_same(found, wanted, torch.float64)
    else:
        assert np.isnan(wanted["energy"])
        assert np.isnan(found["energy"])
        assert np.isnan(found["forces"][:3]).all()  # the last atom is alone
    assert np.array_equal(results(fast, atoms)["forces"], before["forces"])


@pytest.mark.gpu
def test_a_model_that_moves() -> None:
    fast, atoms = patch(calculator(torch.device("cuda"))), structures(torch.device("cuda"))[0]
    expected = results(fast, atoms)
    fast.models[0].cpu()
    fast.device = torch.device("cpu")
    assert_same(results(fast, atoms), expected, torch.float64)
    fast.models[0].cuda()
    fast.device = torch.device("cuda")
    assert_same(results(fast, atoms), expected, torch.float64)
