"""NequIP models that compute more than the energies of atoms that a potential knows: nothing of it is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")
pytest.importorskip("ase", reason="needs ase")

import foreign_models as fm
import nequip_models as nm
from nequip.integrations.ase import NequIPCalculator
from nequip.model import NequIPGNNModel
from nequip.model.utils import model_builder
from nequip.nn import GraphModel, GraphModuleMixin
from stepping_checks import patched, results_of

import eqaccel
from eqaccel.patches.agreement import _structure
from eqaccel.patches.calculator import step_state

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nequip_defaults")]

_RESULTS = ("total_energy", "forces", "stress", "virial")


class Added(GraphModuleMixin, torch.nn.Module):
    """What adds to a field a sum over something else, as extensions for long ranges do."""

    def __init__(self, irreps_in: Any, reads: str, field: str) -> None:
        super().__init__()
        self.reads, self.field = reads, field
        self._init_irreps(irreps_in=irreps_in, irreps_out={field: "0e"})

    def forward(self, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Adds it."""
        data[self.field] = data[self.field] + (1 / (1 + data[self.reads].square().sum(1))).sum()
        return data


def _after_the_sum(model: Any) -> None:
    network = model.model.func
    network.append("long_range", Added(network.irreps_out, "edge_vectors", "total_energy"))


def _of_positions(model: Any) -> None:
    network = model.model.func
    added = Added(network.irreps_out, "pos", "atomic_energy")
    network.insert("confined", added, before="total_energy_sum")


def _nested(model: Any) -> None:
    class Outer(GraphModuleMixin, torch.nn.Module):
        def __init__(self, func: Any) -> None:
            super().__init__()
            self.func = func
            self._init_irreps(irreps_in=func.irreps_in, irreps_out=func.irreps_out)

        def forward(self, data: Any) -> Any:
            found = self.func(data)
            return found | {name: 0.5 * found[name] for name in _RESULTS}

    model.model = Outer(model.model)


def _sum_of(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.model.func.total_energy_sum, name, value)


def _instance(model: Any) -> None:
    forces = model.model
    compute = forces.forward
    forces.forward = lambda data: {**(found := compute(data)), "forces": 0.5 * found["forces"]}


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "module after the sum": (_after_the_sum, "but Added has a forward method of its own"),
    "module that reads positions": (_of_positions, "node energies of the periodic structure off by"),
    "module around all": (_nested, "does not predict forces and stress alone|Outer has a forward method of its own"),
    "mean": (_sum_of("reduce", "mean"), "expected total_energy_sum to add up the energies of atoms"),
    "constant": (_sum_of("constant", 0.5), "expected total_energy_sum to add up the energies of atoms"),
    "model": (lambda model: fm.halve_outputs(model, _RESULTS, "MyGraph"), "MyGraph has a forward method of its own"),
    "model of the same name": (lambda model: fm.halve_outputs(model, _RESULTS), "GraphModel has a forward method"),
    "forces": (lambda model: fm.halve_outputs(model.model, ("forces",), "Mine"), "Mine has a forward method of its"),
    "forward of one object": (_instance, "ForceStressOutput is not one of nequip's own modules as it came"),
}


def _model(change: str) -> torch.nn.Module:
    model = nm.model()
    CHANGES[change][0](model)
    return model


def _calculator(model: torch.nn.Module) -> Any:
    return NequIPCalculator(model, device="cpu", transforms=nm.transforms())


@pytest.mark.parametrize("change", CHANGES)
def test_patched_calculators(change: str) -> None:
    plain, known = _calculator(_model(change)), _calculator(nm.model())
    fast = patched(_calculator(_model(change)))
    fm.assert_goes_the_ordinary_way(fast, plain, known, nm.structures()[0], CHANGES[change][1], "float64")


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_stands_in(change: str, tmp_path: Path) -> None:
    fm.assert_nothing_stands_in(_model(change), CHANGES[change][1], tmp_path / "model.pt")


def test_a_wrapper_class_of_a_model_builder() -> None:
    class Shifted(GraphModel):
        def forward(self, data: Any) -> Any:
            found = super().forward(data)
            return found | {"forces": 0.5 * found["forces"]}

    class Named(GraphModel):
        def atoms(self) -> list[str]:
            return list(self.type_names)

    options = {"seed": 1, "model_dtype": "float64", "r_max": nm.CUTOFF, "type_names": nm.ELEMENTS, "num_layers": 2}
    options |= {"l_max": 1, "parity": False, "num_features": 4, "radial_mlp_width": 8, "avg_num_neighbors": 9.0}
    atoms = nm.structures()[0]
    for wrapper, computes in ((Shifted, False), (Named, True)):
        build = model_builder(wrapper_class=wrapper)(lambda **given: NequIPGNNModel(**given))
        plain, fast = (_calculator(build(**options).eval()) for _ in range(2))
        patched(fast)
        fm.assert_same(results_of(fast, atoms), results_of(plain, atoms), "float64")
        assert (step_state(fast).calls == 1) == computes
        assert eqaccel.report(fast).rows[0].accelerated == computes


def test_calls_in_inference_mode() -> None:
    """The first of which makes the step, and the structure that it is compared on."""
    _structure.cache_clear()
    fast, atoms = patched(_calculator(nm.model())), nm.structures()[0]
    with torch.inference_mode():
        found = results_of(fast, atoms)
    step_state(fast).drop()
    fm.assert_same(results_of(fast, atoms), found, "float64")
    assert eqaccel.report(fast).rows[0].accelerated


def test_a_class_that_is_changed_later() -> None:
    fast, plain, atoms = patched(_calculator(nm.model())), _calculator(_model("model")), nm.structures()[0]
    results_of(fast, atoms)
    fm.halve_outputs(fast.model, _RESULTS)
    fm.assert_goes_the_ordinary_way(fast, plain, _calculator(nm.model()), atoms, "GraphModel has a forward", "float64")
