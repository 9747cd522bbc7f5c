"""Weights that a step makes once for an edge and its reverse, and what happens where these are not the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.neighborlist import neighbor_list
from lammps_runs import BAR, ELEMENTS, RTOL, frame_of, placed, simulate, write_data
from lammps_toy import DESCRIPTION, save_model
from one_sided import Hungry, OneSided

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
NVE = "neighbor 0.5 bin\nfix n all nve\ntimestep 0.0005\n"
SHARED = "weights of edges made once a pair of atoms"
CUTOFF: float = DESCRIPTION["cutoff"]


def assert_right(frame, atoms: Atoms, model: OneSided) -> None:
    """A frame has the energies, forces and virial that the model gives without a step."""
    atoms = placed(atoms, frame)
    receiver, sender, offset = neighbor_list("ijD", atoms, CUTOFF)
    vectors, edge_index = torch.tensor(-offset.reshape(-1, 3)), torch.tensor(np.array([sender, receiver]))
    energies, gradients = (t.numpy() for t in model(vectors, edge_index, torch.tensor(frame.types - 1), 40, 0))
    forces = np.zeros((len(atoms), 3))
    np.add.at(forces, receiver, -gradients)
    np.add.at(forces, sender, gradients)
    virial = -np.einsum("ea,eb->ab", vectors.numpy(), gradients)[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]
    np.testing.assert_allclose(frame.energies, energies, rtol=0, atol=RTOL * np.abs(energies).max())
    np.testing.assert_allclose(frame.forces, forces, rtol=0, atol=RTOL * np.abs(forces).max())
    np.testing.assert_allclose(frame.virial / BAR, virial, rtol=0, atol=10 * RTOL * np.abs(virial).max())


def written(folder: Path, turned: bool = False, channels: int = 4) -> tuple[OneSided, Atoms]:
    """A model and atoms of one type, as files too."""
    model = OneSided(turned, channels).eval()
    save_model(folder / "toy.pt", model, DESCRIPTION)
    atoms = frame_of("triclinic")
    atoms.arrays["types"] = np.ones(len(atoms), dtype=int)
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    return model, atoms


def test_rows_are_those_of_edges_in_layers_over_others(device, tmp_path):
    """As many edges as there are, and others: a step finds out after rows were shared."""
    model, atoms = written(tmp_path, turned=True)
    frames = simulate(tmp_path, f"{NVE}run 3", style=f"eqaccel device {device.type} lists device", stresses=False)
    for frame in frames:
        assert_right(frame, atoms, model)
    assert SHARED not in (tmp_path / "log.lammps").read_text()


@pytest.mark.parametrize(("lists", "ranks"), [("device", 1), ("device", 2), ("host", 2)])
def test_gradients_of_weights_some_edges_at_a_time(lists, ranks, device, tmp_path, monkeypatch):
    monkeypatch.setenv("EQACCEL_WEIGHT_MIB", "1")  # of which an eighth is for gradients
    model, atoms = written(tmp_path, channels=64)
    assert len(neighbor_list("i", atoms, CUTOFF)) * 8 * 2 * 64 > 2**18  # bytes of two paths of 64 channels
    style = f"eqaccel device {device.type} lists {lists}"
    frames = simulate(tmp_path, f"{NVE}run 3", ranks, style=style, stresses=False)
    for frame in frames:
        assert_right(frame, atoms, model)
    assert (SHARED in (tmp_path / "log.lammps").read_text()) == (lists == "device")


@pytest.mark.parametrize(("times", "mib"), [(4, ""), (5, ""), (1, "1")])
def test_a_step_without_memory_is_computed_with_less(times, mib, device, tmp_path, monkeypatch):
    """Four times, where nobody has said what weights may take."""
    monkeypatch.setenv("EQACCEL_WEIGHT_MIB", mib)
    model, atoms = written(tmp_path)
    save_model(tmp_path / "toy.pt", Hungry(model, times).eval(), DESCRIPTION)
    style = f"eqaccel device {device.type} lists device"
    if times > 4 or mib:
        with pytest.raises(AssertionError, match="out of memory"):
            simulate(tmp_path, f"{NVE}run 4", style=style, stresses=False)
        return
    for frame in simulate(tmp_path, f"{NVE}run 4", style=style, stresses=False):
        assert_right(frame, atoms, model)
    log = (tmp_path / "log.lammps").read_text()
    assert SHARED in log
    assert ("recorded as a CUDA graph (1 for less memory for weights)" in log) == (device.type == "cuda")


@pytest.mark.parametrize(("lists", "ranks"), [("device", 1), ("device", 2), ("host", 1), ("host", 2)])
def test_what_is_not_the_same_is_not_shared(lists, ranks, device, tmp_path):
    model, atoms = written(tmp_path)
    style = f"eqaccel device {device.type} lists {lists}"
    commands = f"{NVE}run 12\nset atom 7 type 2\nrun 12\nset atom 7 type 1\nrun 4"
    frames = simulate(tmp_path, commands, ranks, style=style, stresses=False)
    assert [len(set(frame.types)) for frame in frames[:13]] == [1] * 13
    assert any(len(set(frame.types)) == 2 for frame in frames)
    for frame in frames:
        assert_right(frame, atoms, model)
    notes = [line for line in (tmp_path / "log.lammps").read_text().splitlines() if "steps on kept lists" in line]
    if lists == "device" and ranks == 2:  # the rank that has this atom finds it out, and shares no more
        assert SHARED in notes[0]
        assert ["steps of the host: 1 for " in note for note in notes] == [False, True, True]
    if lists == "device" and ranks == 1:
        first, *later = notes
        assert SHARED in first
        assert not any(SHARED in note for note in later)
        if device.type == "cuda":
            assert ["do not share" in note for note in notes] == [False, True, True]
