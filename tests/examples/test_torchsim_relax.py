"""The example for torch-sim relaxes what it promises, the same plain and patched, and writes it down."""

from __future__ import annotations

import json
import types
from pathlib import Path

import ase.io
import pytest
from folders import EXAMPLES

pytest.importorskip("mace")
pytest.importorskip("matplotlib")
pytest.importorskip("torch_sim", reason="needs torch-sim-atomistic")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import torchsim_relax

    return torchsim_relax


def test_relaxed_structures_agree(tmp_path: Path, example: types.ModuleType) -> None:
    few = ["--structures", "3", "--reference-structures", "2", "--max-steps", "4", "--device", "cpu"]
    results = example.main([*few, "--out", str(tmp_path)])
    # eV per atom: rounding in double precision, which grows tenfold in a step at most where atoms move as far as here
    assert results["max_energy_difference"] < 1e-9
    before, after = results["runs"]
    assert (before["label"], after["label"]) == ("unpatched", "patched")
    assert (len(before["energies"]), len(after["energies"])) == (2, 3)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    relaxed = ase.io.read(tmp_path / "relaxed.xyz", index=":")
    start = example.cells(3, 0)
    assert [atoms.get_chemical_formula() for atoms in relaxed] == [atoms.get_chemical_formula() for atoms in start]
    assert all(abs(new.cell.array - old.cell.array).max() > 0 for new, old in zip(relaxed, start, strict=True))
    assert (tmp_path / "relax.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [("--structures", "3"), ("--batch-atoms", "50")])
def test_options_that_make_no_sense(options: tuple[str, str], example: types.ModuleType) -> None:
    with pytest.raises(SystemExit):
        example.parse_arguments(list(options))
