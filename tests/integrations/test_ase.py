"""`eqaccel.Calculator` with MACE models: of files, modules and exported files, against MACE's own calculator."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")
pytest.importorskip("ase", reason="needs ase")

import calculator_checks as cc
import mace_models as mm
from ase import Atoms
from ase.calculators.calculator import PropertyNotImplementedError
from ase.io.trajectory import Trajectory
from ase.mep import NEB
from mace.calculators import MACECalculator
from recordings import record_on_cpus

import eqaccel
from eqaccel.errors import CalculatorError

pytestmark = pytest.mark.filterwarnings("ignore")


def library(model: torch.nn.Module, device: torch.device | str = "cpu", **options: Any) -> MACECalculator:
    """MACE's own calculator; leaves the model and torch's default dtype as they were."""
    with mm.default_dtype(torch.get_default_dtype()):
        return MACECalculator(models=[copy.deepcopy(model)], device=str(device), default_dtype="float64", **options)


def calculator(model: Any = None, **options: Any) -> eqaccel.Calculator:
    """A calculator of a small model, without the verification, which has tests of its own."""
    return eqaccel.Calculator(
        mm.energy_model() if model is None else model, **{"verify": False, "device": "cpu"} | options
    )


@pytest.fixture
def water() -> Atoms:
    return Atoms("OHH", [[0, 0, 0], [0.95, 0.1, 0], [-0.3, 0.9, 0.1]])


@pytest.fixture(params=["file", "module", "patched module", "exported file"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    model = mm.energy_model()
    if request.param == "file":
        torch.save(model, tmp_path / "my.model")
        return tmp_path / "my.model"
    if request.param == "module":
        return model
    eqaccel.patch(model, verify=False)
    if request.param == "patched module":
        return model
    eqaccel.export(model, tmp_path / "my.pt", verify=False)
    return str(tmp_path / "my.pt")


def test_every_kind_of_source(source: Any, device: torch.device) -> None:
    found = eqaccel.Calculator(source, device=device)
    assert torch.get_default_dtype() == torch.float32  # which the model is not in
    wanted = library(mm.energy_model(), device)
    structures = [*mm.structures(), *(atoms for atoms in cc.variety() if len(atoms))]
    for _ in range(3):
        cc.assert_same_on(found, wanted, structures)
        for atoms in structures:
            atoms.rattle(0.01, seed=1)
    assert torch.get_default_dtype() == torch.float32
    assert (found.model is None) == isinstance(source, str)
    assert cc.calls(found) > 0


def test_batch(source: Any, device: torch.device) -> None:
    cc.assert_batch_is_single_calls(eqaccel.Calculator(source, device=device, verify=False))


def test_a_module_is_patched_in_place() -> None:
    model = mm.energy_model()
    found = eqaccel.Calculator(model, device="cpu")
    assert found.model is model
    assert eqaccel.report(model).accelerated > 0
    assert eqaccel.report(found).accelerated == eqaccel.report(model).accelerated + 1
    with pytest.raises(AttributeError):
        found.model = mm.energy_model()


def test_auto_takes_a_gpu_if_there_is_one(source: Any) -> None:
    found = eqaccel.Calculator(source, verify=False)
    assert found.parameters["device"].partition(":")[0] == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", ["float32", torch.float32])
def test_dtype(dtype: Any, device: torch.device, water: Atoms) -> None:
    narrow = calculator(dtype=dtype, device=device)
    assert next(narrow.model.parameters()).dtype == torch.float32
    assert narrow.parameters["dtype"] == "float32"
    cc.assert_same_on(narrow, library(mm.energy_model()), [water, *mm.structures()], np.finfo("float32").eps)
    assert calculator(mm.energy_model(dtype=torch.float32)).parameters["dtype"] == "float32"


def test_widened(water: Atoms) -> None:
    model = mm.energy_model(dtype=torch.float32)
    cc.assert_same_on(calculator(copy.deepcopy(model), dtype="float64"), eqaccel.patch(library(model)), [water])


def test_heads(water: Atoms) -> None:
    options = {"heads": ["first", "second"], "atomic_energies": np.array([[-3.0, -2.0, -1.0], [-1.0, -1.5, -4.0]])}
    model = mm.energy_model(**options, atomic_inter_scale=[1.1, 0.9], atomic_inter_shift=[0.1, -0.2])
    for head in ("first", "second"):
        cc.assert_same_on(calculator(copy.deepcopy(model), head=head), library(model, head=head), [water])
    for head in (None, "third"):
        with pytest.raises(CalculatorError, match=f"head: expected one of 'first', 'second', got {head!r}"):
            calculator(model, head=head)
    assert eqaccel.report(model).accelerated == 0  # refused, and left as it was


@pytest.mark.parametrize("move", [cc.relaxation, cc.barostat])
def test_moves_as_with_the_library(move: Any, device: torch.device) -> None:
    cc.assert_follows(calculator(device=device), library(mm.energy_model(), device), cc.variety()[-1], move)


def test_images_of_a_path_share_a_calculator(device: torch.device, water: Atoms) -> None:
    shared, wanted = calculator(device=device), library(mm.energy_model(), device)
    last = water.copy()
    last.positions[1] += [0.2, 0.5, 0.1]
    forces = []
    for found in (shared, wanted):
        images = [water.copy() for _ in range(4)] + [last.copy()]
        for image in images:
            image.calc = found
        path = NEB(images, allow_shared_calculator=True, method="improvedtangent")
        path.interpolate()
        forces.append(path.get_forces())
        np.testing.assert_array_equal(forces[-1], path.get_forces())
        batch = shared.batch(images)
        for image, result in zip(images, batch, strict=True):
            cc.assert_same(result, cc.results_of(found, image), 1.0, np.finfo(float).eps)
    scale = np.abs(forces[1]).sum()
    assert np.abs(forces[0] - forces[1]).max() <= cc.FACTOR * cc.ROUNDING * np.finfo(float).eps * scale


def test_what_is_computed_once(water: Atoms) -> None:
    found = calculator()
    water.calc = found
    water.get_forces(), water.get_potential_energy(), water.get_potential_energies()
    assert cc.calls(found) == 1
    water.set_initial_charges([0.1, 0.2, 0.3])
    water.get_potential_energy()
    assert cc.calls(found) == 1
    changes = [
        lambda: water.rattle(0.01),
        lambda: water.set_cell([9, 9, 9]),
        lambda: water.set_pbc(True),
        lambda: water.numbers.__setitem__(0, 6),
        lambda: found.reset(),
    ]
    for count, change in enumerate(changes, 2):
        change()
        water.get_potential_energy()
        assert cc.calls(found) == count


def test_only_periodic_structures_have_a_stress(water: Atoms) -> None:
    for atoms, has_stress in (
        (water, False),
        (mm.structures()[0], True),
        (cc.variety()[3], True),
        (cc.variety()[5], False),
    ):
        atoms.calc = calculator()
        atoms.get_forces()
        assert ("stress" in atoms.calc.results) == has_stress
        if not has_stress:
            with pytest.raises(PropertyNotImplementedError):
                atoms.get_stress()


def test_changes_of_the_model_are_noticed(water: Atoms, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpus(monkeypatch, device)
    found = calculator(device=device)
    before = cc.results_of(found, water)
    found.calculate(water)
    assert sum(found._eqaccel_step.step().captures.values()) == 1
    with torch.no_grad():
        found.model.scale_shift.scale.mul_(2.0)
    changed = mm.energy_model()
    changed.scale_shift.scale.mul_(2.0)
    assert found.check_state(found.atoms) == ["model"]
    cc.assert_same_on(found, library(changed), [water])
    assert cc.results_of(found, water)["energy"] != before["energy"]
    found.model.float()
    cc.assert_same_on(found, library(changed), [water], np.finfo("float32").eps)
    assert "2 changes of the model" in str(eqaccel.report(found))
    eqaccel.unpatch(found)
    for compute in (lambda: cc.results_of(found, water), lambda: found.batch([water])):
        with pytest.raises(CalculatorError, match=r"is not patched .*; call eqaccel\.patch\(calculator\.model\)"):
            compute()
    eqaccel.patch(found, verify=False)
    cc.assert_same_on(found, library(changed), [water], np.finfo("float32").eps)
    found.model.register_forward_hook(lambda *_: None)
    with pytest.raises(CalculatorError, match="the model has hooks"):
        cc.results_of(found, water)


def test_writes_that_torch_does_not_count(water: Atoms, device: torch.device) -> None:
    """ASE does not know of them, so a structure that stays is computed anew after a reset."""
    found, changed = calculator(device=device), mm.energy_model()
    before = cc.results_of(found, water)
    for model in (found.model, changed):
        for tensor in (*model.parameters(), model.scale_shift.shift, model.atomic_energies_fn.atomic_energies):
            tensor.data.copy_(1.05 * tensor.data)
    found.reset()
    cc.assert_same_on(found, library(changed), [water])
    assert abs(cc.results_of(found, water)["energy"] - before["energy"]) > 1e-3


def test_copies(source: Any, water: Atoms) -> None:
    found = calculator(source)
    cc.assert_copies(found, water, [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
    if found.model is not None:
        duplicate = copy.deepcopy(found)
        with torch.no_grad():
            duplicate.model.scale_shift.scale.mul_(2.0)
        assert cc.results_of(duplicate, water)["energy"] != cc.results_of(found, water)["energy"]
        assert found.check_state(water) == []


def test_a_pickled_calculator_wants_its_file_as_it_was(tmp_path: Path) -> None:
    model = eqaccel.patch(mm.energy_model(), verify=False)
    file = tmp_path / "my.pt"
    eqaccel.export(model, file, verify=False)
    text = pickle.dumps(calculator(file))
    with torch.no_grad():
        model.scale_shift.scale.mul_(2.0)
    eqaccel.export(model, file, verify=False)
    with pytest.raises(CalculatorError, match=r"as it was when the calculator was pickled"):
        pickle.loads(text)


def test_what_ase_writes_down(tmp_path: Path, water: Atoms) -> None:
    torch.save(mm.energy_model(), tmp_path / "my.model")
    found = calculator(str(tmp_path / "my.model"), skin=0.3)
    parameters = {
        "model": str(tmp_path / "my.model"),
        "device": "cpu",
        "dtype": "float64",
        "head": "Default",
        "skin": 0.3,
    }
    assert json.loads(json.dumps(found.todict())) == parameters
    assert "my.model" in repr(found)
    assert "H C O, float64 on cpu, cutoff 3, skin 0.3" in repr(found)
    water.calc = found
    energy = water.get_potential_energy()
    with Trajectory(tmp_path / "water.traj", "w") as trajectory:
        trajectory.write(water)
    with Trajectory(tmp_path / "water.traj") as trajectory:
        assert trajectory[0].get_potential_energy() == energy
    with pytest.raises(CalculatorError, match="set: expected no parameters, got skin"):
        found.set(skin=0.4)


def test_reports_of_combinations(source: Any) -> None:
    from ase.calculators.lj import LennardJones
    from ase.calculators.mixing import SumCalculator

    found = calculator(source)
    if found.model is not None:
        rows = eqaccel.report(SumCalculator([LennardJones(), found])).rows
        assert "calcs.1.calculate" in {row.path for row in rows} or "mixer.calcs.1.calculate" in {
            row.path for row in rows
        }
    else:
        assert "my.pt, an exported file of a mace model" in str(eqaccel.report(found))


def test_bad_structures(device: torch.device) -> None:
    cc.assert_refuses_bad_structures(calculator(device=device))


def _file(folder: Path, content: bytes) -> Path:
    (folder / "bad.model").write_bytes(content)
    return folder / "bad.model"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda f: f / "none.model", {}, "model: expected a file with a whole model .* No such file"),
        (lambda f: _file(f, b""), {}, "model: .* is empty"),
        (lambda f: _file(f, b"no model"), {}, "model: .* does not open"),
        (lambda f: _file(f, b"x" * 200 + b"eqaccel sha256 " + b"0" * 64), {}, "is damaged"),
        (lambda f: 3, {}, "model: expected the name of a file or a torch.nn.Module, got int"),
        (lambda f: library(mm.energy_model()), {}, r"got MACECalculator; .* eqaccel\.patch\(calculator\)"),
        (lambda f: torch.nn.Linear(2, 2), {}, "model: expected a model of a kind .*, got Linear"),
        (lambda f: mm.dipole_model(), {}, "got AtomicDipolesMACE"),
        (lambda f: torch.nn.ModuleList([mm.energy_model(), mm.energy_model()]), {}, "model: expected one model, got 2"),
        (lambda f: mm.energy_model(), {"device": "tpu"}, "device: expected .* got 'tpu'"),
        (lambda f: mm.energy_model(), {"device": "cuda:99"}, "device: expected 'auto', 'cpu' or one of the GPUs"),
        (lambda f: mm.energy_model(), {"dtype": "float16"}, "dtype: expected torch.float32 or torch.float64"),
        (lambda f: mm.energy_model(), {"head": "none"}, "head: expected one of 'Default', got 'none'"),
        (lambda f: mm.energy_model(), {"skin": -1.0}, "skin: expected a length in angstrom, zero or more, got -1.0"),
        (lambda f: mm.energy_model(), {"skin": float("nan")}, "skin: .* got nan"),
        (lambda f: mm.energy_model(), {"type_map": {"Xx": "C"}}, "type_map: expected chemical symbols, .* 'Xx': 'C'"),
        (
            lambda f: mm.energy_model(),
            {"type_map": {"C": "Si"}},
            r"one of the model's types \(H, C, O\), got 'C': 'Si'",
        ),
    ],
)
def test_bad_arguments(model: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CalculatorError, match=message):
        calculator(model(tmp_path), **options)


def test_an_exported_file_keeps_its_dtype_and_head(tmp_path: Path) -> None:
    eqaccel.export(eqaccel.patch(mm.energy_model(), verify=False), tmp_path / "my.pt", verify=False)
    for options, message in (
        ({"dtype": "float32"}, "dtype: .* was exported in torch.float64"),
        ({"head": "b"}, "head: "),
    ):
        with pytest.raises(CalculatorError, match=message):
            calculator(tmp_path / "my.pt", **options)
    assert calculator(tmp_path / "my.pt", dtype=torch.float64, head="Default").parameters["dtype"] == "float64"


def test_no_skin_is_a_list_for_every_call(water: Atoms) -> None:
    found = calculator(skin=0)
    cc.assert_same_on(found, library(mm.energy_model()), [water, water])


@pytest.mark.gpu
def test_a_step_is_recorded_when_neighbours_are_kept(source: Any) -> None:
    found, atoms = eqaccel.Calculator(source, device="cuda", verify=False), cc.variety()[0]
    first = cc.results_of(found, atoms)
    assert "CUDA graph" not in str(eqaccel.report(found))
    for _ in range(3):
        atoms.rattle(0.01, seed=3)
        moved = cc.results_of(found, atoms)
    assert "recorded as a CUDA graph (1 for first call)" in str(eqaccel.report(found))
    assert moved["energy"] != first["energy"]


def test_import_of_eqaccel_does_not_import_ase() -> None:
    code = "import eqaccel, sys; print({'ase', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_without_ase_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['ase'] = None; import eqaccel; eqaccel.Calculator"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert "eqaccel.Calculator needs ASE; install it" in done.stderr
