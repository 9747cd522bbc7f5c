"""Exported SevenNet models in LAMMPS, on one rank and on four, beside the unpatched model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sevenn", reason="needs sevenn")

import sevennet_models as sm
from lammps_runs import BAR, BOXES, RTOL, frame_of, simulate, write_data

import eqaccel

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.fixture(scope="module")
def plain_and_exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of four layers for two modalities, as it was built, and the file of one of them."""
    plain = sm.model("mf-ompa", "float64")
    file = tmp_path_factory.mktemp("sevennet") / "model.pt"
    eqaccel.export(eqaccel.patch(sm.model("mf-ompa", "float64"), verify=False), file, head="mpa", verify=False)
    return plain, file


@pytest.mark.parametrize(("box", "ranks"), [("triclinic", 1), ("triclinic", 4), ("slab", 4)])
def test_ranks_give_what_the_model_gives(
    box: str, ranks: int, plain_and_exported: tuple[Any, Path], tmp_path: Path
) -> None:
    plain, file = plain_and_exported
    atoms = frame_of(box, sm.ELEMENTS)
    write_data(tmp_path / "start.data", atoms, sm.ELEMENTS)
    options = {"boundary": BOXES[box][0], "coeff": f"* * {file} {' '.join(sm.ELEMENTS)}"}
    (frame,) = simulate(tmp_path, "run 0", ranks, **options)
    wanted = {name: value.detach().numpy() for name, value in sm.outputs(plain, sm.data(plain, [atoms], "mpa")).items()}
    energies, forces = wanted["atomic_energy"].ravel(), wanted["inferred_force"]
    scale = np.abs(energies).sum() + np.abs(forces).sum() * sm.CUTOFF
    assert np.abs(frame.energies - energies).max() <= RTOL * scale
    assert abs(frame.thermo["PotEng"] - energies.sum()) <= RTOL * scale
    assert np.abs(frame.forces - forces).max() <= RTOL * np.abs(forces).max()
    # SevenNet's xx yy zz xy yz zx, of a stress that is positive under pressure.
    virial = wanted["inferred_stress"][0][[0, 1, 2, 3, 5, 4]] * atoms.get_volume()
    assert np.abs(frame.virial / BAR - virial).max() <= RTOL * scale
