"""Heat fluxes in LAMMPS: `compute heat/flux` with `compute centroid/stress/atom`, beside derivatives by differences."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.geometry import find_mic
from ase.neighborlist import neighbor_list
from lammps_runs import (
    BAR,
    BOXES,
    ELEMENTS,
    KCAL,
    RTOL,
    RTOL_RUN,
    RTOL_SINGLE,
    frame_of,
    lmp,
    read_thermo,
    write_data,
)
from lammps_toy import DESCRIPTION, Toy, save_model, save_toy

import eqaccel

# Each library is there or not; nequip and sevenn set defaults of e3nn when they are imported, mace before it.
if HAS_MACE := importlib.util.find_spec("mace") is not None:
    import mace_models as mm
if HAS_NEQUIP := importlib.util.find_spec("nequip") is not None:
    import nequip_models as nm
if HAS_SEVENNET := importlib.util.find_spec("sevenn") is not None:
    import sevennet_models as sm

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = """
units {units}
boundary {boundary}
{processors}
read_data start.data
pair_style eqaccel{style}
pair_coeff * * {model}
compute ke all ke/atom
compute pe all pe/atom
compute stress all centroid/stress/atom NULL virial
compute flux all heat/flux ke pe stress
compute virial all pressure NULL virial
thermo_style custom step pe etotal vol c_virial[1] c_virial[2] c_virial[3] c_virial[4] c_virial[5] c_virial[6] &
  c_flux[1] c_flux[2] c_flux[3] c_flux[4] c_flux[5] c_flux[6]
thermo_modify format float %.17g
thermo 1
dump out all custom 1 out.dump id xu yu zu vx vy vz fx fy fz c_ke c_pe c_stress[1] c_stress[2] c_stress[3] &
  c_stress[4] c_stress[5] c_stress[6] c_stress[7] c_stress[8] c_stress[9]
dump_modify out sort id format float %.17g
fix nve all nve
timestep {timestep}
run {steps}
"""
PLACES = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1))
"""Row and column of each of the nine numbers that LAMMPS has of an atom."""


@dataclass(frozen=True)
class Model:
    """An exported file of float64, and how many cutoffs an atom's energy reaches."""

    file: Path
    elements: list[str]
    cutoff: float
    layers: int


@dataclass(frozen=True)
class Step:
    """One step of a run, atoms in the order of the data file; metal units."""

    positions: np.ndarray
    velocities: np.ndarray
    forces: np.ndarray
    kinetic: np.ndarray
    energies: np.ndarray
    virials: np.ndarray  # (atoms, 3, 3), W in eV
    virial: np.ndarray  # of all atoms, (3, 3), eV
    flux: np.ndarray  # eV angstrom/ps
    total: float  # energy


def _mace(**options: Any) -> Callable[[Path], Model]:
    def build(folder: Path) -> Model:
        model = mm.energy_model(**mm.TINY | {"hidden_irreps": "4x0e+4x1o"} | options)
        eqaccel.export(eqaccel.patch(model, verify=False), folder / "model.pt", verify=False)
        return Model(folder / "model.pt", ["H", "C", "O"], mm.CUTOFF, options.get("num_interactions", 2))

    return build


def _nequip(folder: Path) -> Model:
    eqaccel.export(eqaccel.patch(nm.model("small"), verify=False), folder / "model.pt", verify=False)
    return Model(folder / "model.pt", nm.ELEMENTS, nm.CUTOFF, 3)


def _sevennet(folder: Path) -> Model:
    model = sm.model("omni", "float64")
    eqaccel.export(eqaccel.patch(model, verify=False), folder / "model.pt", head="mpa")
    return Model(folder / "model.pt", sm.ELEMENTS, sm.CUTOFF, 2)


_THREE = {"num_interactions": 3, "pair_repulsion": True, "interaction": "RealAgnosticDensityResidualInteractionBlock"}
KINDS: dict[str, tuple[bool, Callable[[Path], Model]]] = {
    "mace": (HAS_MACE, _mace()),
    "mace-three": (HAS_MACE, _mace(**_THREE)),
    "nequip": (HAS_NEQUIP, _nequip),
    "sevennet": (HAS_SEVENNET, _sevennet),
}
"""Whether the library of a model is there, and what writes its file."""


one_of_each_library = pytest.mark.parametrize("model", [kind for kind in KINDS if kind != "mace"], indirect=True)
"""For what LAMMPS and its plugin do, whatever the number of layers is."""


@pytest.fixture(scope="module")
def written() -> dict[str, Model]:
    """The models that a test has asked for, built within a test: there torch and e3nn are as they have to be."""
    return {}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, written: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Model:
    is_there, build = KINDS[request.param]
    if not is_there:
        pytest.skip(f"needs the library of {request.param}")
    if request.param not in written:
        written[request.param] = build(tmp_path_factory.mktemp(request.param))
    return written[request.param]


def run(
    folder: Path,
    atoms: Atoms,
    model: Model,
    ranks: int = 1,
    steps: int = 0,
    timestep: float = 1e-5,
    units: str = "metal",
    processors: str = "",
    style: str = "",
) -> list[Step]:
    """Steps of NVE dynamics by LAMMPS, what is per atom in its own order."""
    write_data(folder / "start.data", atoms, model.elements, velocities=units == "metal")
    boundary = " ".join("p" if periodic else "f" for periodic in atoms.pbc)
    script = SCRIPT.format(
        units=units,
        boundary=boundary,
        processors=processors and f"processors {processors}",
        style=style,
        model=f"{model.file} {' '.join(model.elements)}",
        timestep=timestep,
        steps=steps,
    )
    done = lmp(folder, script, ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    pressure = BAR if units == "metal" else 68568.415
    found = []
    for text, row in zip(
        (folder / "out.dump").read_text().split("ITEM: ATOMS")[1:], read_thermo(done.stdout), strict=True
    ):
        lines = text.split("ITEM: TIMESTEP")[0].splitlines()[1:]
        columns = np.array([line.split() for line in lines], dtype=float)
        virials, virial = np.zeros((len(atoms), 3, 3)), np.zeros((3, 3))
        for number, (a, b) in enumerate(PLACES):
            virials[:, a, b] = -columns[:, 12 + number] / pressure
            if a <= b:
                virial[a, b] = virial[b, a] = row[f"c_virial[{number + 1}]"] * row["Volume"] / pressure
        flux = np.array([row[f"c_flux[{k}]"] for k in (1, 2, 3)])
        parts = (columns[:, 1:4], columns[:, 4:7], columns[:, 7:10], columns[:, 10], columns[:, 11])
        found.append(Step(*parts, virials, virial, flux, row["TotEng"]))
    return found


def energies_of(model: Model, exported: eqaccel.integrations.export.Exported, atoms: Atoms) -> np.ndarray:
    """Energies of the atoms without LAMMPS, eV."""
    receiver, sender, offset = neighbor_list("ijD", atoms, model.cutoff)
    types = torch.tensor([exported.metadata["type_names"].index(symbol) for symbol in atoms.symbols])
    edge_index = torch.tensor(np.array([sender, receiver]))
    energies: torch.Tensor = exported(torch.tensor(-offset), edge_index, types)[0]
    return energies.numpy()


def differentiated(model: Model, atoms: Atoms, number: int) -> np.ndarray:
    """W of one atom, (3, 3): how the energies of all others follow when it alone moves, and none of its images.

    For that the box is repeated until the atom's energy does not reach half of it. Differences are of fourth order.
    """
    reach = model.layers * model.cutoff
    heights = 1 / np.linalg.norm(np.linalg.inv(atoms.cell.array), axis=0)
    large = atoms.repeat([int(np.ceil(2.01 * reach / h)) if p else 1 for h, p in zip(heights, atoms.pbc, strict=True)])
    exported = eqaccel.load_exported(model.file)
    away = find_mic(large.positions - large.positions[number], large.cell, large.pbc)[0]
    step, found = 2e-3, np.zeros((3, 3))
    for b in range(3):
        derivative = np.zeros(len(large))
        for steps, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
            moved = large.copy()
            moved.positions[number, b] += steps * step
            derivative += weight / (12 * step) * energies_of(model, exported, moved)
        found[:, b] = away.T @ derivative
    return found


DIFFERENCES = 1e-7
"""Bound of comparisons with differences of fourth order, relative to the largest: steps of 0.002 angstrom over lengths
of about 0.1 on which energies bend, to the fourth power; rounding is a thousand times smaller."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("box", "ranks"),
    [("triclinic", 1), ("triclinic", 2), ("smaller than the cutoff", 1), ("one atom", 2), ("molecule", 1)],
)
def test_virials_of_atoms_are_derivatives_of_energies(box: str, ranks: int, model: Model, tmp_path: Path) -> None:
    atoms = frame_of(box, model.elements)
    (step,) = run(tmp_path, atoms, model, ranks)
    scale = np.abs(step.virials).max()
    if box == "triclinic":  # W is not symmetric; that of pairs would be
        assert np.abs(step.virials - step.virials.transpose(0, 2, 1)).max() > 1000 * DIFFERENCES * scale
    number = len(atoms) // 2
    expected = differentiated(model, atoms, number)
    np.testing.assert_allclose(step.virials[number], expected, rtol=0, atol=DIFFERENCES * scale)
    # The sum is symmetric, as no torque is left.
    total = step.virials.sum(0)
    np.testing.assert_allclose(total, step.virial, rtol=0, atol=RTOL * np.abs(step.virials).sum())


@pytest.mark.slow
@pytest.mark.parametrize(("box", "ranks"), [("molecule", 1), ("molecule", 2), ("slab", 2)])
def test_flux_moves_the_barycentre_of_energy(box: str, ranks: int, model: Model, tmp_path: Path) -> None:
    """d/dt sum_i r_i E_i of atoms that nothing leaves; along a periodic axis that would count images."""
    atoms = frame_of(box, model.elements)
    steps = run(tmp_path, atoms, model, ranks, steps=4)
    energies = [step.kinetic + step.energies for step in steps]
    barycentres = [(step.positions * energy[:, None]).sum(0) for step, energy in zip(steps, energies, strict=True)]
    derivative = (barycentres[3] - barycentres[1]) / 2e-5
    middle = steps[2]
    scale = (
        np.abs(middle.velocities * energies[2][:, None]).sum()
        + np.abs(middle.virials * middle.velocities[:, None]).sum()
    )
    open_axes = ~atoms.pbc
    # Steps of 1e-5 ps over 1e-2 ps in which motion turns, squared; and what is left of barycentres that nearly cancel.
    np.testing.assert_allclose(middle.flux[open_axes], derivative[open_axes], rtol=0, atol=1e-6 * scale)
    assert np.abs(middle.flux).max() > 1e-3 * scale
    assert np.ptp([step.total for step in steps]) < 1e-7 * middle.kinetic.sum()


def test_flux_of_a_supercell(model: Model, tmp_path: Path) -> None:
    """A cell smaller than the cutoff, and eight of them in one box: eight times the flux, on any number of ranks."""
    atoms = frame_of("smaller than the cutoff", model.elements)
    (one,) = run(tmp_path, atoms, model)
    many = atoms.repeat(2)
    for ranks in (1, 3):
        (step,) = run(tmp_path, many, model, ranks)
        scale = np.abs(step.virials).sum() * np.abs(step.velocities).max()
        np.testing.assert_allclose(step.flux, 8 * one.flux, rtol=0, atol=RTOL * scale)
        np.testing.assert_allclose(step.virials, np.tile(one.virials, (8, 1, 1)), rtol=0, atol=RTOL * scale)


@pytest.mark.slow
@one_of_each_library
def test_ranks_without_atoms_and_atoms_without_neighbours(model: Model, tmp_path: Path) -> None:
    atoms = frame_of("slab", model.elements)
    # Alone in the uppermost rank, too far away to have an edge.
    atoms += Atoms(model.elements[0], [[1.0, 1.0, 23.0]])
    (one,) = run(tmp_path, atoms, model)
    (four,) = run(tmp_path, atoms, model, 4, processors="1 1 4")
    scale = np.abs(one.virials).max()
    np.testing.assert_allclose(four.virials, one.virials, rtol=0, atol=RTOL * scale)
    assert np.abs(one.virials[-1]).max() == 0
    np.testing.assert_allclose(four.flux, one.flux, rtol=0, atol=RTOL * np.abs(one.flux).max() * len(atoms))


@pytest.mark.slow
@pytest.mark.parametrize("lists", ["host", "device"])
def test_asking_for_it_changes_no_force(model: Model, lists: str, tmp_path: Path) -> None:
    """Steps that ask for a flux and steps that do not have one trajectory: to the last bit where edges come in LAMMPS's
    order, and else as far as the order of sums goes."""
    atoms = frame_of("triclinic", model.elements)
    asked = run(tmp_path, atoms, model, 2, steps=4, timestep=1e-3, style=f" lists {lists}")
    script = (tmp_path / "in.lammps").read_text()
    plain = script.split("compute ke")[0] + "dump out all custom 4 out.dump id fx fy fz\n"
    plain += "dump_modify out sort id format float %.17g\n" + script[script.index("fix nve") :]
    assert lmp(tmp_path, plain, 2).returncode == 0
    rows = (tmp_path / "out.dump").read_text().split("ITEM: ATOMS")[2].splitlines()[1:]
    found, expected = np.array([row.split()[1:] for row in rows], dtype=float), asked[4].forces
    if lists == "host":
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=RTOL_RUN * np.abs(expected).max())


@pytest.mark.slow
@one_of_each_library
def test_beside_another_style(model: Model, tmp_path: Path) -> None:
    atoms = frame_of("triclinic", model.elements)
    (alone,) = run(tmp_path, atoms, model)
    script = (tmp_path / "in.lammps").read_text()
    names = f"{model.file} {' '.join(model.elements)}"
    hybrid = script.replace("pair_style eqaccel", "pair_style hybrid/overlay eqaccel lj/cut 3.0")
    hybrid = hybrid.replace(f"* * {names}", f"* * eqaccel {names}\npair_coeff * * lj/cut 0.0 1.5")
    assert lmp(tmp_path, hybrid, 2).returncode == 0
    rows = (tmp_path / "out.dump").read_text().split("ITEM: ATOMS")[1].splitlines()[1:]
    found = -np.array([row.split()[12:] for row in rows], dtype=float) / BAR
    expected = np.stack([alone.virials[:, a, b] for a, b in PLACES], 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=RTOL * np.abs(expected).max())


@pytest.mark.slow
@one_of_each_library
def test_real_units(model: Model, tmp_path: Path) -> None:
    atoms = frame_of("triclinic", model.elements)
    (metal,) = run(tmp_path, atoms, model)
    (real,) = run(tmp_path, atoms, model, units="real")
    scale = np.abs(metal.virials).max()
    np.testing.assert_allclose(real.virials / KCAL, metal.virials, rtol=0, atol=1e-7 * scale)  # digits of the units


@pytest.mark.skipif(not HAS_MACE, reason="needs mace-torch")
def test_float32(device: torch.device, tmp_path: Path) -> None:
    network = eqaccel.patch(mm.energy_model(**mm.TINY | {"hidden_irreps": "4x0e+4x1o"}), verify=False)
    found = []
    for dtype in ("float64", "float32"):
        eqaccel.export(network, tmp_path / f"{dtype}.pt", dtype=dtype, verify=False)
        model = Model(tmp_path / f"{dtype}.pt", ["H", "C", "O"], mm.CUTOFF, 2)
        atoms = frame_of("triclinic", model.elements)
        found += [run(tmp_path, atoms, model, ranks, style=f" device {device.type}")[0] for ranks in (1, 2)]
    double, double_on_two, *single = found
    scale = np.abs(double.virials).max()
    np.testing.assert_allclose(double_on_two.virials, double.virials, rtol=0, atol=RTOL * scale)
    for step in single:
        np.testing.assert_allclose(step.virials, double.virials, rtol=0, atol=RTOL_SINGLE * scale)


class Gathering(Toy):
    """The toy with the methods of an exported potential: its layers take features of neighbours by themselves."""

    def __init__(self, cutoff: float) -> None:
        super().__init__(cutoff)
        self.register_buffer("constants", torch.zeros(3, dtype=torch.float64))

    @torch.jit.export
    def node_energies(
        self, vectors: torch.Tensor, edge_index: torch.Tensor, types: torch.Tensor, num_local: int, exchange: int
    ) -> torch.Tensor:
        return self.energies(vectors, edge_index, types, num_local, exchange)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no method", "the model file has no energies of atoms that a heat flux could be found from"),
        ("gathering", "its atoms learn of each other in other ways than by convolutions of eqaccel"),
    ],
)
def test_a_model_that_has_no_flux_ends_the_run(kind: str, message: str, ranks: int, tmp_path: Path) -> None:
    if kind == "gathering":
        save_model(tmp_path / "toy.pt", Gathering(DESCRIPTION["cutoff"]), DESCRIPTION)
    else:
        save_toy(tmp_path / "toy.pt")
    write_data(tmp_path / "start.data", frame_of("periodic"), ELEMENTS)
    options = {"units": "metal", "processors": "", "style": "", "model": "toy.pt H O Si", "timestep": 1e-3, "steps": 0}
    script = SCRIPT.format(boundary=BOXES["periodic"][0], **options)
    done = lmp(tmp_path, script, ranks)
    assert done.returncode != 0
    assert message in done.stdout
    # Nobody is stopped who asks for no flux.
    assert lmp(tmp_path, script.split("compute ke")[0] + "run 0", ranks).returncode == 0


def test_stress_of_pairs_in_a_flux_is_warned_of(tmp_path: Path) -> None:
    save_toy(tmp_path / "toy.pt")
    write_data(tmp_path / "start.data", frame_of("periodic"), ELEMENTS)
    script = """
units metal
read_data start.data
pair_style eqaccel
pair_coeff * * toy.pt H O Si
compute ke all ke/atom
compute pe all pe/atom
compute stress all {style}/atom NULL virial
compute flux all heat/flux ke pe stress
thermo_style custom step c_flux[1]
run 0
"""
    done = lmp(tmp_path, script.format(style="stress"))
    assert done.returncode == 0, done.stdout
    assert "compute heat/flux is right with compute centroid/stress/atom only" in done.stdout
