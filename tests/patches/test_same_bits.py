"""Results are the same to the last bit from call to call, on a GPU too: of models, calculators, exported files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from patch_checks import patched
from structures import crystal_and_molecule
from torch import Tensor

import eqaccel
from eqaccel.patches import replacement
from eqaccel.patches.rows import OwnRows

# Each library is there or not; nequip and sevenn set defaults of e3nn when they are imported, mace before it.
if HAS_MACE := importlib.util.find_spec("mace") is not None:
    import mace_models as mm
if HAS_NEQUIP := importlib.util.find_spec("nequip") is not None:
    import nequip_models as nm
if HAS_SEVENNET := importlib.util.find_spec("sevenn") is not None:
    import sevennet_models as sm

pytestmark = pytest.mark.filterwarnings("ignore")

CALLS = 6


@dataclass(frozen=True)
class Kind:
    """A model, and how its library calls it on structures."""

    build: Callable[[], Any]
    call: Callable[[Any, list[Atoms], torch.device], Mapping[str, Any]]
    outputs: tuple[str, ...]


def _mace_options(**options: Any) -> dict[str, Any]:
    return mm.TINY | {"hidden_irreps": "4x0e+4x1o"} | options


def _call_mace(model: Any, atoms: list[Atoms], _: torch.device) -> Mapping[str, Any]:
    return model(mm.batch(model, atoms), training=True, compute_stress=True)


def _zbl() -> dict[str, Any]:
    return {"_target_": "nequip.nn.pair_potential.ZBL", "units": "metal", "chemical_species": nm.ELEMENTS}


KINDS: dict[str, tuple[bool, Callable[[], Kind]]] = {
    "mace": (
        HAS_MACE,
        lambda: Kind(
            lambda: mm.energy_model(**_mace_options()), _call_mace, ("energy", "forces", "stress", "node_energy")
        ),
    ),
    "mace with densities and repulsion": (
        HAS_MACE,
        lambda: Kind(
            lambda: mm.energy_model("RealAgnosticDensityInteractionBlock", **_mace_options(pair_repulsion=True)),
            _call_mace,
            ("energy", "forces", "stress", "node_energy"),
        ),
    ),
    "nequip with repulsion": (
        HAS_NEQUIP,
        lambda: Kind(
            lambda: nm.model("small", pair_potential=_zbl()),
            lambda model, atoms, device: model(nm.data(atoms, device)),
            ("total_energy", "forces", "stress", "atomic_energy"),
        ),
    ),
    "sevennet": (
        HAS_SEVENNET,
        lambda: Kind(
            lambda: sm.model("l3i5"),
            lambda model, atoms, device: sm.outputs(model, sm.data(model, atoms, device=device)),
            ("inferred_total_energy", "inferred_force", "inferred_stress", "atomic_energy"),
        ),
    ),
}


@pytest.fixture(params=[name for name, (is_there, _) in KINDS.items() if is_there], scope="module")
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param][1]()


def atoms() -> Atoms:
    """As many that threads of a GPU have no fixed order."""
    crystal, _ = crystal_and_molecule(np.random.default_rng(3))
    many = crystal.repeat(4)
    many.rattle(0.02, seed=1)
    return many


def again(results: Callable[[], Mapping[str, Any]]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Results of the first call, and of others."""

    def arrays() -> dict[str, np.ndarray]:
        found = {name: value for name, value in results().items() if value is not None}
        return {
            name: value.detach().cpu().numpy() if isinstance(value, Tensor) else np.array(value)
            for name, value in found.items()
        }

    first = arrays()
    for _ in range(CALLS):
        for name, value in arrays().items():
            yield name, first[name], value


def test_models(kind: Kind, device: torch.device) -> None:
    """Of results, and of derivatives of parameters."""
    model = patched(kind.build().to(device)).train()
    structures = [atoms(), atoms()[:300]]

    def results() -> dict[str, Any]:
        found = kind.call(model, structures, device)
        outputs = {name: found[name] for name in kind.outputs}
        model.zero_grad(set_to_none=True)
        sum(value.square().sum() for value in outputs.values() if value.requires_grad).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return outputs | gradients

    for name, first, value in again(results):
        np.testing.assert_array_equal(value, first, err_msg=name)


_IN_ANY_ORDER = {f"aten::{name}{end}" for name in ("index_add", "scatter_add", "scatter_reduce") for end in ("", "_")}
"""Operators of torch that add rows on a GPU in whatever order its threads come."""


def test_no_sum_is_in_any_order(kind: Kind, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, with what a GPU would do: forward, backward, and derivatives of forces."""
    monkeypatch.setattr(replacement, "own_rows", lambda _, row: OwnRows(row))
    model = patched(kind.build().to(device)).train()
    with torch.profiler.profile() as profile:
        found = kind.call(model, [atoms()[:100], atoms()[:50]], device)
        sum(found[name].square().sum() for name in kind.outputs if found[name].requires_grad).backward()
    operators = {event.key for event in profile.key_averages()}
    assert "eqaccel::add_rows" in operators
    assert not operators & _IN_ANY_ORDER


def test_calculators(kind: Kind, device: torch.device) -> None:
    calculator = eqaccel.Calculator(patched(kind.build()), device=device)
    structure = atoms()

    def results() -> dict[str, Any]:
        calculator.calculate(structure)
        return calculator.results

    for name, first, value in again(results):
        np.testing.assert_array_equal(value, first, err_msg=name)


def test_exported_files(kind: Kind, device: torch.device, tmp_path: Path) -> None:
    """Called with edges in no order, which nobody has sorted."""
    file = tmp_path / "model.pt"
    eqaccel.export(patched(kind.build().to(device)), file, verify=False)
    program = eqaccel.load_exported(file)
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(500, (2, 20_000), generator=generator).to(device)
    dtype = getattr(torch, program.metadata["dtype"])
    vectors = torch.randn(edges.size(1), 3, generator=generator, dtype=torch.float64).to(device, dtype)
    types = (torch.arange(500) % 3).to(device)

    def results() -> dict[str, Tensor]:
        energies, gradient = program(vectors, edges, types)
        return {"energies": energies, "gradient": gradient}

    for name, first, value in again(results):
        np.testing.assert_array_equal(value, first, err_msg=name)
