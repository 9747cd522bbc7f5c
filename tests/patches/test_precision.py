"""Models that are less precise than float32 because somebody asked for it: what is rounded, said, verified and kept."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sabotage as sb
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import eqaccel
from eqaccel.errors import AlreadyPatchedError, CalculatorError, PatchError
from eqaccel.families.matrix_product import Factors
from eqaccel.ops import MatrixProduct, TensorProductConv
from eqaccel.patches.copying import widened
from eqaccel.patches.finder import find_models
from eqaccel.patches.precision import precision_of, rounded_at_random
from eqaccel.patches.radial import RadialPart
from eqaccel.patches.rounding import FACTOR
from eqaccel.patches.structures import small_structures
from eqaccel.patches.torch_state import default_dtype

FAMILY = "mace" if find_spec("mace") else "nequip" if find_spec("nequip") else ""
pytestmark = [
    pytest.mark.skipif(not FAMILY, reason="needs mace-torch or nequip"),
    pytest.mark.filterwarnings("ignore"),
]
UNIT = torch.finfo(torch.bfloat16).eps / 2  # of rounding to nearest
WEIGHTS = {"weights"}


@pytest.fixture
def model(device: torch.device) -> torch.nn.Module:
    with default_dtype(torch.float32):
        return sb.small_model(FAMILY).to(device)


def convolutions(model: torch.nn.Module) -> list[TensorProductConv]:
    return [module for module in model.modules() if isinstance(module, TensorProductConv)]


def evaluated(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    kind: Any = find_models(model, PatchError)[0].kind
    structure = small_structures(*kind.extent(model))[0]
    with default_dtype(kind.dtype(model)):
        return kind.evaluate(model, structure)


def test_nothing_is_by_default(model: torch.nn.Module) -> None:
    eqaccel.patch(model, verify=False)
    assert not any(conv.spec.bfloat16_weights for conv in convolutions(model))
    assert eqaccel.report(model).low_precision == precision_of(model) == ()
    assert "low precision" not in str(eqaccel.report(model))


def test_weights_are_rounded_and_verified(model: torch.nn.Module) -> None:
    plain, state = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    eqaccel.patch(model, low_precision=WEIGHTS)
    assert convolutions(model)
    assert all(conv.spec.bfloat16_weights for conv in convolutions(model))
    found = eqaccel.report(model)
    assert found.low_precision == ("weights",)
    first, second = str(found).splitlines()[:2]
    assert "modules accelerated" in first
    assert second.startswith("low precision: weights of edges are rounded to bfloat16")
    right, rounded = evaluated(widened(plain)), evaluated(model)
    error = (rounded["forces"] - right["forces"]).norm() / right["forces"].norm()
    # Each weight is off by less than its unit, and two layers follow each other, forward and backward.
    assert 1e-2 * UNIT < error < 4 * UNIT
    with pytest.raises(AlreadyPatchedError):
        eqaccel.patch(model, low_precision=WEIGHTS)
    eqaccel.unpatch(model)
    assert eqaccel.report(model).low_precision == ()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    if next(model.parameters()).is_cpu:  # torch adds in any order on a GPU
        assert all(map(torch.equal, evaluated(model).values(), evaluated(plain).values()))


def test_errors_of_rounding_are_imitated(model: torch.nn.Module) -> None:
    """What verification allows is no more than an order of magnitude above what rounding does."""
    plain = widened(model)
    eqaccel.patch(model, verify=False, low_precision=WEIGHTS)
    right, rounded, wide = evaluated(plain)["forces"], evaluated(model)["forces"], widened(model)
    found = []
    for seed in range(4):
        with rounded_at_random(wide, seed):
            found.append(float((evaluated(wide)["forces"] - right).abs().max()))
    error = float((rounded - right).abs().max())
    assert error < FACTOR * max(found) < 50 * error
    assert len(set(found)) == 4
    assert float((evaluated(wide)["forces"] - right).abs().max()) < 1e-9 * float(right.abs().max())


# Every other one is caught elsewhere in full precision; here all that the rounding of weights could hide.
SABOTAGES = [s for s in sb.SABOTAGES if s.family == FAMILY and s.dtype != "float64"]
SABOTAGES = [s for s in SABOTAGES if s.where.startswith("tensor_product")] or SABOTAGES


@pytest.mark.parametrize("sabotage", SABOTAGES[::5], ids=str)
def test_sabotage_is_caught(model: torch.nn.Module, sabotage: sb.Sabotage) -> None:
    catch = sb.caught(sabotage, model, low_precision=WEIGHTS)
    assert catch is not None
    assert not catch.error <= catch.bound
    assert eqaccel.report(model).accelerated == 0


def test_rounding_that_nobody_asked_for_is_refused(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from eqaccel.patches import convolution

    of_module = convolution.TensorProductSpec.from_e3nn
    monkeypatch.setattr(
        convolution.TensorProductSpec, "from_e3nn", lambda module: of_module(module).with_bfloat16_weights()
    )
    monkeypatch.setattr("eqaccel.patches.comparison.precision_of", lambda _: ())
    with pytest.raises(PatchError, match="is not the same after patching"):
        eqaccel.patch(model)


@pytest.mark.parametrize("wrong", ["weights", {"weight"}, 5, ["weights", "bfloat16"]])
def test_other_names_are_refused(model: torch.nn.Module, wrong: Any) -> None:
    with pytest.raises(PatchError, match=r"low_precision: expected some of 'weights' \(.*\), .*got ") as error:
        eqaccel.patch(model, low_precision=wrong)
    assert repr(wrong if isinstance(wrong, str | int) else list(wrong)[-1]) in str(error.value)
    assert eqaccel.report(model).accelerated == 0


def test_other_dtypes_and_modules_are_refused(model: torch.nn.Module) -> None:
    if FAMILY == "mace":  # NequIP's models cannot be converted
        wide = copy.deepcopy(model).double()
        with pytest.raises(PatchError, match=r"low_precision: expected a model in float32, got \w+ in float64"):
            eqaccel.patch(wide, low_precision=WEIGHTS)
        assert eqaccel.report(wide).accelerated == 0

    from e3nn import o3

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = o3.FullyConnectedTensorProduct("2x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o")

    with pytest.raises(PatchError, match="low_precision: expected none for Network"):
        eqaccel.patch(Network(), low_precision=WEIGHTS)


@pytest.mark.skipif(FAMILY != "mace", reason="needs mace-torch")
def test_calculators_and_files_keep_it(model: torch.nn.Module, tmp_path: Path, device: torch.device) -> None:
    import mace_models as mm

    plain = copy.deepcopy(model)
    eqaccel.patch(model, verify=False, low_precision=WEIGHTS)
    own = eqaccel.Calculator(copy.deepcopy(plain), device=device, verify=False, low_precision=WEIGHTS)
    full = eqaccel.Calculator(plain, device=device, verify=False)
    file = tmp_path / "rounded.pt"
    metadata = eqaccel.export(model, file)
    assert metadata["low_precision"] == ["weights"]
    opened = eqaccel.Calculator(file, device=device)
    atoms = _atoms(mm.ELEMENTS)
    forces = {}
    for name, calculator in {"full": full, "own": own, "opened": opened}.items():
        forces[name] = torch.from_numpy(calculator.get_property("forces", atoms.copy()))
        said = eqaccel.report(calculator)
        assert said.low_precision == (() if name == "full" else ("weights",))
    scale = forces["full"].norm()
    assert 1e-2 * UNIT < (forces["own"] - forces["full"]).norm() / scale < 4 * UNIT
    # A weight that is between two values may become the other one, by another order of sums before it.
    assert (forces["own"] - forces["opened"]).norm() / scale < 0.1 * UNIT
    with pytest.raises(CalculatorError, match=r"low_precision: expected none for .*rounded.pt"):
        eqaccel.Calculator(file, device=device, low_precision=WEIGHTS)
    eqaccel.unpatch(full.model)
    eqaccel.patch(full.model, verify=False)
    with pytest.raises(CalculatorError, match="low_precision: expected none but what the model was patched with"):
        eqaccel.Calculator(full.model, device=device, low_precision=WEIGHTS)
    assert eqaccel.export(model, tmp_path / "wide.pt", dtype=torch.float64).get("low_precision") is None


def _atoms(elements: tuple[int, ...]) -> Any:
    from ase import Atoms

    generator = torch.Generator().manual_seed(0)
    sites = torch.cartesian_prod(*[torch.arange(2.0)] * 3) * 1.6
    sites += 0.2 * torch.randn(sites.shape, generator=generator)
    numbers = [elements[n % len(elements)] for n in range(len(sites))]
    return Atoms(numbers, positions=sites.numpy(), cell=[3.6, 3.5, 3.7], pbc=True)


class WeightsOfPairs(TorchDispatchMode):
    """Notes the weights that convolutions and their gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = {"eqaccel::tensor_product_shared": 4, "eqaccel::tensor_product_shared_backward": 5}.get(func.name())
        if place is not None:
            self.given.append(args[place])
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(FAMILY != "mace", reason="needs mace-torch")
def test_a_step_keeps_weights_of_pairs_in_bfloat16(model: torch.nn.Module, device: torch.device) -> None:
    calculator = eqaccel.Calculator(model, device=device, verify=False, low_precision=WEIGHTS)
    with WeightsOfPairs() as noted:
        calculator.get_property("forces", _atoms((1, 6, 8)))
    assert len(noted.given) >= 2 * len(convolutions(model))
    assert {w.dtype for w in noted.given} == {torch.bfloat16}
    pointers = [w.data_ptr() for w in noted.given]
    assert len(set(pointers)) <= len(pointers) / 2, "gradients have those that were kept"


def products(model: torch.nn.Module) -> list[MatrixProduct]:
    return [module for module in model.modules() if isinstance(module, MatrixProduct)]


def test_factors_of_products_are_rounded_on_gpus(model: torch.nn.Module, device: torch.device) -> None:
    plain = copy.deepcopy(model)
    eqaccel.patch(model, low_precision={"products"})
    assert products(model)
    assert all(product.spec.factors is Factors.ROUNDED for product in products(model))
    assert not any(conv.spec.bfloat16_weights for conv in convolutions(model))
    assert precision_of(model) == precision_of(copy.deepcopy(model)) == ("products",)
    said = str(eqaccel.report(model)).splitlines()
    assert said[1].startswith("low precision: GPUs round the factors of matrix products")
    assert any("of rounded factors on GPUs" in line for line in said)
    full = eqaccel.patch(copy.deepcopy(plain), verify=False)
    same = [torch.equal(a, b) for a, b in zip(evaluated(model).values(), evaluated(full).values(), strict=True)]
    assert all(same) == (device.type == "cpu")
    right = evaluated(widened(plain))["forces"]
    assert (evaluated(model)["forces"] - right).norm() < 8 * 2.0**-11 * right.norm()
    eqaccel.unpatch(model)
    assert not products(model)


def test_errors_of_products_are_imitated(model: torch.nn.Module) -> None:
    """Those of factors, forward and backward; a CPU makes none, so that only their size is known here."""
    eqaccel.patch(model, verify=False, low_precision={"products"})
    wide = widened(model)
    right = evaluated(wide)["forces"]
    with rounded_at_random(wide, 0):
        found = evaluated(wide)["forces"]
    assert 1e-2 * 2.0**-11 < (found - right).norm() / right.norm() < 16 * 2.0**-11
    again = evaluated(wide)["forces"]
    assert (again - right).norm() <= 1e-9 * right.norm()  # nothing is left of it; a GPU may add in another order


def test_both_at_once(model: torch.nn.Module) -> None:
    eqaccel.patch(model, low_precision=["weights", "products"])
    assert eqaccel.report(model).low_precision == ("products", "weights")
    assert "bfloat16" in str(eqaccel.report(model)).splitlines()[1]


def test_an_exchanged_activation_keeps_what_products_are(model: torch.nn.Module) -> None:
    """Layers are made anew where something in them was exchanged."""
    eqaccel.patch(model, verify=False, low_precision={"products"})
    layers = [module for module in model.modules() if isinstance(module, RadialPart)]
    made = [part for layer in layers for part in layer.remake().modules() if isinstance(part, MatrixProduct)]
    assert made
    assert all(product.spec.factors is Factors.ROUNDED for product in made)


def test_it_is_what_a_copy_has(model: torch.nn.Module) -> None:
    eqaccel.patch(model, verify=False, low_precision=WEIGHTS)
    assert precision_of(copy.deepcopy(model)) == ("weights",)
