"""`pair_style eqaccel` where LAMMPS would leave neighbours out, or tries configurations that are none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ase import Atoms
from lammps_runs import (
    BOXES,
    ELEMENTS,
    RTOL,
    RTOL_RUN,
    assert_frame,
    frame_of,
    lmp,
    placed,
    simulate,
    toy_results,
    write_data,
)
from lammps_toy import save_toy

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
BONDED = "atom_style bond"
BOND_STYLE = "bond_style zero\nbond_coeff *\n"
DIMER = """# a molecule
2 atoms
1 bonds

Coords

1 0.0 0.0 0.0
2 1.5 0.2 0.1

Types

1 1
2 2

Bonds

1 1 1 2
"""


@pytest.fixture
def folder(tmp_path):
    save_toy(tmp_path / "toy.pt")
    return tmp_path


def chains(atoms: Atoms, within: float = 2.5) -> list[tuple[int, int]]:
    """Bonds between all near pairs, and so 1-3 and 1-4 neighbours too; at most four of an atom."""
    distances, count, bonds = atoms.get_all_distances(mic=True), np.zeros(len(atoms), int), []
    for i, j in itertools.combinations(range(len(atoms)), 2):
        if distances[i, j] < within and max(count[[i, j]]) < 4:
            count[[i, j]] += 1
            bonds.append((i + 1, j + 1))
    return bonds


SPECIAL = ("", "special_bonds lj/coul 0 1 0.5", "special_bonds lj/coul 1e-50 1e-50 1e-50")
BONDED_BOXES = ("periodic", "triclinic", "smaller than the cutoff")


# Every command in every box, and both on one rank and on two.
@pytest.mark.parametrize(
    ("special", "box", "ranks"),
    [(special, box, 1 + (m + n) % 2) for m, special in enumerate(SPECIAL) for n, box in enumerate(BONDED_BOXES)],
)
def test_bonds_take_no_neighbour_away(special, box, ranks, folder):
    atoms = frame_of(box)
    bonds = chains(atoms) or [(1, 2)]
    write_data(folder / "start.data", atoms, ELEMENTS, bonds=bonds)
    boundary = BOXES[box][0]
    (frame,) = simulate(folder, f"{special}\n{BOND_STYLE}run 0", ranks, boundary=boundary, before=BONDED)
    assert_frame(frame, atoms)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bonds_that_appear_in_a_run(ranks, folder):
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True, bonds=[])
    commands = (
        BOND_STYLE + "neighbor 1.0 bin\nfix n all nve\ntimestep 0.0005\nfix c all bond/create 2 1 2 2.5 1 iparam 3 1 "
        'jparam 3 2\nrun 8\nvariable made equal f_c[2]\nprint "made ${made}" file made.txt'
    )
    frames = simulate(folder, commands, ranks, before=BONDED)
    assert float((folder / "made.txt").read_text().split()[1]) > 3
    for frame in frames:
        assert_frame(frame, placed(atoms, frame), rtol=RTOL_RUN)


@pytest.mark.parametrize("ranks", [1, 2])
def test_molecules_that_are_deposited(ranks, folder):
    atoms = frame_of("slab")
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True, bonds=[])
    (folder / "dimer.txt").write_text(DIMER)
    commands = (
        BOND_STYLE + "molecule dimer dimer.txt\nregion above block 2 7 2 6 18.6 19.4\nneighbor 1.0 bin\n"
        "fix d all deposit 3 0 2 12345 mol dimer region above near 1.2\nfix n all nve\ntimestep 0.0005\nrun 8"
    )
    frames = simulate(folder, commands, ranks, boundary=BOXES["slab"][0], before=BONDED, every=4)
    assert len(frames[-1].types) == len(atoms) + 6
    for frame in frames:
        symbols = [ELEMENTS[kind - 1] for kind in frame.types]
        there = Atoms(symbols, frame.positions, cell=atoms.cell, pbc=atoms.pbc)
        assert_frame(frame, there, rtol=RTOL_RUN)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bonds_of_another_style_are_its_own(ranks, folder):
    """Among atoms without elements bonds act as they do without this style."""
    atoms = frame_of("periodic")
    bonds = chains(atoms)
    write_data(folder / "start.data", atoms, ELEMENTS, bonds=bonds)
    pairs, commands = "pair_coeff * * lj/cut 0.01 1.5", f"{BOND_STYLE}run 0"
    style, coeff = "hybrid/overlay eqaccel lj/cut 3.0", "* * eqaccel toy.pt H O NULL"
    (some,) = simulate(folder, f"{pairs}\n{commands}", ranks, style=style, coeff=coeff, before=BONDED)
    (only,) = simulate(folder, commands, ranks, style="lj/cut 3.0", coeff="* * 0.01 1.5", before=BONDED)
    known = np.array(atoms.symbols) != "Si"
    energies, forces, _ = toy_results(atoms[known])
    np.testing.assert_allclose((some.energies - only.energies)[known], energies, rtol=RTOL, atol=RTOL)
    scale = np.abs(forces).max()
    np.testing.assert_allclose((some.forces - only.forces)[known], forces, rtol=0, atol=RTOL * scale)
    np.testing.assert_allclose((some.forces - only.forces)[~known], 0, atol=RTOL * scale)


@pytest.mark.parametrize("ranks", [1, 2])
def test_exclusions_between_elements_are_told(ranks, folder):
    write_data(folder / "start.data", frame_of("periodic"), ELEMENTS)
    toy = "pair_style eqaccel\npair_coeff * * toy.pt H O Si"
    other = "pair_style hybrid/overlay eqaccel lj/cut 3.0\npair_coeff * * eqaccel toy.pt H O NULL\n"
    other += "pair_coeff * * lj/cut 0.01 1.5"
    cases = [
        (toy, "exclude type 1 2", True),
        (toy, "exclude group some some", True),
        (toy, "exclude group none all", False),
        (other, "exclude type 1 3", False),
        (toy, "include known", True),
        (other, "include known", False),
    ]
    script = "units metal\nread_data start.data\ngroup some id 1:9\ngroup none subtract some some\n"
    script += "group known type 1 2\natom_modify first known\n"
    for pairs, modified, _ in cases:
        script += f"{pairs}\nneigh_modify exclude none\nneigh_modify {modified}\nrun 0\nprint ended\n"
    done = lmp(folder, script, ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    told = "neigh_modify exclude or include takes neighbours from atoms of the model"
    assert [told in output for output in done.stdout.split("ended\n")[:-1]] == [expected for *_, expected in cases]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_excluded_from_all_is_not_there(ranks, folder):
    """So fix gcmc asks for the energy without an atom; its constant energy is gone with it."""
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS)
    commands = "group gone id 3 17 21\nneigh_modify exclude group gone all\nrun 0"
    (frame,) = simulate(folder, commands, ranks)
    left = np.ones(len(atoms), bool)
    left[[2, 16, 20]] = False
    energies, forces, _ = toy_results(atoms[left])
    np.testing.assert_allclose(frame.energies[left], energies, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(frame.forces[left], forces, rtol=0, atol=RTOL * np.abs(forces).max())
    assert not frame.energies[~left].any()
    assert not frame.forces[~left].any()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "fix",
    [
        "widom 2 5 1 29494 300 region on",
        "gcmc 2 5 0 1 29494 300 9 0.1 region on",
    ],
)
def test_trial_moves_onto_another_atom_are_rejected(fix, ranks, folder):
    """Insertions end within a tenth of an angstrom of an atom: none succeeds, however much it is worth."""
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS)
    x, y, z = atoms.positions[7]
    region = f"region on sphere {x} {y} {z} 0.09\n"
    (expected, *_) = simulate(folder, "run 0")
    *_, frame = simulate(folder, f"{region}fix mc all {fix}\nrun 6", ranks, before="atom_modify map yes")
    assert frame.step == 6
    np.testing.assert_array_equal(frame.positions, expected.positions)
    np.testing.assert_allclose(frame.forces, expected.forces, rtol=0, atol=RTOL_RUN * np.abs(expected.forces).max())


@pytest.mark.parametrize("ranks", [1, 2])
def test_atoms_that_overlap_after_a_trial_move_stop_the_run(ranks, folder):
    """Only trials are rejected: what a fix leaves behind is checked as ever."""
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS)
    x, y, z = atoms.positions[7] + [0.05, 0, 0]
    script = (
        "units metal\natom_modify map yes\nread_data start.data\npair_style eqaccel\npair_coeff * * toy.pt H O Si\n"
        f"region far sphere {x} {y} {z} 0.01\nfix mc all gcmc 2 5 0 1 29494 300 -99 0.1 region far\nrun 3\n"
        f"create_atoms 1 single {x} {y} {z}\nrun 3\n"
    )
    done = lmp(folder, script, ranks)
    assert done.returncode != 0
    assert "overlap at step 3" in done.stdout
