"""Lists that stay on the device of the model between rebuilds: the numbers of steps whose edges come from the host."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from ase import Atoms
from lammps_runs import BOXES, ELEMENTS, RTOL_RUN, assert_frame, frame_of, lmp, placed, simulate, write_data
from lammps_toy import save_toy

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
NVE = "neighbor 0.5 bin\nfix n all nve\ntimestep 0.0005\n"
RTOL = 10 * RTOL_RUN
"""Of frames that a run of some steps ends with, where roundings have grown."""


@pytest.fixture
def folder(tmp_path):
    """The toy. The file holds no kernels for a GPU."""
    save_toy(tmp_path / "toy.pt")
    return tmp_path


def both_ways(folder, commands: str, style: str = "{}", rtol: float = RTOL, **options) -> tuple[list, str]:
    """Runs commands with lists on the device and by the host, compares all frames, and returns those and the log."""
    runs, log = [], ""
    for lists in ("host", "device"):
        ours = f"eqaccel device cpu lists {lists}"
        runs.append(simulate(folder, commands, style=style.format(ours), stresses=False, **options))
        log = (folder / "log.lammps").read_text()
    for frame, host in zip(*runs[::-1], strict=True):
        assert frame.step == host.step
        np.testing.assert_array_equal(frame.types, host.types)
        scale = max(1.0, np.abs(host.forces).max(initial=0.0))
        np.testing.assert_allclose(frame.positions, host.positions, rtol=0, atol=rtol)
        np.testing.assert_allclose(frame.forces, host.forces, rtol=0, atol=rtol * scale)
        np.testing.assert_allclose(frame.energies, host.energies, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(frame.virial, host.virial, rtol=rtol, atol=rtol * np.abs(host.virial).max())
    return runs[1], log


NOTE = (
    r"^eqaccel: (\d+) steps on kept lists \((\d+) sent\)(?:, ([\d.]+) bytes an atom sent in a step)?"
    "(?:; steps of the host: (.*))?$"
)


def counts(log: str) -> tuple[int, int, str]:
    """Steps on kept lists, lists, and what the host did, as the last run says of the first rank."""
    steps, lists, _, by_host = re.findall(NOTE, log, re.MULTILINE)[-1]
    return int(steps), int(lists), by_host


@pytest.mark.parametrize(
    ("box", "ranks", "grid"),
    [
        *((box, 1, "* * *") for box in BOXES),
        *((box, 2, "* * *") for box in ("periodic", "molecule", "smaller than the cutoff", "one atom")),
        ("slab", 4, "1 1 4"),
        ("triclinic", 4, "2 2 1"),
    ],
)
def test_any_box_on_any_number_of_ranks(box, ranks, grid, folder):
    """The outer ranks of four along the slab have no atoms."""
    atoms = frame_of(box)
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    frames, log = both_ways(folder, f"{NVE}run 10", ranks=ranks, processors=grid, boundary=BOXES[box][0])
    assert "lists stay on cpu until LAMMPS rebuilds them" in log
    assert len(frames) == 11
    if grid == "1 1 4":
        return  # the first rank has nothing to say
    steps, lists, by_host = counts(log)
    assert (steps, by_host) == (11, "")
    assert lists < steps


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_sends_positions_alone(ranks, folder):
    """Three numbers of eight bytes an atom, of ghosts too, and the box; types where LAMMPS has made a new list."""
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    simulate(folder, f"{NVE}run 30", ranks, style="eqaccel device cpu", stresses=False)
    steps, lists, sent, _ = re.findall(NOTE, (folder / "log.lammps").read_text(), re.MULTILINE)[-1]
    assert int(steps) == 31
    least = len(atoms) // ranks - 5  # atoms that the first rank has, with its ghosts
    assert 24 <= float(sent) <= 24 + 9 * 8 / least + 8 * int(lists) / int(steps) + 0.05


def test_what_one_rank_leaves_to_the_host_all_do(folder):
    """Atoms that are very near on one of them; the host looks for what to say, and says nothing."""
    atoms = frame_of("periodic")
    near = [int(n) for n in np.argsort(atoms.positions[:, 2])[:2]]
    atoms.positions[near[0]] = atoms.positions[near[1]] + [0.15, 0.0, 0.0]
    for up in (0.0, 5.0):  # to the other half of the box
        atoms.positions[:, 2] += up
        atoms.wrap()
        write_data(folder / "start.data", atoms, ELEMENTS)
        _, log = both_ways(folder, "run 0", ranks=2, processors="1 1 2")
        assert counts(log)[2] in ("1 for atoms that are very near", "1 for what another rank met")


@pytest.mark.parametrize("box", ["periodic", "triclinic", "smaller than the cutoff"])
def test_a_box_that_changes_between_rebuilds(box, folder):
    atoms = frame_of(box)
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    barostat = "fix b all npt temp 300 300 0.01 tri 0 0 0.02" if box != "periodic" else "fix b all nph aniso 0 0 0.02"
    frames, log = both_ways(folder, f"neighbor 1.0 bin\n{barostat}\ntimestep 0.0005\nrun 20")
    assert abs(frames[-1].thermo["Volume"] / frames[0].thermo["Volume"] - 1) > 1e-6
    steps, lists, _ = counts(log)
    assert lists < steps


def test_a_box_that_is_sheared_until_it_flips(folder):
    atoms = frame_of("triclinic")
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    shear = "fix d all deform 1 xy erate 40 remap x flip yes\n"
    _, log = both_ways(folder, f"{NVE}{shear}run 60", every=10)
    assert counts(log)[2] == ""


def test_other_units_and_hybrid_styles(folder):
    write_data(folder / "start.data", frame_of("periodic"), ELEMENTS)
    commands = f"pair_coeff * * lj/cut 0.01 1.5\n{NVE.replace('0.0005', '0.5')}run 8"
    style = "hybrid/overlay {} lj/cut 6.0"
    options = {"unit_style": "real", "coeff": "* * eqaccel toy.pt H O NULL"}
    _, log = both_ways(folder, commands, style, **options)
    assert counts(log)[0] == 9


def test_types_that_are_swapped_without_a_new_list(folder):
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    frames, _ = both_ways(folder, f"fix s all atom/swap 2 6 4711 5000 ke no types 1 2\n{NVE}run 8")
    assert any((frame.types != frames[0].types).any() for frame in frames)
    for frame in frames:
        there = placed(atoms, frame)
        there.symbols = [ELEMENTS[kind - 1] for kind in frame.types]
        _assert_toy(frame, there)


def _assert_toy(frame, atoms: Atoms) -> None:
    """As `assert_frame`, without stresses of atoms."""
    stresses = np.zeros((len(atoms), 6))
    stresses[0] = -frame.virial
    assert_frame(type(frame)(**{**vars(frame), "stresses": stresses}), atoms, rtol=RTOL_RUN)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "commands",
    [
        "fix mc all gcmc 3 4 4 1 29494 1000 -1.0 0.3 overlap_cutoff 0.8\n",
        "fix mc all widom 3 5 1 29494 300\n",
        "region above block 2 7 2 6 18.6 19.4\nfix d all deposit 3 1 2 12345 region above near 1.2\n",
        "group gone id 3 17 21\nneigh_modify exclude group gone all\n",
    ],
    ids=["gcmc", "widom", "deposit", "exclusion"],
)
def test_atoms_that_come_and_go(commands, ranks, folder):
    box = "slab" if "deposit" in commands else "periodic"
    write_data(folder / "start.data", frame_of(box), ELEMENTS, velocities=True)
    script = f"{commands}{NVE}run 9"
    frames, log = both_ways(folder, script, ranks=ranks, boundary=BOXES[box][0], before="atom_modify map yes")
    steps, _, by_host = counts(log)
    assert steps == 10
    assert ("trial moves" in by_host) == ("fix mc" in commands)
    if "gcmc" in commands or "deposit" in commands:
        assert len({len(frame.types) for frame in frames}) > 1


@pytest.mark.parametrize(("special", "ranks"), [("0 0 0", 1), ("0 0.5 1", 1), ("0 0 0", 2)])
def test_neighbours_that_bonds_take_away(special, ranks, folder):
    atoms = frame_of("periodic")
    distances = atoms.get_all_distances(mic=True)
    bonds = [(i + 1, j + 1) for i, j in np.argwhere(distances < 1.7) if i < j][:10]
    assert len(bonds) > 5
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True, bonds=bonds)
    commands = f"special_bonds lj/coul {special}\nbond_style zero\nbond_coeff *\n{NVE}run 6"
    frames, log = both_ways(folder, commands, ranks=ranks, before="atom_style bond")
    assert counts(log)[2] == ""
    for frame in frames:
        _assert_toy(frame, placed(atoms, frame))


def test_runs_after_runs_and_a_restart(folder):
    atoms = frame_of("triclinic")
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    model = "pair_style eqaccel device cpu\npair_coeff * * toy.pt H O Si\n"
    commands = f"{NVE}run 4\ndisplace_atoms all random 0.05 0.05 0.05 1234\nrun 3\nminimize 0 1e-3 4 20\nrun 2"
    both_ways(folder, commands)
    last = (
        f"{NVE}run 4\nwrite_restart r\nclear\nread_restart r\n{model}run 0\nvariable e equal pe\nprint '${{e}}' file e"
    )
    frames = simulate(folder, last)
    assert float((folder / "e").read_text()) == pytest.approx(frames[-1].thermo["PotEng"], rel=RTOL)


def test_steps_that_ask_for_virials_of_atoms_are_of_the_host(folder):
    atoms = frame_of("periodic")
    write_data(folder / "start.data", atoms, ELEMENTS, velocities=True)
    for frame in simulate(folder, f"{NVE}run 9", style="eqaccel device cpu", every=3):
        assert_frame(frame, placed(atoms, frame), rtol=RTOL_RUN)
    assert counts((folder / "log.lammps").read_text())[::2] == (6, "4 for virials of atoms")


def test_what_is_refused(folder):
    write_data(folder / "start.data", frame_of("periodic"), ELEMENTS)
    script = "units metal\nread_data start.data\npair_style eqaccel lists here\npair_coeff * * toy.pt H O Si\nrun 0"
    done = lmp(folder, script)
    assert done.returncode != 0
    assert "lists must be auto, device or host, got here" in done.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_file_without_the_kernels_goes_the_old_way(folder):
    write_data(folder / "start.data", frame_of("periodic"), ELEMENTS)
    save_toy(folder / "toy.pt", device="cuda")
    simulate(folder, "run 0", style="eqaccel device cuda")
    assert "the file holds no kernels for it" in (folder / "log.lammps").read_text()
