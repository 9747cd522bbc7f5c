"""A patched NequIP calculator: the class, properties, numbers and manners of the original, by another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")

import nequip_models as nm
import stepping_checks as sc
from nequip.data.transforms import NeighborListTransform
from nequip.integrations.ase import NequIPCalculator
from stepping_checks import patched, results_of

import eqaccel
from eqaccel.errors import StructureError
from eqaccel.patches.calculator import step_state
from eqaccel.patches.following import shared_potential

pytestmark = [pytest.mark.usefixtures("nequip_defaults"), pytest.mark.filterwarnings("ignore")]


def calculator(device: torch.device, kind: str = "small", dtype: str = "float64", **options: Any) -> Any:
    return NequIPCalculator(nm.model(kind, dtype=dtype), device=device, transforms=nm.transforms(), **options)


@pytest.mark.parametrize(("kind", "dtype"), [("small", "float32"), ("small", "float64"), ("parity", "float64")])
def test_all_properties(kind: str, dtype: str, device: torch.device) -> None:
    plain, fast = calculator(device, kind, dtype), patched(calculator(device, kind, dtype))
    assert isinstance(plain, NequIPCalculator)
    sc.assert_all_properties(fast, plain, nm.structures(), dtype)


def test_pieces_of_edges(device: torch.device) -> None:
    sc.assert_same_in_pieces(patched(calculator(device)), nm.structures(), "float64")


@pytest.mark.parametrize("kind", ["small", "parity"])
def test_programs(kind: str) -> None:
    sc.assert_programs_are_the_same(patched(calculator(torch.device("cpu"), kind)), nm.structures())


def test_units(device: torch.device) -> None:
    options = {"energy_units_to_eV": 2.0, "length_units_to_A": 0.5}
    plain, fast = calculator(device, **options), patched(calculator(device, **options))
    sc.assert_same(*(results_of(calc, nm.structures()[0]) for calc in (fast, plain)), "float64")


def test_copies_pickles_and_unpatch(device: torch.device) -> None:
    sc.assert_copies(patched(calculator(device)), NequIPCalculator, nm.structures()[0], "float64")


def test_a_changed_model_is_noticed(device: torch.device) -> None:
    fast, plain, atoms = patched(calculator(device)), calculator(device), nm.structures()[0]
    sc.assert_changes_are_noticed(fast, plain, atoms, 1e-6, "float64")
    assert all(parameter.requires_grad for parameter in fast.model.parameters())
    potential = shared_potential(step_state(fast).kind, fast.model, 0)
    assert not any(parameter.requires_grad for parameter in potential.parameters())


@pytest.mark.parametrize("trained", [True, False])
def test_writes_that_torch_does_not_count(trained: bool, device: torch.device) -> None:
    options = {"per_type_energy_scales_trainable": trained, "per_type_energy_shifts_trainable": trained}
    made = [NequIPCalculator(nm.model(**options), device=device, transforms=nm.transforms()) for _ in range(2)]
    atoms = nm.structures()[0]
    sc.assert_uncounted_writes_are_noticed(patched(made[0]), made[1], lambda c: c.model, atoms, 1e-3, "float64")


def own_forward(network: Any) -> None:
    forward = network.bessel_encode.cutoff.forward
    network.bessel_encode.cutoff.forward = lambda x: 0.5 * forward(x)


def other_power(network: Any) -> None:
    network.bessel_encode.cutoff.p = 4.0


def other_embedding(network: Any) -> None:
    network.type_embed.embed_module = torch.nn.Embedding.from_pretrained(network.type_embed.embed_module.weight * 0.9)


class Halved(torch.nn.Module):
    """Half of what a module gives."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.module(*args)


def wrapped_product(network: Any) -> None:
    scatter = network.layer1_convnet.conv.tp_scatter
    scatter.tp = Halved(scatter.tp)


@pytest.mark.parametrize("change", [own_forward, other_power, other_embedding, wrapped_product])
def test_changes_inside_of_replaced_modules_are_noticed(change: Callable[[Any], None], device: torch.device) -> None:
    fast, plain, atoms = patched(calculator(device)), calculator(device), nm.structures()[0]
    before = results_of(fast, atoms)
    for calc in (fast, plain):
        change(calc.model.model.func.to(device))
        calc.reset()
    found, expected = (results_of(calc, atoms) for calc in (fast, plain))
    sc.assert_same(found, expected, "float64")
    assert abs(found["energy"] - before["energy"]) > 1e-6


class Recording(NequIPCalculator):
    """A user's own calculator."""

    def save_extra_outputs(self, out: dict[str, Any]) -> None:
        self.features = out["node_features"]


def test_a_derived_class_keeps_its_methods(device: torch.device) -> None:
    own = patched(Recording(nm.model(), device=device, transforms=nm.transforms()))
    results_of(own, nm.structures()[0])
    assert own.features.size(0) == len(nm.structures()[0])
    assert "Recording has a save_extra_outputs method of its own" in eqaccel.report(own).rows[0].note


class Shortened(NeighborListTransform):
    """A list of neighbours that is a user's own."""

    def forward(self, data: Any) -> Any:
        found = super().forward(data)
        found["edge_index"], found["edge_cell_shift"] = found["edge_index"][:, :4], found["edge_cell_shift"][:4]
        return found


def test_transforms_of_their_own_go_the_ordinary_way(device: torch.device) -> None:
    atoms, results = nm.structures()[0], []
    for kind in (NeighborListTransform, Shortened):
        mapper = nm.transforms()[0]
        calculators = [
            NequIPCalculator(nm.model(), device=device, transforms=[mapper, kind(r_max=nm.CUTOFF)]) for _ in range(2)
        ]
        results += [results_of(calculators[0], atoms), results_of(patched(calculators[1]), atoms)]
        note = eqaccel.report(calculators[1]).rows[0].note
        assert ("Shortened has a forward method of its own" in note) == (kind is Shortened)
    sc.assert_same(results[1], results[0], "float64")
    sc.assert_same(results[3], results[2], "float64")
    assert abs(results[3]["energy"] - results[1]["energy"]) > 1e-6


def test_unknown_elements(device: torch.device) -> None:
    fast, wrong = patched(calculator(device)), nm.structures()[0]
    wrong.numbers[0] = 79
    with pytest.raises(StructureError, match=r"atoms: expected elements that the model knows .* got \[79\]"):
        results_of(fast, wrong)
