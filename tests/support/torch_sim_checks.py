"""What the tests of torch-sim share, whatever the kind of model: wrappers before and after `patch`, side by side."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_sim as ts
from ase import Atoms
from ase.build import bulk
from recordings import record_on_cpus
from sabotage import SABOTAGES
from torch_sim.models.interface import validate_model_outputs

import eqaccel
from eqaccel.errors import StructureError, VerificationError
from eqaccel.patches.calculator import step_state
from eqaccel.patches.rounding import FACTOR, ROUNDING

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
    with torch.jit.optimized_execution(False):  # e3nn's harmonics round otherwise once torch has specialised them
        return numbers(wrapper(state_of(wrapper, structures)))


def numbers(results: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Results as arrays; none of them takes part in gradients."""
    assert not any(value.requires_grad for value in results.values())
    return {name: value.cpu().numpy() for name, value in results.items()}


def patched(wrapper: Any) -> Any:
    """Without verification of the model, which has tests of its own and takes seconds."""
    return eqaccel.patch(wrapper, verify=False)


def assert_same(
    found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], structures: list[Atoms], dtype: torch.dtype
) -> None:
    """Results differ by the rounding, in the dtype of the model, of the sums of absolute values they are made of."""
    assert found.keys() == wanted.keys() >= {"energy", "forces", "stress"}
    work = CUTOFF * np.abs(wanted["forces"]).sum()
    volume = min(abs(np.linalg.det(atoms.cell.array)) for atoms in structures) or 1.0
    scales = {"energy": np.abs(wanted["energy"]).sum() + work, "forces": work / CUTOFF}
    scales["stress"] = np.nansum(np.abs(wanted["stress"])) + work / volume
    for name, scale in scales.items():
        assert found[name].dtype == wanted[name].dtype
        assert found[name].shape == wanted[name].shape
        assert np.array_equal(np.isnan(found[name]), np.isnan(wanted[name]))
        bound = FACTOR * ROUNDING * torch.finfo(dtype).eps * scale
        assert np.abs(np.nan_to_num(found[name] - wanted[name])).max() <= bound, name


def assert_patched_in_place(make: Make, dtype: torch.dtype) -> None:
    """A wrapper is the same object that computes the same, conforms to torch-sim, and becomes what it was."""
    wrapper, structures = make(dtype), crystals()
    came_as, held = type(wrapper), set(vars(wrapper))
    wanted = computed(wrapper, structures)
    held |= set(vars(wrapper))
    assert eqaccel.patch(wrapper) is wrapper
    report = eqaccel.report(wrapper)
    assert report.accelerated > 0
    assert not report.unverified
    assert report.rows[0].path == "forward"
    assert all(row.path.startswith("model.") for row in report.rows[1:])
    assert_same(computed(wrapper, structures), wanted, structures, dtype)
    for number, atoms in enumerate(structures):  # of one structure after another of another size
        ends = np.cumsum([0, *map(len, structures)])[number : number + 2]
        alone = {"energy": wanted["energy"][[number]], "stress": wanted["stress"][[number]]}
        alone["forces"] = wanted["forces"][slice(*ends)]
        assert_same(computed(wrapper, [atoms]), alone, [atoms], dtype)
    validate_model_outputs(wrapper, wrapper.device, wrapper.dtype)
    row = eqaccel.report(wrapper).rows[0]
    assert row.accelerated, row.note
    assert step_state(wrapper).calls == 8, "four here, and as many in the conformance test"
    assert eqaccel.unpatch(wrapper) is wrapper
    assert type(wrapper) is came_as
    assert set(vars(wrapper)) == held
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


def assert_follows(make: Make, move: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched wrapper leads the same way: an error of forces moves atoms by itself times the square of the time.

    By recordings, on a CPU too, which know no model but that of when they were made.
    """
    plain = make(torch.float64)
    record_on_cpus(monkeypatch, plain.device)
    fast = patched(make(torch.float64))
    pull = np.abs(computed(plain, crystals())["forces"]).sum()
    wanted, found = move(plain), move(fast)
    # In these units a step is at most 1 and no atom is lighter than 1; factor 10 for the growth of small differences.
    bound = 10 * STEPS**2 * FACTOR * ROUNDING * np.finfo(float).eps * max(pull, 1.0)
    assert found.n_systems == len(crystals())
    for name in ("positions", "cell"):
        assert float((getattr(found, name) - getattr(wanted, name)).abs().max()) <= bound, name
    start = state_of(plain, crystals())
    assert float((found.positions - start.positions).abs().max()) > 1e-4
    own = step_state(fast)
    assert own.step.rebuilds <= own.calls / 2, "though integrators put atoms back into cells"
    assert own.step.captures


def assert_never_stale(make: Make, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float64) -> None:
    """Whatever happens to a batch between two calls, the next one computes what is there."""
    plain = make(dtype)
    record_on_cpus(monkeypatch, plain.device)
    fast, rng = patched(make(dtype)), np.random.default_rng(1)
    start = crystals()
    from_start = computed(plain, start)

    def changed(change: Callable[[list[Atoms]], Any]) -> list[Atoms]:
        structures = [atoms.copy() for atoms in start]
        return change(structures) or structures

    shear = np.eye(3) + 0.4 * np.eye(3, k=1)
    changes: dict[str, Callable[[list[Atoms]], Any]] = {
        "a little": lambda s: [atoms.rattle(0.02, rng=rng) for atoms in s] and None,
        "fast atoms": lambda s: [atoms.rattle(0.5, rng=rng) for atoms in s] and None,
        "teleported": lambda s: s[1].positions.__setitem__(0, s[1].positions[0] + [1.1, -0.6, 0.9]),
        "sheared": lambda s: s[0].set_cell(s[0].cell.array @ shear),
        "stretched": lambda s: s[2].set_cell(1.1 * s[2].cell.array, scale_atoms=True),
        "swapped": lambda s: s[::-1],
        "other elements": lambda s: s[0].numbers.__setitem__(slice(None), 26),
        "exchanged": lambda s: s[2].set_positions(s[2].positions[::-1]),
        "fewer": lambda s: s[1:],
        "more": lambda s: [*s, s[0]],
    }
    for name, change in changes.items():
        structures = changed(change)
        wanted = computed(plain, structures)
        for _ in range(2):
            assert_same(computed(fast, start), from_start, start, dtype)
        for _ in range(3):
            assert_same(computed(fast, structures), wanted, structures, dtype)
        assert eqaccel.report(fast).rows[0].accelerated, name
    assert step_state(fast).step.captures


def assert_odd_states(make: Make, dtype: torch.dtype) -> None:
    """One atom, no edges, no periodicity, no cell, a left-handed one: by steps, with the wrapper's own numbers."""
    plain, fast = make(dtype), patched(make(dtype))
    lonely = [Atoms("Si", cell=9 * np.eye(3), pbc=True)]
    apart = [Atoms("SiFe", [[0, 0, 0], [0, 0, 8]], pbc=False), *[Atoms("FeO", [[0, 0, 0], [0, 1.9, 0]], pbc=False)] * 2]
    open_ones = crystals()
    for atoms in open_ones:
        atoms.pbc = False
    mirrored = crystals()
    for atoms in mirrored:
        atoms.set_cell(atoms.cell.array[[1, 0, 2]])
    for structures in (lonely, apart, open_ones, mirrored):
        with np.errstate(all="raise"):
            found = computed(fast, structures)
        assert_same(found, computed(plain, structures), structures, dtype)
        assert eqaccel.report(fast).rows[0].accelerated
    assert step_state(fast).calls == 4


def assert_ordinary_ways(make: Make, dtype: torch.dtype) -> None:
    """What a step cannot do, the wrapper does itself, and the report says why; then steps go on."""
    plain, fast, structures = make(dtype), patched(make(dtype)), crystals()
    wanted = computed(plain, structures)

    def assert_ordinary(reason: str) -> None:
        assert_same(computed(fast, structures), wanted, structures, dtype)
        row = eqaccel.report(fast).rows[0]
        assert (row.path, row.accelerated) == ("forward", False)
        assert reason in row.note

    def assert_fast() -> None:
        assert_same(computed(fast, structures), wanted, structures, dtype)
        assert eqaccel.report(fast).rows[0].accelerated

    assert_fast()
    handle = fast.model.register_forward_hook(lambda *_: None)
    assert_ordinary("has hooks")
    handle.remove()
    assert_fast()
    inside = fast.model
    eqaccel.unpatch(inside)
    assert_ordinary("is not patched (any more)")
    patched(inside)
    assert_fast()
    other = torch.float32 if dtype == torch.float64 else torch.float64
    wrong = ts.io.atoms_to_state(structures, fast.device, other)
    assert "its state is in" in _note_of(fast, wrong)
    # Without edges: wrappers that take a structure's atoms by their order would look for them out of bounds.
    mixed = state_of(fast, [Atoms(symbol, cell=9 * np.eye(3), pbc=True) for symbol in ("Si", "Fe")])
    mixed.system_idx = mixed.system_idx.flip(0)
    assert "not in the order" in _note_of(fast, mixed)
    assert_fast()

    class Doubled(type(plain)):  # type: ignore[misc]
        def forward(self, state: Any) -> dict[str, torch.Tensor]:
            return {name: 2 * value for name, value in super().forward(state).items()}

    derived = make(dtype)
    derived.__class__ = Doubled
    found = computed(patched(derived), structures)
    assert_same({name: value / 2 for name, value in found.items()}, wanted, structures, dtype)
    assert "Doubled has a forward method of its own" in eqaccel.report(derived).rows[0].note
    assert type(eqaccel.unpatch(derived)) is Doubled


def _note_of(wrapper: Any, state: Any) -> str:
    """What a report says after a state that the wrapper may refuse."""
    with contextlib.suppress(RuntimeError, IndexError, ValueError):
        wrapper(state)
    return eqaccel.report(wrapper).rows[0].note


def assert_changes_are_noticed(make: Make, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that change between two calls change results as they do without a patch; wrong states are refused."""
    plain = make(dtype)
    record_on_cpus(monkeypatch, plain.device)
    fast, structures = patched(make(dtype)), crystals()
    for _ in range(3):
        before = computed(fast, structures)
    for wrapper in (plain, fast):
        with torch.no_grad():
            for parameter in wrapper.model.parameters():
                parameter.mul_(1.01)
    wanted = computed(plain, structures)
    assert np.abs(wanted["forces"] - before["forces"]).max() > 1e-3 * np.abs(before["forces"]).max()
    assert_same(computed(fast, structures), wanted, structures, dtype)
    assert "1 changes of the model" in eqaccel.report(fast).rows[0].note
    state = state_of(fast, structures)
    state.positions.requires_grad_()  # as plain MACE leaves it
    assert_same(numbers(fast(state)), wanted, structures, dtype)
    with torch.inference_mode():
        assert_same(numbers(fast(state_of(fast, structures))), wanted, structures, dtype)
    wrong = state_of(fast, structures)
    wrong.positions[4, 1] = torch.nan
    with pytest.raises(StructureError, match=r"positions: expected finite numbers, got .* for atom 4"):
        fast(wrong)
    wrong = state_of(fast, structures)
    wrong.atomic_numbers[3] = 1
    with pytest.raises(StructureError, match=r"expected elements that the model knows .*got \[1\]"):
        fast(wrong)
    assert_same(computed(fast, structures), wanted, structures, dtype)


def assert_copies(make: Make, dtype: torch.dtype) -> None:
    """Copies and pickles compute by steps of their own, and can be unpatched; so does a wrapper inside of another."""
    fast, structures = patched(make(dtype)), crystals()
    wanted = computed(fast, structures)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert_same(computed(twin, structures), wanted, structures, dtype)
        assert step_state(twin).calls == 1
        assert_same(computed(eqaccel.unpatch(twin), structures), wanted, structures, dtype)
        assert type(twin) is type(make(dtype))
    assert step_state(fast).calls == 1
    inside, holder = make(dtype), torch.nn.Module()
    holder.first = inside
    patched([holder])
    assert_same(computed(inside, structures), wanted, structures, dtype)
    assert [row.path for row in eqaccel.report([holder]).rows[:1]] == ["0.first.forward"]
    eqaccel.unpatch([holder])
    assert type(inside) is type(make(dtype))
    assert step_state(inside) is None
