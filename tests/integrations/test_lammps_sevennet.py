"""Exported SevenNet models in LAMMPS on one to four ranks, beside the unpatched model, and beside themselves on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sevenn", reason="needs sevenn")

import sevennet_models as sm
from lammps_runs import BAR, BOXES, RTOL, RTOL_RUN, frame_of, simulate, write_data

import eqaccel

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

HEADS = {"0": None, "l3i5": None, "mf-ompa": "mpa", "omni": "omat24"}
"""The modality that is exported, of architectures that have several."""


@pytest.fixture(scope="module", params=HEADS)
def plain_and_exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model as it was built, in float64, and the file of one of its modalities."""
    plain = sm.model(request.param, "float64")
    file = tmp_path_factory.mktemp("sevennet") / f"{request.param}.pt"
    patched = eqaccel.patch(sm.model(request.param, "float64"), verify=False)
    eqaccel.export(patched, file, head=HEADS[request.param])
    return plain, file


def options_of(box: str, file: Path) -> dict[str, Any]:
    return {"boundary": BOXES[box][0], "coeff": f"* * {file} {' '.join(sm.ELEMENTS)}"}


@pytest.mark.parametrize(
    ("box", "ranks"),
    [
        ("triclinic", 1),
        ("triclinic", 2),
        ("slab", 3),
        ("smaller than the cutoff", 2),
        ("triclinic", 4),
        ("one atom", 3),
    ],
)
def test_ranks_give_what_the_model_gives(
    box: str, ranks: int, plain_and_exported: tuple[Any, Path], tmp_path: Path
) -> None:
    plain, file = plain_and_exported
    atoms = frame_of(box, sm.ELEMENTS)
    write_data(tmp_path / "start.data", atoms, sm.ELEMENTS)
    (frame,) = simulate(tmp_path, "run 0", ranks, **options_of(box, file))
    batch = sm.data(plain, [atoms], HEADS[file.stem] or "")
    wanted = {name: value.detach().numpy() for name, value in sm.outputs(plain, batch).items()}
    energies, forces = wanted["atomic_energy"].ravel(), wanted["inferred_force"]
    scale = np.abs(energies).sum() + np.abs(forces).sum() * sm.CUTOFF
    assert np.abs(frame.energies - energies).max() <= RTOL * scale
    assert abs(frame.thermo["PotEng"] - energies.sum()) <= RTOL * scale
    assert np.abs(frame.forces - forces).max() <= RTOL * max(np.abs(forces).max(), np.abs(energies).max() / sm.CUTOFF)
    # SevenNet's xx yy zz xy yz zx, of a stress that is positive under pressure; its volume is rounded to float32.
    virial = wanted["inferred_stress"][0][[0, 1, 2, 3, 5, 4]] * float(batch["cell_volume"])
    assert np.abs(frame.virial / BAR - virial).max() <= RTOL * scale


def test_any_number_of_ranks_gives_the_same_run(plain_and_exported: tuple[Any, Path], tmp_path: Path) -> None:
    """Atoms go from rank to rank."""
    _, file = plain_and_exported
    write_data(tmp_path / "start.data", frame_of("triclinic", sm.ELEMENTS), sm.ELEMENTS, velocities=True)
    options = options_of("triclinic", file) | {"every": 6}
    commands = "fix nve all nve\ntimestep 0.0005\nneigh_modify every 2 delay 0 check no\nrun 12"
    expected = simulate(tmp_path, commands, style="eqaccel lists host", **options)
    assert [frame.step for frame in expected] == [0, 6, 12]
    for lists, ranks in (("host", 2), ("host", 3), ("device", 1), ("device", 2), ("device", 3)):
        frames = simulate(tmp_path, commands, ranks, style=f"eqaccel lists {lists}", **options)
        for frame, alone in zip(frames, expected, strict=True):
            scale = np.abs(alone.forces).max()
            assert np.abs(frame.forces - alone.forces).max() <= 2 * RTOL_RUN * scale
            assert np.abs(frame.energies - alone.energies).max() <= 2 * RTOL_RUN * scale * sm.CUTOFF
            assert np.abs(frame.virial - alone.virial).max() <= 20 * RTOL_RUN * np.abs(alone.virial).max()
