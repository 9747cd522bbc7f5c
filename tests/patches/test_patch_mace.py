"""Patched MACE models are the same models: every output and derivative, every state-dict entry, and back again."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm
from e3nn.util import jit
from mace.calculators import MACECalculator
from mace.modules import ScaleShiftMACE
from patch_checks import (
    RELATIVE,
    Broken,
    Unequivariant,
    Wrong,
    assert_close,
    assert_on,
    assert_refused,
    assert_same_gradients,
    duplicated,
    patched,
    take_other_mode,
)

from eqaccel import patch, report, unpatch
from eqaccel.errors import AlreadyPatchedError, PatchError, VerificationError
from eqaccel.patches import convolution

pytestmark = pytest.mark.filterwarnings("ignore")
Model = torch.nn.Module

FULL = {"compute_force": True, "compute_virials": True, "compute_stress": True}


@functools.cache
def _built(builder: Callable[..., Model], *args: object) -> Model:
    return builder(*args)


def build(builder: Callable[..., Model], *args: object) -> Model:
    """A model of its own, copied from one that is built once because building is slow."""
    return copy.deepcopy(_built(builder, *args))


@pytest.fixture
def model() -> Model:
    return build(mm.energy_model)


@pytest.fixture(params=mm.INTERACTIONS)
def pair(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """A model and its patched copy."""
    return build(mm.energy_model, request.param), patched(build(mm.energy_model, request.param))


def assert_same_bits(model: Model, reference: Model) -> None:
    # e3nn scripts its spherical harmonics once for the whole process. The first run is only profiled and rounds
    # differently from the specialised runs after it, even between two runs of one unpatched model.
    with torch.jit.optimized_execution(False):
        values, wanted = model(mm.batch(model), **FULL), reference(mm.batch(reference), **FULL)
    for name in ("energy", "forces", "stress"):
        assert torch.equal(values[name], wanted[name]), name


def assert_untouched(model: Model, reference: Model) -> None:
    """Same modules, same state dict, same outputs to the last bit, and no trace of a patch."""
    kinds, wanted = ([(name, type(m).__name__) for name, m in m.named_modules()] for m in (model, reference))
    assert kinds == wanted
    assert not any(hasattr(block, "conv_fusion") for block in model.interactions)
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert_same_bits(model, reference)


def test_energy_forces_stress_virials(pair: tuple[Model, Model]) -> None:
    plain, fast = (m(mm.batch(m), **FULL) for m in pair)
    for name in ("energy", "interaction_energy", "node_energy", "forces", "virials", "stress", "node_feats"):
        assert_close(fast[name], plain[name])


def test_hessian(pair: tuple[Model, Model]) -> None:
    molecule = mm.structures()[1:]
    plain, fast = (m(mm.batch(m, molecule), compute_hessian=True) for m in pair)
    assert_close(fast["hessian"], plain["hessian"])


def test_training_gradients(pair: tuple[Model, Model]) -> None:
    """A loss on forces and stress needs the derivative of the derivative, in every parameter."""
    gradients = []
    for m in pair:
        outputs = m(mm.batch(m), training=True, **FULL)
        loss = outputs["energy"].sum() + (outputs["forces"] ** 2).sum() + (outputs["stress"] ** 2).sum()
        gradients.append(torch.autograd.grad(loss, list(m.parameters()), allow_unused=True))
    assert_same_gradients(gradients[1], gradients[0])


@pytest.mark.parametrize("deterministic", [True, False])
def test_single_precision(deterministic: bool) -> None:
    reference = build(mm.energy_model)
    fast = patch(build(mm.energy_model).float(), deterministic=deterministic)
    plain, single = reference(mm.batch(reference), **FULL), fast(mm.batch(fast), **FULL)
    eps = torch.finfo(torch.float32).eps
    for name in ("energy", "forces", "stress"):
        assert single[name].dtype == torch.float32
        assert (single[name] - plain[name]).abs().max() <= 256 * eps * plain[name].abs().sum()


def test_dtype_follows_the_model_after_the_patch(model: Model) -> None:
    fast = patched(model)
    before = fast(mm.batch(fast), **FULL)["forces"]
    single = fast.float()(mm.batch(fast), **FULL)["forces"]
    assert single.dtype == torch.float32
    assert (single - before).abs().max() <= 256 * torch.finfo(torch.float32).eps * before.abs().sum()
    assert fast.double()(mm.batch(fast), **FULL)["forces"].dtype == torch.float64


def test_forces_are_minus_the_gradient_of_the_energy(model: Model) -> None:
    fast, step = patched(model), 1e-4
    crystal = mm.structures()[0]
    forces = fast(mm.batch(fast, [crystal]))["forces"]
    for atom, axis in ((0, 0), (3, 1), (6, 2)):
        energies = []
        for sign in (1, -1):
            moved = crystal.copy()
            moved.positions[atom, axis] += sign * step
            energies.append(fast(mm.batch(fast, [moved]), compute_force=False)["energy"].item())
        # Central differences: the error falls as step^2, and rounding adds eps * energy / step.
        numeric = -(energies[0] - energies[1]) / (2 * step)
        assert numeric == pytest.approx(forces[atom, axis].item(), abs=1e-6 * float(forces.abs().max()))


def test_dipole_model() -> None:
    plain, fast = build(mm.dipole_model), patch(build(mm.dipole_model))
    expected, value = plain(mm.batch(plain)), fast(mm.batch(fast))
    for name in ("dipole", "atomic_dipoles"):
        assert_close(value[name], expected[name])


def test_energy_dipole_model() -> None:
    plain, fast = build(mm.energy_dipole_model), patch(build(mm.energy_dipole_model))
    expected, value = plain(mm.batch(plain), **FULL), fast(mm.batch(fast), **FULL)
    for name in ("energy", "forces", "virials", "stress", "dipole", "atomic_dipoles"):
        assert_close(value[name], expected[name])


@pytest.mark.slow
def test_foundation_sized_model() -> None:
    fast = patch(mm.mp0_medium_like(num_elements=8))
    rows = [row for row in report(fast).rows if row.accelerated]
    products = [(row.paths, row.weight_numel, row.mul) for row in rows if row.kind == "TensorProduct"]
    assert products == [(4, 512, (128,)), (10, 1280, (128,))]
    assert Counter(row.kind for row in rows) == {
        "TensorProduct": 2,
        "FullyConnectedNet": 2,
        "RadialEmbeddingBlock": 1,
        "SphericalHarmonics": 1,
        "Contraction": 3,
        "FullyConnectedTensorProduct": 2,
        "Linear": 10,
        "reshape_irreps": 2,
        "Activation": 1,
    }


def test_linear_maps(pair: tuple[Model, Model]) -> None:
    plain, fast = (m.requires_grad_(False) for m in pair)
    rows = {row.path: row for row in report(fast).rows}
    maps = [row for row in rows.values() if row.kind in ("Linear", "FullyConnectedTensorProduct")]
    assert {"interactions.0.linear_up", "products.0.linear"} <= {row.path for row in maps if row.accelerated}
    assert all("eqaccel.Linear" in row.note or "biases" in row.note for row in maps)
    values, wanted = fast(mm.batch(fast), **FULL), plain(mm.batch(plain), **FULL)
    for name in ("energy", "forces", "virials", "node_feats"):
        assert_close(values[name], wanted[name])


def test_state_dict_and_parameters_stay(pair: tuple[Model, Model]) -> None:
    plain, fast = pair
    state, expected = fast.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert state._metadata == expected._metadata
    assert any(".conv_tp." in key for key in expected)
    assert plain.load_state_dict(state, strict=True) == ([], [])
    assert fast.load_state_dict(expected, strict=True) == ([], [])


def test_parameters_and_buffers_stay_the_same_objects(model: Model) -> None:
    parameters, buffers = dict(model.named_parameters()), {id(b) for b in model.buffers()}
    patched(model)
    assert all(after is parameters[name] for name, after in model.named_parameters())
    assert len(list(model.parameters())) == len(parameters)
    assert buffers <= {id(b) for b in model.buffers()}


def test_replacements_are_where_the_model_is(model: Model) -> None:
    assert_on(patched(model.to("meta")), "meta")


def test_checkpoint_loads_into_a_patched_model(model: Model) -> None:
    plain = build(mm.energy_model)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 0.1 * torch.ones_like(parameter)
        plain.interactions[0].conv_tp.output_mask *= 2
    fast = patched(model)
    fast.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(fast.interactions[0].conv_tp.output_mask, plain.interactions[0].conv_tp.output_mask)
    assert_close(fast(mm.batch(fast))["forces"], plain(mm.batch(plain))["forces"])


def test_strict_loading_still_complains(model: Model) -> None:
    fast = patched(model)
    state = fast.state_dict()
    state["interactions.0.conv_tp.stray"] = state.pop("interactions.0.conv_tp.output_mask")
    missing, unexpected = fast.load_state_dict(state, strict=False)
    assert [key.rpartition(".")[2] for key in (*missing, *unexpected)] == ["output_mask", "stray"]
    with pytest.raises(RuntimeError, match="stray"):
        fast.load_state_dict(state, strict=True)


def test_unpatch_restores_everything(pair: tuple[Model, Model]) -> None:
    plain, fast = pair
    accelerated = report(fast).accelerated
    assert unpatch(fast) is fast
    assert_untouched(fast, plain)
    assert unpatch(fast) is fast
    patched(fast)
    assert report(fast).accelerated == accelerated >= 24


@pytest.mark.parametrize("duplicate", ["deepcopy", "save"])
def test_copies(model: Model, duplicate: str) -> None:
    fast = patched(model)
    twin = duplicated(fast, duplicate)
    assert_same_bits(twin, fast)
    assert list(twin.state_dict()) == list(fast.state_dict())
    assert_untouched(unpatch(twin), build(mm.energy_model))
    assert report(fast).accelerated == 24


@pytest.mark.parametrize("interaction", mm.INTERACTIONS[1:4:2])
def test_torchscript(interaction: str) -> None:
    fast = patched(build(mm.energy_model, interaction))
    scripted = jit.script(copy.deepcopy(fast))
    loaded = duplicated(scripted, "save")
    for program in (scripted, loaded):
        outputs = program(mm.batch(fast), compute_stress=True)
        expected = fast(mm.batch(fast), compute_stress=True)
        for name in ("energy", "forces", "stress"):
            assert_close(outputs[name], expected[name])
    with pytest.raises(PatchError, match="TorchScript"):
        patch(scripted)


def test_calculator() -> None:
    atoms = mm.structures()[0]
    models = [build(mm.energy_model), build(mm.energy_model, mm.INTERACTIONS[2])]
    calculator = MACECalculator(models=models, device="cpu", default_dtype="float64")
    atoms.calc = calculator
    energy, forces, stress = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    assert patch(calculator) is calculator
    assert report(calculator).accelerated == 49  # with the step of the calculator itself
    assert [row.path for row in report(calculator).rows if row.accelerated][25] == "models.1.interactions.0.conv_tp"
    calculator.reset()
    assert atoms.get_potential_energy() == pytest.approx(energy, rel=RELATIVE)
    assert abs(atoms.get_forces() - forces).max() <= RELATIVE * abs(forces).max()
    assert abs(atoms.get_stress() - stress).max() <= RELATIVE * abs(stress).max()
    assert report(unpatch(calculator)).accelerated == 0


def test_one_bad_member_leaves_the_whole_calculator(model: Model) -> None:
    calculator = types.SimpleNamespace(models=[model, patched(build(mm.energy_model))])
    with pytest.raises(AlreadyPatchedError):
        patch(calculator)
    assert_untouched(model, build(mm.energy_model))


def test_models_inside_of_other_modules(model: Model) -> None:
    holder = torch.nn.ModuleDict({"first": model, "again": model, "other": torch.nn.Linear(2, 2)})
    assert patch(holder) is holder
    rows = [row for row in report(holder).rows if row.accelerated and row.kind == "TensorProduct"]
    assert [row.path for row in rows] == ["first.interactions.0.conv_tp", "first.interactions.1.conv_tp"]
    assert_untouched(unpatch(holder)["first"], build(mm.energy_model))


class CustomModel(ScaleShiftMACE):
    """A user's own model."""


def test_subclasses_and_old_pickles() -> None:
    model = mm.energy_model(cls=CustomModel)
    for block in model.interactions:
        del block.cueq_config, block.oeq_config
    assert report(patch(model)).accelerated == 24


def test_reshaping_has_the_gradient_of_slices(model: Model) -> None:
    reshape = patched(model).interactions[0].reshape
    x = torch.randn(5, reshape.irreps.dim, dtype=torch.float64, requires_grad=True)
    z, plain = reshape(x), reshape.plain_forward(x)
    assert torch.equal(z, plain)
    g, a = torch.randn_like(z).requires_grad_(), torch.randn_like(x)
    first, right = (torch.autograd.grad(value, x, g, create_graph=True)[0] for value in (z, plain))
    assert torch.equal(first, right)
    assert torch.equal(*(torch.autograd.grad(value, g, a)[0] for value in (first, right)))


def test_report(model: Model) -> None:
    before = report(model)
    assert before.accelerated == 0
    assert "not patched yet" in str(before)
    after = report(patched(model))
    rows = {row.path: row for row in after.rows}
    first = rows["interactions.0.conv_tp"]
    assert (first.accelerated, first.kind, first.paths, first.weight_numel, first.mul) == (
        True,
        "TensorProduct",
        3,
        24,
        (8,),
    )
    assert rows["products.0.symmetric_contractions.contractions.0"].accelerated
    assert "eqaccel.Polynomial" in rows["products.0.symmetric_contractions.contractions.0"].note
    assert rows["interactions.0.reshape"].accelerated
    assert after.accelerated == 24
    assert "interactions.1.conv_tp" in str(after)
    assert "24 modules accelerated" in str(after)


def test_report_names_what_long_range_models_add(model: Model) -> None:
    model.__class__ = type("PolarMACE", (ScaleShiftMACE,), {})
    model.field_dependent_charges_maps = torch.nn.ModuleList()
    rows = {row.path: row for row in report(patched(model)).rows}
    assert rows["interactions.0.conv_tp"].accelerated
    assert "PolarMACE" in rows["field_dependent_charges_maps"].note


def _second_block(**attributes: object) -> Callable[[Model], None]:
    """Damages the last block only, to see that the first is not touched before all are checked."""

    def change(model: Model) -> None:
        for name, value in attributes.items():
            setattr(model.interactions[1], name, value)

    return change


def _config(**fields: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(**fields)


def _wrong_mode(model: Model) -> None:
    take_other_mode(model.interactions[1].conv_tp)


def _narrow_radial(model: Model) -> None:
    model.interactions[1].conv_tp_weights.hs[-1] = 8


def _shared_weights(model: Model) -> None:
    model.interactions[1].conv_tp.shared_weights = True


def _deaf_block(model: Model) -> None:
    block = model.interactions[1]
    block.__class__ = type("DeafBlock", (torch.nn.Module,), {"forward": lambda self, x: x})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_second_block(cueq_config=_config(enabled=True, layout_str="mul_ir")), AlreadyPatchedError, "cuEquivariance"),
        (_second_block(cueq_config=_config(enabled=True, layout_str="ir_mul")), PatchError, "ir_mul"),
        (_second_block(oeq_config=_config(enabled=True)), AlreadyPatchedError, "OpenEquivariance"),
        (_second_block(conv_fusion="atomic"), AlreadyPatchedError, "conv_fusion"),
        (_second_block(conv_tp=torch.nn.Identity()), PatchError, "Identity"),
        (_narrow_radial, PatchError, "expected 56 weights"),
        (_wrong_mode, PatchError, "weight_numel"),
        (_shared_weights, PatchError, "shared"),
        (_deaf_block, PatchError, "DeafBlock"),
    ],
)
def test_refusals_change_nothing(
    model: Model, change: Callable[[Model], None], error: type[Exception], message: str
) -> None:
    change(model)
    assert_refused(model, "interactions.1", error, message)
    assert not hasattr(model.interactions[0], "conv_fusion")


def test_patching_twice_is_refused_and_harmless(model: Model) -> None:
    fast = patched(model)
    with pytest.raises(AlreadyPatchedError, match="unpatch"):
        patch(fast)
    assert report(fast).accelerated == 24


def _named(name: str) -> Model:
    return type(name, (torch.nn.Module,), {})()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.Sequential(_named("TensorProductScatter")), "known kind"),
        (lambda: torch.nn.Linear(2, 2), r"known kind \(MACE, NequIP, SevenNet\)"),
        (lambda: torch.jit.script(torch.nn.Linear(2, 2)), "TorchScript"),
        (lambda: torch.compile(build(mm.energy_model)), "torch.compile"),
        (lambda: torch.nn.Sequential(torch.compile(build(mm.energy_model))), "torch.compile"),
        (lambda: object(), "calculator"),
        (lambda: types.SimpleNamespace(models=[]), "calculator"),
    ],
)
def test_other_models_are_refused(make: Callable[[], object], message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = make()
    with pytest.raises(PatchError, match=message):
        patch(other)


def test_model_without_blocks_is_refused(model: Model) -> None:
    model.interactions = torch.nn.ModuleList()
    with pytest.raises(PatchError, match="nothing to replace"):
        patch(model)


@pytest.mark.parametrize("conv", [Wrong, Unequivariant])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verification_restores_the_model(
    model: Model, monkeypatch: pytest.MonkeyPatch, conv: type, dtype: torch.dtype
) -> None:
    model.to(dtype)
    monkeypatch.setattr(convolution, "TensorProductConv", conv)
    with pytest.raises(VerificationError, match=r"by \d\.\d+e[+-]\d+ where at most \d\.\d+e[+-]\d+"):
        patch(model)
    assert_untouched(model, build(mm.energy_model).to(dtype))


def test_failing_kernel_restores_the_model(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "TensorProductConv", Broken)
    with pytest.raises(ArithmeticError):
        patch(model)
    assert_untouched(model, build(mm.energy_model))


def test_model_that_cannot_be_run_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.interactions[1].avg_num_neighbors = "many"
    with pytest.raises(VerificationError, match="verify=False"):
        patch(model)
    assert report(model).accelerated == 0


def test_verification_leaves_no_trace(model: Model) -> None:
    parameters = list(model.parameters())
    for number, parameter in enumerate(parameters):
        parameter.requires_grad_(number % 2 == 0)
        parameter.grad = torch.full_like(parameter, 3.0) if number % 3 == 0 else None
    model.interactions[0].eval()
    training = {name: m.training for name, m in model.named_modules()}
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    with torch.no_grad():
        patch(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype
    for number, parameter in enumerate(parameters):
        assert parameter.requires_grad == (number % 2 == 0)
        assert (parameter.grad is None) == (number % 3 != 0)
        assert parameter.grad is None or bool((parameter.grad == 3.0).all())
    unpatch(model)
    assert {name: m.training for name, m in model.named_modules()} == training


def test_numbers_that_overflow_are_no_bug() -> None:
    """Of a model whose own results are finite, by weights that are much too large."""
    model = mm.energy_model(**mm.TINY | {"correlation": 2}, dtype=torch.float32)
    with torch.no_grad():
        model.interactions[0].linear_up.weight.mul_(1e8)
    with pytest.raises(VerificationError, match="overflow where its inputs are rounded anew"):
        patch(model)
