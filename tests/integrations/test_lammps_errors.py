"""Bad input to `pair_style eqaccel`: LAMMPS ends with one line that says what is wrong, on any number of ranks."""

from __future__ import annotations

import dataclasses
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from lammps_runs import ELEMENTS, lmp, write_data
from lammps_toy import DESCRIPTION, Precompiled, save_model, save_toy

from eqaccel.integrations.export.digest import append_digest
from eqaccel.integrations.lammps import build_plugin, find_lammps

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
SCRIPT = """
{before}
read_data start.data
pair_style {style}
pair_coeff {coeff}
{after}
"""


@pytest.fixture
def folder(tmp_path):
    """Two dozen atoms on a grid, and the toy."""
    grid = 2.0 * np.stack(np.meshgrid(range(4), range(3), range(2), indexing="ij"), -1).reshape(-1, 3)
    symbols = [ELEMENTS[k % 3] for k in range(24)]
    write_data(tmp_path / "start.data", Atoms(symbols, grid + 0.1, cell=[8, 6, 4]), ELEMENTS)
    save_toy(tmp_path / "toy.pt")
    return tmp_path


def error_of(
    folder, before="units metal", style="eqaccel", coeff="* * toy.pt H O Si", after="thermo 1\nrun 0", ranks=1
) -> str:
    """The error that ends a run."""
    done = lmp(folder, SCRIPT.format(before=before, style=style, coeff=coeff, after=after), ranks)
    lines = [line for line in done.stdout.splitlines() if "ERROR" in line]
    assert done.returncode != 0, done.stdout
    assert lines, done.stdout + done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("coeff", "message"),
    [
        ("* * toy.pt H O Xx", "the model does not know element Xx of atom type 3, only H O Si"),
        ("* * toy.pt H O", "expected 3 elements, one for each atom type, got 2"),
        ("* * toy.pt H O Si Si", "expected 3 elements, one for each atom type, got 4"),
        ("1 2 toy.pt H O Si", r"must start with"),
        ("* * nowhere.pt H O Si", "model file 'nowhere.pt' can not be read"),
        ("* * half.pt H O Si", "model file 'half.pt' is incomplete"),
        ("* * text.pt H O Si", "model file 'text.pt' is incomplete, or was not written by .* eqaccel.export"),
        ("* * empty.pt H O Si", "model file 'empty.pt' is empty: copy or export it again"),
        ("* * folder.pt H O Si", "model file 'folder.pt' can not be read: Is a directory"),
        ("* * plain.pt H O Si", "does not end with a digest. Copy it again, or export the model again"),
        ("* * flipped.pt H O Si", "model file 'flipped.pt' is damaged: it differs from what was written"),
        ("* * foreign.pt H O Si", "was not exported as TorchScript: it holds no eqaccel.json"),
        ("* * newer.pt H O Si", "has format 3, and this eqaccel reads 2: update eqaccel"),
        ("* * older.pt H O Si", "has format 1, and this eqaccel reads 2: export the model again"),
        ("* * units.pt H O Si", "is in kcal/mol and angstrom, expected eV and angstrom"),
        ("* * kind.pt H O Si", "is of kind 'aotinductor': export it as TorchScript"),
        ("* * names.pt H O Si", "'type_names' is not a list"),
        ("* * operator.pt H O Si", "does not load: Unknown builtin op: .*no such operator: update it, or export"),
    ],
)
def test_pair_coeff(coeff, message, folder):
    model = (folder / "toy.pt").read_bytes()
    (folder / "half.pt").write_bytes(model[: len(model) // 2])
    (folder / "text.pt").write_text("not a model\n")
    (folder / "empty.pt").touch()
    (folder / "folder.pt").mkdir()
    (folder / "flipped.pt").write_bytes(model[:5000] + bytes([model[5000] ^ 1]) + model[5001:])
    for name in ("plain.pt", "foreign.pt"):
        torch.jit.script(torch.nn.Identity()).save(folder / name)
    append_digest(folder / "foreign.pt")
    save_toy(folder / "newer.pt", format=3)
    save_toy(folder / "older.pt", format=1)
    rename_operator(folder / "toy.pt", folder / "operator.pt")
    save_toy(folder / "units.pt", units={"energy": "kcal/mol", "length": "angstrom"})
    save_toy(folder / "kind.pt", kind="aotinductor")
    save_toy(folder / "names.pt", type_names="H O Si")
    assert_error(error_of(folder, coeff=coeff), message)


def rename_operator(source: Path, target: Path) -> None:
    """Writes a file that calls an operator which does not exist."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.namelist():
            new.writestr(entry, old.read(entry).replace(b"eqaccel.exchange(", b"eqaccel.exchangf("))
    append_digest(target)


@pytest.mark.parametrize("precompiled", [["cpu-avx2"], []], ids=["told", "hidden"])
def test_machine_code_is_refused_on_request(precompiled, folder):
    assert (
        lmp(
            folder,
            SCRIPT.format(
                before="units metal", style="eqaccel native_code no", coeff="* * toy.pt H O Si", after="run 0"
            ),
        ).returncode
        == 0
    )
    save_model(folder / "precompiled.pt", Precompiled(), {**DESCRIPTION, "precompiled": precompiled})
    line = error_of(folder, style="eqaccel native_code no", coeff="* * precompiled.pt H O Si")
    assert_error(line, "holds kernels in machine code, which were not to be used")


def assert_error(line: str, message: str) -> None:
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "eqaccel speed 11"}, "unknown keyword speed, expected device, threads, native_code or lists"),
        ({"style": "eqaccel threads"}, "keyword threads needs a value"),
        ({"style": "eqaccel threads 0"}, r"threads must be auto or 1 to \d+, the processors of this host, got 0"),
        (
            {"style": "eqaccel threads 1000000"},
            r"threads must be auto or 1 to \d+, the processors of this host, got 1000000",
        ),
        ({"style": "eqaccel native_code perhaps"}, "perhaps"),
        ({"style": "eqaccel device tpu"}, "device must be auto, cpu, cuda or cuda:N, got tpu"),
        ({"before": "units lj"}, "units must be metal or real, and they are lj"),
        ({"before": "units metal\nnewton off"}, "needs newton on"),
        # LAMMPS itself refuses what its communication can not do.
        ({"before": "units metal\ncomm_style tiled"}, "cutoff.* periodic box length"),
    ],
)
def test_settings(options, message, folder):
    assert_error(error_of(folder, **options), message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(folder):
    assert_error(error_of(folder, style="eqaccel device cuda"), "on a GPU, and torch sees none")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("after", "message"),
    [
        ("set atom 23 x 0.1 y 0.1 z 0.1\nrun 0", r"atom (1|23) and atom (1|23) overlap at step 0: they are 0 angstrom"),
        ("set atom 23 x 0.15 y 0.1 z 0.1\nrun 0", "overlap at step 0: they are 0.05 angstrom apart"),
        (
            "variable x atom exp(1000)-exp(1000)\nset atom 23 x v_x\nrun 0",
            "position of atom 23 is not finite at step 0",
        ),
        ("variable x atom exp(1000)\nset atom 23 z v_x\nrun 0", "position of atom 23 is not finite at step 0"),
        (
            'fix n all nve\nvariable b atom "exp(1000*(id==23)*(step==3))"\nvariable f atom v_b-v_b\n'
            "fix f all addforce v_f 0 0\ntimestep 0.0001\nrun 9",
            "position of atom 23 is not finite at step 4",
        ),
        ("change_box all boundary f f f\nvelocity all set 500 0 0\nfix n all nve\nthermo 10\nrun 50", "Lost atoms"),
    ],
)
def test_atoms(after, message, ranks, folder):
    assert_error(error_of(folder, after=after, ranks=ranks), message)


@pytest.mark.parametrize("lists", ["device", "host"])
def test_another_model_in_a_run_without_set_up(lists, folder):
    """Neighbours are those within the cutoff of the model before."""
    save_toy(folder / "wide.pt", cutoff=5.0)
    commands = "run 1\npair_coeff * * wide.pt H O Si\n"
    message = "a run that follows pair_coeff has to find neighbours for its model: leave out `pre no`"
    style = f"eqaccel device cpu lists {lists}"
    assert_error(error_of(folder, style=style, after=f"{commands}run 1 pre no"), message)
    script = {"before": "units metal", "style": style, "coeff": "* * toy.pt H O Si", "after": f"{commands}run 1"}
    assert lmp(folder, SCRIPT.format(**script)).returncode == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_gives_no_number(ranks, folder):
    class Nothing(torch.nn.Module):
        def forward(
            self, vectors: torch.Tensor, edge_index: torch.Tensor, types: torch.Tensor, num_local: int, exchange: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return vectors.new_zeros(num_local), vectors * float("nan")

    description = {**DESCRIPTION, "exchange_widths": []}
    save_model(folder / "toy.pt", Nothing(), description)
    assert_error(error_of(folder, ranks=ranks), r"the model gives atom \d+ no finite force at step 0")


def test_exchanges_that_the_file_does_not_list(folder):
    save_toy(folder / "toy.pt", exchange_widths=[4, 5])
    assert_error(error_of(folder, ranks=2), "asks for an exchange of width 7, which is not the next one")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"version": 20230802}, "was built for LAMMPS 20230802, and this is 2025"),
        ({"definitions": ("LAMMPS_BIGBIG",)}, "for a LAMMPS with other integer sizes"),
    ],
)
def test_a_plugin_for_another_lammps(other, message, folder, monkeypatch, tmp_path_factory):
    plugin = build_plugin(dataclasses.replace(find_lammps(), **other))
    load = f"units metal\nplugin unload pair eqaccel\nplugin load {plugin}"
    assert_error(error_of(folder, before=load), message)
