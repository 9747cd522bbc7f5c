"""Verification catches what is wrong on purpose (sabotage.py), and says what is wrong with a model itself."""

from __future__ import annotations

import contextlib
import copy
from importlib.util import find_spec

import pytest
import sabotage as sb
import torch

from eqaccel import patch, report
from eqaccel.errors import CompileError, MissingCompilerError, PatchError, SharedMemoryError, VerificationError
from eqaccel.families import FAMILIES
from eqaccel.patches import coefficients, comparison, counting, nodes, operators, rounding, structures, verify
from eqaccel.patches.example import Example, ExampleVerification
from eqaccel.patches.finder import find_models
from eqaccel.patches.mace import MaceKind
from eqaccel.patches.mace import swapping as mace_swapping
from eqaccel.patches.mace.contraction import symmetric
from eqaccel.patches.nequip import swapping as nequip_swapping
from eqaccel.patches.torch_state import default_dtype
from eqaccel.wigner import wigner_3j

FAMILY = "mace" if find_spec("mace") else "nequip" if find_spec("nequip") else ""
Model = torch.nn.Module

needs_mace = pytest.mark.skipif(FAMILY != "mace", reason="needs mace-torch")
pytestmark = pytest.mark.skipif(not FAMILY, reason="needs mace-torch or nequip")


@pytest.fixture
def model() -> Model:
    with default_dtype(torch.float32):
        return sb.small_model(FAMILY)


def assert_restored(model: Model, modules: list[Model], state: dict[str, torch.Tensor]) -> None:
    assert report(model).accelerated == 0
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


# All of them make the table of docs/verification.md. Here every other one runs, of each result and dtype.
SABOTAGES = [s for number, s in enumerate(sb.SABOTAGES) if number % 2 == 0 or s.dtype == "both"]
SABOTAGES = [s for s in SABOTAGES if s.family == FAMILY]


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=str)
def test_sabotage_is_caught(model: Model, sabotage: sb.Sabotage, device: torch.device) -> None:
    model.to(device)
    modules, state = list(model.modules()), copy.deepcopy(model.state_dict())
    catch = sb.caught(sabotage, model)
    assert catch is not None
    assert not catch.error <= catch.bound
    assert_restored(model, modules, state)


def test_kernels_of_every_family_are_compared_by_themselves() -> None:
    """But those of matrix products, whose errors whole models show, and of neighbours, which have no derivatives."""
    compared = {kind.family.name for kind in operators._CASES}
    assert compared == set(FAMILIES) - {"matrix_product", "neighbors"}


def test_float64_kernels_that_do_not_fit_a_gpu_leave_the_check_to_the_cpu(model, monkeypatch) -> None:
    def warmup(*_: object, dtypes: torch.dtype, **__: object) -> None:
        if dtypes == torch.float64:
            raise SharedMemoryError("too small")

    monkeypatch.setattr(comparison, "warmup", warmup)
    check = object.__new__(verify.Verification)
    check.model, check.dtype = model, torch.float32
    with pytest.raises(SharedMemoryError):
        check._compile()
    monkeypatch.setattr(comparison, "model_device", lambda _: torch.device("cuda"))
    assert check._compile() == torch.device("cpu")
    check.dtype = torch.float64
    with pytest.raises(SharedMemoryError):
        check._compile()


FORMS = [s for s in sb.SABOTAGES if s.family == FAMILY and s.where.startswith("form ")]


@pytest.mark.parametrize("sabotage", FORMS, ids=str)
def test_wrong_forms_are_refused_without_verification(model: Model, sabotage: sb.Sabotage) -> None:
    assert sb.caught(sabotage, model, verify=False) is not None
    assert report(model).accelerated == 0


def test_right_models_pass(model: Model, device: torch.device) -> None:
    patch(model.to(device))
    assert report(model).accelerated > 0


@needs_mace  # NequIP's models cannot be converted
def test_widened_model_passes() -> None:
    """Its coefficients are rounded to float32, and it is verified to float64 rounding nevertheless."""
    with default_dtype(torch.float32):
        wide = sb.small_model(FAMILY).double()
    assert sb.caught(next(s for s in sb.SABOTAGES if s.dtype == "float64" and s.what.endswith("hub")), wide) is not None
    patch(wide)


def test_frozen_parameters_are_verified_too(model: Model) -> None:
    """Calculators switch gradients off, and training may switch them on later."""
    model.requires_grad_(False)
    wrong = next(s for s in sb.SABOTAGES if s.where == "tensor_product_double_backward gw" and s.what == "0.1 %")
    assert sb.caught(wrong, model) is not None
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_models_that_are_not_finite_are_told_so(model: Model, value: float) -> None:
    name, parameter = list(model.named_parameters())[1]
    with torch.no_grad():
        parameter.view(-1)[0] = value
    with pytest.raises(VerificationError, match=rf"itself gives NaN .* parameter {name} is not finite"):
        patch(model)
    assert report(model).accelerated == 0


def test_crowded_structure() -> None:
    crowded = structures.crowded_structure(5.0, 3).written_out()
    senders, receivers = crowded.edge_index
    counts = receivers.bincount(minlength=len(crowded.positions))
    assert counts.max() > 1024
    assert counts.min() == 0
    assert len(senders) > 2 * 1024
    assert torch.equal(counts, senders.bincount(minlength=len(counts)))
    assert int(((counts > 0) & (counts < 20)).sum()) >= 2
    vectors = crowded.positions[receivers] - crowded.positions[senders] + crowded.unit_shifts @ crowded.cell
    assert float(vectors.norm(dim=1).max()) < 5.0


def test_counted_edges_are_edges_written_out(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in derivatives in all parameters and positions, to float64 rounding."""
    kind = find_models(model, PatchError)[0].kind
    check = verify.Verification(kind, model)
    counted, whole = (check._training(check.original, s) for s in (check._counted, check._crowded))
    bounds = dict.fromkeys(whole.values, rounding.ROUNDING * torch.finfo(torch.float64).eps)
    assert len(check._counted.counts) < len(check._crowded.edge_index[0]) / 6
    assert not list(comparison._excesses(counted, whole, bounds))
    # A model whose sums are not seen is compared on all edges.
    monkeypatch.setattr(counting, "_SUMS", {})
    uncounted = check._training(check.original, check._counted)
    assert list(comparison._excesses(uncounted, whole, bounds))
    patch(model)
    assert report(model).accelerated > 0


def test_coupling_tensors_become_exact() -> None:
    rounded = torch.from_numpy(wigner_3j(2, 1, 1).copy()).float()
    holder = torch.nn.Module()
    for name, value in (("_w3j_2_1_1", -rounded), ("_w3j_1_1_2", rounded.mT * 1.001), ("other", rounded)):
        holder.register_buffer(name, value.double())
    before = {name: buffer.clone() for name, buffer in holder.named_buffers()}
    coefficients.sharpen(holder)
    assert torch.equal(holder._w3j_2_1_1, -torch.from_numpy(wigner_3j(2, 1, 1).copy()))
    for name in ("_w3j_1_1_2", "other"):  # one is no coupling tensor of its degrees, one is none by name
        assert torch.equal(getattr(holder, name), before[name])


def test_symmetric_tensors() -> None:
    tensor = torch.randn(2, 3, 3, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = symmetric(tensor)
    for order in ((0, 2, 1, 3, 4), (0, 1, 3, 2, 4), (0, 3, 1, 2, 4)):
        assert torch.allclose(mean, mean.permute(order))
    x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(*(torch.einsum("mijkp,i,j,k", t, x, x, x) for t in (mean, tensor)))


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("kind", [CompileError, MissingCompilerError])
def test_failed_compilation_of_polynomials_is_an_error(
    model: Model, monkeypatch: pytest.MonkeyPatch, verified: bool, kind: type[CompileError]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(f"eqaccel::{kind.__name__}: no kernel\nCompiler output:\nits log")

    monkeypatch.setattr(nodes.PolynomialHarmonics, "dense", fail)
    with pytest.raises(kind, match="no kernel") as caught:
        patch(model, verify=verified)
    assert type(caught.value) is kind
    assert caught.value.log == "its log"
    assert not any(hasattr(module, "payload") for module in model.modules())
    assert any("no kernel" in row.note for row in report(model).rows if row.kind == "SphericalHarmonics")


class Chaotic(Model):
    """Multiplies what rounding does to a product by some millions."""

    def __init__(self) -> None:
        super().__init__()
        o3 = pytest.importorskip("e3nn.o3")
        self.product = o3.FullyConnectedTensorProduct("8x0e+8x1o", "8x0e+8x1o", "8x0e")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = torch.sigmoid(self.product(x, x))
        for _ in range(24):
            value = 3.99 * value * (1 - value)
        return value


@pytest.mark.parametrize("seeds", [range(0), range(1), range(7), range(8)])
def test_chaotic_models_pass_unless_no_rounding_shows_it(seeds: range, monkeypatch) -> None:
    """Some evaluations are close to the truth by chance: these seeds round nothing."""
    plain, of_parameters = ExampleVerification.rounded_anew, comparison._rounded_parameters

    def rounded_anew(self: ExampleVerification, subject: Example, seed: int = 0) -> Example:
        return subject if seed in seeds else plain(self, subject, seed)

    def rounded_parameters(network: Model, seed: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if seed in seeds else of_parameters(network, seed)

    monkeypatch.setattr(ExampleVerification, "rounded_anew", rounded_anew)
    monkeypatch.setattr(comparison, "_rounded_parameters", rounded_parameters)
    torch.manual_seed(0)
    network, example = Chaotic().double(), torch.randn(8, 32, dtype=torch.float64)
    if len(seeds) == 8:
        with pytest.raises(VerificationError, match="Chaotic is not the same after patching"):
            patch(network, example=(example,))
    else:
        assert patch(network, example=(example,)) is network


@needs_mace
def test_models_that_divide_by_sums_may_multiply_rounding() -> None:
    """Its parameters are as they were, though they are rounded anew to see by how much."""
    import mace_models

    model = mace_models.energy_model(mace_models.INTERACTIONS[5], dtype=torch.float32)
    state = copy.deepcopy(model.state_dict())
    assert not report(patch(model)).unverified
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_unknown_structures_are_left_with_the_reason(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise AttributeError("no such attribute")

    for swapping in (mace_swapping, nequip_swapping):
        forms = {**swapping.FORMS, "Linear": nodes.NodeForm("irreps_in", unknown)}
        monkeypatch.setattr(swapping, "FORMS", forms)
    patch(model, verify=False)
    notes = {row.note for row in report(model).rows if row.kind == "Linear"}
    assert notes == {"left: its structure is unknown here (AttributeError: no such attribute)"}


def test_work_of_forces(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forces that are wrong in the original too are its own business; those of the patch alone are caught."""
    kind = type(find_models(model, PatchError)[0].kind)
    evaluate = kind.evaluate

    def bent(self: object, other: Model, structure: structures.Structure) -> dict[str, torch.Tensor]:
        outputs = evaluate(self, other, structure)
        wrong = always or any(hasattr(module, "payload") for module in other.modules())
        # Only off the middle of a path, so that no comparison of values sees it.
        if wrong and structure.name.endswith("(displaced)"):
            outputs["energy"] = outputs["energy"] + 1e-3 * structure.positions.sum() ** 3
        return outputs

    monkeypatch.setattr(kind, "evaluate", bent)
    always = False
    with pytest.raises(VerificationError, match="forces of the periodic structure is not the slope of the energy"):
        patch(model)
    always = True
    patch(model)


@needs_mace
def test_more_elements_than_the_model_embeds() -> None:
    """A list of atomic numbers may be longer than what the model was made for."""
    import mace_models as mm

    built = mm.energy_model(**mm.TINY, atomic_numbers=[1, 6, 8, 14, 15])
    patch(built)
    assert report(built).accelerated > 0


@needs_mace
def test_atomic_virials_are_compared(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = MaceKind()
    periodic, _ = structures.small_structures(*kind.extent(model))
    outputs = kind.evaluate(model, periodic)
    assert outputs["atomic_virials"].shape == outputs["atomic_stresses"].shape == (len(periodic.positions), 3, 3)
    evaluate = MaceKind.evaluate

    def bent(self: MaceKind, other: Model, structure: structures.Structure) -> dict[str, torch.Tensor]:
        found = evaluate(self, other, structure)
        if any(hasattr(module, "payload") for module in other.modules()):
            found["atomic_virials"][0] *= sb.OFF
        return found

    monkeypatch.setattr(MaceKind, "evaluate", bent)
    with pytest.raises(VerificationError, match="atomic_virials"):
        patch(model)


def test_models_that_cannot_be_copied_are_refused(model: Model) -> None:
    def cannot(_: object) -> None:
        raise TypeError("no copies")

    next(model.children()).__deepcopy__ = cannot
    with pytest.raises(VerificationError, match="no copies") as caught:
        patch(model)
    assert isinstance(caught.value, PatchError)
    assert "verify=False" in str(caught.value)
