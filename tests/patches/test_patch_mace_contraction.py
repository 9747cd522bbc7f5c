"""The symmetric contraction by polynomials gives the numbers and derivatives of MACE's own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm
from e3nn import o3
from e3nn.util import jit
from mace.modules.symmetric_contraction import Contraction
from patch_checks import assert_close, assert_same_gradients, duplicated, patched
from torch.autograd import grad

from eqaccel import export, patch, report, unpatch
from eqaccel.errors import PatchError
from eqaccel.patches import nodes
from eqaccel.patches.mace.contraction import PolynomialContraction, symmetric
from eqaccel.patches.mace.swapping import FORMS
from eqaccel.patches.replacement import preview
from eqaccel.patches.rounding import STAGES
from eqaccel.patches.torch_state import default_dtype

pytestmark = pytest.mark.filterwarnings("ignore")
FULL = {"compute_force": True, "compute_stress": True}
NUM_ELEMENTS, CHANNELS = 3, 5


def contraction(
    out: str, irreps: str = "5x0e+5x1o+5x2e+5x3o", dtype: torch.dtype = torch.float64, correlation: int = 3
) -> Contraction:
    with default_dtype(dtype):
        torch.manual_seed(3)
        return Contraction(o3.Irreps(irreps), o3.Irreps(out), correlation, num_elements=NUM_ELEMENTS)


def pair(out: str, **options: object) -> tuple[Contraction, PolynomialContraction]:
    original = contraction(out, **options)
    return original, preview(original, *nodes.build_form(original, original, FORMS))


def operands(original: Contraction, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    num_ell = original.U_tensors(1).shape[-2]
    x = torch.randn(rows, num_ell, CHANNELS, generator=generator, dtype=torch.float64).transpose(1, 2)  # not contiguous
    y = torch.nn.functional.one_hot(torch.arange(rows) % NUM_ELEMENTS, NUM_ELEMENTS).double()
    return x.requires_grad_(), y.requires_grad_()


def derivatives(module: torch.nn.Module, original: Contraction, rows: int) -> tuple[torch.Tensor, ...]:
    """The value, and its first and second derivatives in features, elements and weights."""
    x, y = operands(original, rows)
    inputs = [x, y, original.weights_max, *original.weights]
    value = module(x, y)
    first = grad((value**2).sum(), inputs, create_graph=True)
    return (value, *first, *grad(sum((g**2).sum() for g in first), inputs))


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("out", ["0e", "1o", "2e"])
def test_values_and_derivatives(out: str, rows: int) -> None:
    original, fast = pair(out)
    results = [derivatives(module, original, rows) for module in (original, fast)]
    for value, expected in zip(results[1], results[0], strict=True):
        assert_close(value, expected)


@pytest.mark.parametrize("correlation", [1, 2])
@pytest.mark.parametrize("out", ["0e", "1o", "3o"])
def test_lower_correlations(out: str, correlation: int) -> None:
    original, fast = pair(out, correlation=correlation)
    results = [derivatives(module, original, 7) for module in (original, fast)]
    for value, expected in zip(results[1], results[0], strict=True):
        assert_close(value, expected)


@pytest.mark.parametrize(("out", "terms"), [("0e", 94), ("1o", 392), ("2o", 408)])
def test_dependent_paths_share_a_weight(out: str, terms: int) -> None:
    assert len(pair(out)[1].eqaccel.polynomial.spec.terms) == terms


def test_coefficients_depend_on_the_model_alone() -> None:
    """Another rounding would be another kernel, and other trajectories; libraries round by where memory lies."""
    original, fast = pair("1o")
    moved = copy.deepcopy(original)
    for degree in (1, 2, 3):
        tensor = original.U_tensors(degree)
        memory = torch.empty(tensor.numel() + degree, dtype=tensor.dtype)[degree:]
        setattr(moved, f"U_matrix_{degree}", memory.view_as(tensor).copy_(tensor))
    again = preview(moved, *nodes.build_form(moved, moved, FORMS))
    assert again.eqaccel.polynomial.key == fast.eqaccel.polynomial.key
    assert torch.equal(again.eqaccel.mix, fast.eqaccel.mix)


@pytest.mark.parametrize(("out", "correlation"), [("0o", 3), ("1e", 2), ("4e", 1)])
def test_what_is_always_zero_is_left(out: str, correlation: int) -> None:
    with pytest.raises(PatchError, match="its outputs are zero"):
        pair(out, correlation=correlation)


def test_higher_correlations_are_left() -> None:
    with pytest.raises(PatchError, match="no kernel for a correlation of 4, above 3"):
        pair("0e", irreps="5x0e+5x1o", correlation=4)


@pytest.mark.parametrize("out", ["0e", "1o", "2e"])
def test_no_atoms(out: str) -> None:
    original, fast = pair(out)
    assert derivatives(fast, original, 0)[0].shape == (0, CHANNELS * o3.Irreps(out).dim)


@pytest.mark.parametrize("irreps", ["5x0e+5x1o", "5x0o+5x0e+5x1e+5x1o"])
def test_other_irreps(irreps: str) -> None:
    original, fast = pair("0e", irreps=irreps)
    assert_close(fast(*operands(original, 4)), original(*operands(original, 4)))


def test_single_precision_and_conversion() -> None:
    exact, converted = pair("1o")
    x, y = operands(exact, 6)
    expected = exact(x, y)
    # In every one of the sums there are fewer than a hundred terms of either sign.
    bound = 100 * torch.finfo(torch.float32).eps * float(_absolute(exact)(x.abs(), y).max())
    built, single = pair("1o", dtype=torch.float32)
    built.load_state_dict({key: value.float() for key, value in exact.state_dict().items()})
    for module in (single, converted.float()):
        assert (module(x.float(), y.float()) - expected).abs().max() <= bound


def _absolute(original: Contraction) -> Contraction:
    """The contraction of the absolute values of all its terms."""
    copied = copy.deepcopy(original)
    for tensor in (*copied.parameters(), *(b for b in copied.buffers() if b.is_floating_point())):
        tensor.data = tensor.data.abs()
    return copied


def test_repeats_bitwise(device: torch.device) -> None:
    original, fast = pair("1o")
    x, y = (t.detach().to(device).requires_grad_() for t in operands(original, 50))
    fast = fast.to(device)
    runs = [grad((fast(x, y) ** 2).sum(), (x, original.weights_max)) for _ in range(5)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


@pytest.fixture
def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    return mm.energy_model(correlation=3), patched(mm.energy_model(correlation=3))


def test_model(models: tuple[torch.nn.Module, torch.nn.Module], device: torch.device) -> None:
    outputs, gradients = [], []
    for model in models:
        out = model.to(device)(mm.batch(model), training=True, **FULL)
        loss = out["energy"].sum() + (out["forces"] ** 2).sum() + (out["stress"] ** 2).sum()
        gradients.append(grad(loss, list(model.parameters()), allow_unused=True))
        outputs.append(out)
    for name in ("energy", "node_energy", "forces", "stress"):
        assert_close(outputs[1][name], outputs[0][name])
    assert_same_gradients(gradients[1], gradients[0])
    accelerated = [row.path for row in report(models[1]).rows if row.accelerated and row.kind == "Contraction"]
    assert accelerated == [
        "products.0.symmetric_contractions.contractions.0",
        "products.0.symmetric_contractions.contractions.1",
        "products.1.symmetric_contractions.contractions.0",
    ]


def test_names_stay_and_checkpoints_load(models: tuple[torch.nn.Module, torch.nn.Module]) -> None:
    plain, fast = models
    assert [name for name, _ in fast.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(fast.state_dict()) == list(plain.state_dict())
    state = plain.state_dict()
    changed = {k: 1.5 * v if "contractions" in k and v.is_floating_point() else v for k, v in state.items()}
    for assign in (False, True):
        fast.load_state_dict(changed, assign=assign)
        plain.load_state_dict(changed)
        assert_close(fast(mm.batch(fast))["forces"], plain(mm.batch(plain))["forces"])
    restored = unpatch(fast)
    assert [type(m).__name__ for m in restored.modules()] == [type(m).__name__ for m in plain.modules()]
    assert all(torch.equal(a, b) for a, b in zip(restored.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("how", ["deepcopy", "save", "script"])
def test_copies(models: tuple[torch.nn.Module, torch.nn.Module], how: str) -> None:
    plain, fast = models
    copied = duplicated(jit.script(fast), "save") if how == "script" else duplicated(fast, how)
    assert_close(copied(mm.batch(plain))["forces"], plain(mm.batch(plain))["forces"])


def test_export(models: tuple[torch.nn.Module, torch.nn.Module], tmp_path: Path) -> None:
    export(models[1], tmp_path / "model.pt")  # compares the file with the model


def test_a_model_built_in_single_precision_and_widened() -> None:
    plain, fast = (mm.energy_model(correlation=3, dtype=torch.float32).double() for _ in range(2))
    expected, value = plain(mm.batch(plain))["forces"], patch(fast)(mm.batch(fast))["forces"]
    # The coefficients that the original has in each of its stages are rounded to float32.
    assert (value - expected).abs().max() <= STAGES * torch.finfo(torch.float32).eps * expected.abs().sum()
    modules = [module for module in fast.modules() if isinstance(module, PolynomialContraction)]
    assert len(modules) == 3
    for module in modules:
        num_elements, _, channels = module.weights_max.shape
        x = torch.randn(
            4, channels, module.eqaccel.num_ell, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        y = torch.nn.functional.one_hot(torch.arange(4) % num_elements, num_elements).double()
        assert_close(module(x, y), module.plain_forward(x, y))


def test_paths_that_cancel_are_no_reason_to_refuse() -> None:
    """The mean over the orders of the features of some paths is zero but for the rounding of what cancels."""
    model = mm.energy_model(correlation=3)
    contraction = model.products[0].symmetric_contractions.contractions[1]
    tensor = contraction.U_tensors(3)
    tensor = tensor if tensor.dim() == 5 else tensor.unsqueeze(0)
    tensor[..., 0] = 0.0  # as the basis of paths may come out
    tensor[0, 1, 2, 3, 0], tensor[0, 2, 1, 3, 0] = 0.1, -0.1
    sizes = symmetric(tensor).flatten(0, -2).norm(dim=0)
    assert sizes[0] < 1e-12 * tensor[..., 0].norm()
    assert report(patch(model)).accelerated


def test_orders_without_couplings_have_no_weights_to_train() -> None:
    """Degrees of one parity may give a contraction none of some order: MACE has zeros there, which stay as they are."""
    model = mm.energy_model(use_so3=True)
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad_(True).requires_grad}
    assert fixed
    expected = model(mm.batch(model), **FULL)
    patch(model)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == fixed
    for name in ("energy", "forces", "stress"):
        assert_close(model(mm.batch(model), **FULL)[name], expected[name])
