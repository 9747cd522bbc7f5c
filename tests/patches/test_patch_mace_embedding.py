"""MACE's embedding of lengths with eqaccel's kernel: the same numbers and derivatives, names and files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm
from mace.modules.blocks import RadialEmbeddingBlock
from mace.modules.radial import GaussianBasis
from patch_checks import assert_close, assert_same_gradients, duplicated, patched
from torch.autograd import grad

from eqaccel import report, unpatch
from eqaccel.errors import PatchError
from eqaccel.patches import nodes
from eqaccel.patches.mace.embedding import FusedEmbedding, SplitEmbedding
from eqaccel.patches.mace.swapping import FORMS
from eqaccel.patches.replacement import become
from eqaccel.patches.torch_state import default_dtype

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "apart": {"apply_cutoff": False},
    "Agnesi": {"distance_transform": "Agnesi"},
    "Soft": {"distance_transform": "Soft", "apply_cutoff": False},
}
FULL = {"compute_force": True, "compute_stress": True}


def block(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    with default_dtype(dtype):
        return RadialEmbeddingBlock(r_max=4.3, num_bessel=8, num_polynomial_cutoff=5, **options)


def operands(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Lengths up to beyond the cutoff, of edges between two elements."""
    lengths = torch.linspace(0.3, 4.6, 60, dtype=torch.float64).to(device, dtype).view(-1, 1)
    edges = torch.arange(120, device=device).view(2, 60) % 2
    return lengths, torch.eye(2, dtype=dtype, device=device), edges, torch.tensor([6, 8], device=device)


def replaced(original: Any) -> Any:
    form = nodes.build_form(torch.nn.Linear(1, 1), original, FORMS)
    become(original, *form)
    return original


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_derivatives(name: str, device: torch.device) -> None:
    results = []
    for module in (block(**OPTIONS[name]), replaced(block(**OPTIONS[name]))):
        lengths, *rest = operands(torch.float64, device)
        lengths.requires_grad_()
        found = module.to(device)(lengths, *rest)
        values = [value for value in found if value is not None]
        first = grad(sum((v**3).sum() for v in values), lengths, create_graph=True)[0]
        results.append([*values, first, grad((first**2).sum(), lengths)[0]])
    assert isinstance(module, FusedEmbedding if name == "plain" else SplitEmbedding)
    assert len(results[0]) == len(results[1])
    for value, expected in zip(results[1], results[0], strict=True):
        assert_close(value, expected)


def test_single_precision_is_no_worse(device: torch.device) -> None:
    """Values and derivatives, against those of float64 for the same constants."""
    plain = block(torch.float32).to(device)
    fast = replaced(block(torch.float32).to(device))

    def errors(module: Any) -> list[torch.Tensor]:
        results = []
        for form, dtype in ((block(torch.float32).double().to(device), torch.float64), (module, torch.float32)):
            lengths = torch.linspace(0.3, 4.6, 4000).to(device, dtype).view(-1, 1).requires_grad_()
            value = form(lengths, *operands(dtype, device)[1:])[0]
            (first,) = grad(value.sum(), lengths, create_graph=True)
            results.append([value.detach(), first.detach(), grad(first.sum(), lengths)[0]])
        return [(value - exact).square().mean() for exact, value in zip(*results, strict=True)]

    for ours, theirs in zip(errors(fast), errors(plain), strict=True):
        assert ours <= theirs


def test_transformed_distances() -> None:
    plain, fast = (mm.energy_model(distance_transform="Agnesi") for _ in range(2))
    fast = patched(fast)
    assert isinstance(fast.radial_embedding, SplitEmbedding)
    for name in ("energy", "forces"):
        assert_close(fast(mm.batch(fast), **FULL)[name], plain(mm.batch(plain), **FULL)[name])


def test_two_atoms_in_one_place() -> None:
    """MACE divides by their distance, and says so by NaN."""
    for name in ("plain", "apart"):
        module = replaced(block(**OPTIONS[name]))
        _, *rest = operands(torch.float64, torch.device("cpu"))
        assert bool(module(torch.zeros(60, 1, dtype=torch.float64), *rest)[0].isnan().all())


def test_names_and_copies() -> None:
    plain, fast = mm.energy_model(), patched(mm.energy_model())
    assert list(fast.state_dict()) == list(plain.state_dict())
    changed = plain.state_dict() | {"radial_embedding.cutoff_fn.r_max": torch.tensor(2.5, dtype=torch.float64)}
    for state in (changed, plain.state_dict()):
        plain.load_state_dict(state)
        fast.load_state_dict(state)
        assert_close(fast(mm.batch(fast))["forces"], plain(mm.batch(plain))["forces"])
    for how in ("deepcopy", "save"):
        assert_close(duplicated(fast, how)(mm.batch(plain))["forces"], plain(mm.batch(plain))["forces"])
    assert type(unpatch(fast).radial_embedding) is RadialEmbeddingBlock


def test_trained_frequencies() -> None:
    """Gradients of frequencies, of forces too, where somebody trains them."""
    gradients = []
    for change in (lambda model: model, patched):
        model = mm.energy_model()
        functions = model.radial_embedding.bessel_fn
        weights = torch.nn.Parameter(functions.bessel_weights.clone())
        del functions._buffers["bessel_weights"]
        functions.bessel_weights = weights
        model = change(model)
        out = model(mm.batch(model), training=True, compute_force=True)
        gradients.append(grad(out["energy"].sum() + (out["forces"] ** 2).sum(), weights))
    assert isinstance(model.radial_embedding, FusedEmbedding)
    assert_same_gradients(gradients[1], gradients[0])


def test_other_functions_are_left() -> None:
    gaussian = block()
    gaussian.bessel_fn = GaussianBasis(4.3)
    gaussian.bessel_fn.bessel_weights = torch.ones(1)
    with pytest.raises(PatchError, match="no kernel for its GaussianBasis"):
        nodes.build_form(torch.nn.Linear(1, 1), gaussian, FORMS)
    model = mm.energy_model(radial_type="gaussian")
    (row,) = (row for row in report(patched(model)).rows if row.kind == "RadialEmbeddingBlock")
    assert not row.accelerated
    assert "no kernel for its GaussianBasis" in row.note


@pytest.mark.parametrize("name", ["apart", "Agnesi"])
def test_options_that_are_set_afterwards(name: str) -> None:
    """The kernel of functions with their cutoff has none for these."""
    module, wanted = replaced(block()), block(**OPTIONS[name])
    given = operands(torch.float64, torch.device("cpu"))
    if name == "apart":
        module.apply_cutoff = False
    else:
        module.distance_transform = wanted.distance_transform
    for value, expected in zip(module(*given), wanted(*given), strict=True):
        assert (value is None) == (expected is None)
        if expected is not None:
            assert_close(value, expected)
    assert type(module) is RadialEmbeddingBlock


def test_report(device: torch.device) -> None:
    model = mm.energy_model(dtype=torch.float32).to(device)
    for found, note in ((report(model), "left: not patched yet"), (report(patched(model)), "eqaccel.RadialBasis")):
        (row,) = (row for row in found.rows if row.kind == "RadialEmbeddingBlock")
        assert note in row.note
    assert row.accelerated
