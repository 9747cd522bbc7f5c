"""Patched NequIP models are the same models, built in code or packaged: every output, every entry, and back again."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")

import nequip_models as nm
from e3nn.util import jit
from nequip.data import AtomicDataDict
from nequip.integrations.ase import NequIPCalculator
from nequip.model import modify
from nequip.nn.compile import DictInputOutputWrapper
from patch_checks import (
    RELATIVE,
    Broken,
    DetachedWeights,
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

import eqaccel
from eqaccel import patch, report, unpatch
from eqaccel.errors import AlreadyPatchedError, PatchError, VerificationError
from eqaccel.families.tensor_product import TensorProductSpec
from eqaccel.ops import graph
from eqaccel.patches import convolution
from eqaccel.patches.coefficients import sharpen
from eqaccel.patches.copying import widened
from eqaccel.patches.nequip.swapping import NequipConvolution
from eqaccel.patches.precision import Options
from eqaccel.patches.replacement import preview
from eqaccel.testing import assert_close as assert_within
from eqaccel.testing import random_operands, reference

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nequip_defaults")]
Model = torch.nn.Module

OUTPUTS = ("total_energy", "atomic_energy", "forces", "stress", "virial")


@pytest.fixture
def model() -> Model:
    return nm.model()


def layers(model: Model) -> list[Model]:
    return [module.conv for name, module in model.model.func.named_children() if name.endswith("_convnet")]


def assert_untouched(model: Model, reference: Model) -> None:
    """Same modules, same state dict, same outputs to the last bit, and no trace of a patch."""
    kinds, wanted = ([(name, type(m).__name__) for name, m in m.named_modules()] for m in (model, reference))
    assert kinds == wanted
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    values, wanted = model(nm.data()), reference(nm.data())
    assert all(torch.equal(values[name], wanted[name]) for name in OUTPUTS)


@pytest.mark.parametrize(
    ("kind", "is_packaged"), [(kind, False) for kind in nm.KINDS] + [(kind, True) for kind in ("L", "parity")]
)
def test_energy_forces_stress(kind: str, is_packaged: bool, device: torch.device, tmp_path: Path) -> None:
    model = nm.model(kind)
    if is_packaged:
        model = nm.packaged(model, tmp_path / "model.nequip.zip")
    model = model.to(device)
    plain = model(nm.data(device=device))
    # What is compared here needs no verification, which takes longer than the rest of this test on a CPU. There the
    # models with least and most in them are verified, and those of both parities.
    verify = device.type == "cuda" or (kind in ("S", "L", "parity") and not is_packaged)
    fast = patch(model, verify=verify)(nm.data(device=device))
    for name in OUTPUTS:
        assert_close(fast[name], plain[name])
    assert nm.replaced_layers(model) == len(layers(model))


def test_replacements_are_where_the_model_is(model: Model) -> None:
    assert_on(patched(model.to("meta")), "meta")


def test_single_frame(model: Model, device: torch.device) -> None:
    frame = nm.data(nm.structures()[:1], device)
    del frame["batch"], frame["num_atoms"]
    plain = model.to(device)(frame.copy())
    assert_close(patched(model)(frame.copy())["forces"], plain["forces"])


@pytest.mark.parametrize("deterministic", [True, False])
def test_single_precision(deterministic: bool, device: torch.device) -> None:
    model, fast = nm.model("parity", num_layers=2), nm.model("parity", "float32", num_layers=2)
    with torch.no_grad():  # the same numbers, which the builder does not draw for another dtype
        for wide, narrow in zip(model.parameters(), fast.parameters(), strict=True):
            narrow.copy_(wide)
    plain = model.to(device)(nm.data(device=device))
    # Verified once: that takes longer than the rest of this test.
    single = patch(fast.to(device), deterministic=deterministic, verify=deterministic)(nm.data(device=device))
    for name in ("total_energy", "forces", "stress"):
        bound = 256 * torch.finfo(torch.float32).eps * plain[name].abs().sum()
        assert (single[name] - plain[name]).abs().max() <= bound


@pytest.mark.parametrize("copies", [0, 1])
def test_copies_compute_with_exact_coefficients(copies: int) -> None:
    """e3nn's programs are traced again when they are copied, and multiply constants in the dtype of the model."""
    model = nm.model("parity", "float32", num_layers=3)
    for _ in range(copies):
        model = copy.deepcopy(model)
    wide = widened(model)
    sharpen(wide)
    products = [layer.tp_scatter.tp for layer in layers(wide)]
    assert len(products) == 3
    for product in products:
        spec = TensorProductSpec.from_e3nn(product)
        operands = random_operands(spec, 4, 4, batch=True)
        x, y, w = operands.x, operands.y, operands.w
        scale = reference(spec, x.abs(), y.abs(), w.abs(), absolute=True)
        assert_within([product(x, y, w)], [reference(spec, x, y, w)], [scale])


@pytest.mark.parametrize("kind", ["small", "parity"])
def test_training_gradients(kind: str, device: torch.device) -> None:
    """A loss on forces and stress needs the derivative of the derivative, in every parameter."""
    gradients = []
    for model in (nm.model(kind), patched(nm.model(kind))):
        outputs = model.train().to(device)(nm.data(device=device))
        loss = outputs["total_energy"].sum() + (outputs["forces"] ** 2).sum() + (outputs["stress"] ** 2).sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    assert_same_gradients(gradients[1], gradients[0])


def test_forces_are_minus_the_gradient_of_the_energy(model: Model) -> None:
    fast, step = patched(model), 1e-4
    crystal = nm.structures()[0]
    forces = fast(nm.data([crystal]))["forces"]
    for atom, axis in ((0, 0), (3, 1), (6, 2)):
        energies = []
        for sign in (1, -1):
            moved = crystal.copy()
            moved.positions[atom, axis] += sign * step
            energies.append(fast(nm.data([moved]))["total_energy"].item())
        # Central differences: the error falls as step^2, and rounding adds eps * energy / step.
        numeric = -(energies[0] - energies[1]) / (2 * step)
        assert numeric == pytest.approx(forces[atom, axis].item(), abs=1e-6 * float(forces.abs().max()))


def test_layers_share_one_sort(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    sorts, sort = [], graph._sort
    monkeypatch.setattr(graph, "_sort", lambda *arguments: sorts.append(1) or sort(*arguments))
    patched(model)(nm.data())
    assert len(layers(model)) == 3
    assert len(sorts) == 1


def test_state_dict_and_parameters_stay(model: Model) -> None:
    plain = nm.model()
    parameters, buffers = dict(model.named_parameters()), {id(b) for b in model.buffers()}
    fast = patched(model)
    assert all(after is parameters[name] for name, after in fast.named_parameters())
    assert buffers <= {id(b) for b in fast.buffers()}
    state, expected = fast.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert any(".tp_scatter.tp." in key for key in expected)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 0.1
    assert fast.load_state_dict(plain.state_dict(), strict=True) == ([], [])
    assert_close(fast(nm.data())["forces"], plain(nm.data())["forces"])


def test_unpatch_restores_everything(model: Model) -> None:
    assert unpatch(patched(model)) is model
    assert_untouched(model, nm.model())
    assert nm.replaced_layers(patched(model)) == 3


@pytest.mark.parametrize("duplicate", ["deepcopy", "save"])
def test_copies(model: Model, duplicate: str) -> None:
    fast = patched(model)
    twin = duplicated(fast, duplicate)
    assert torch.equal(twin(nm.data())["forces"], fast(nm.data())["forces"])
    assert list(twin.state_dict()) == list(copy.deepcopy(nm.model()).state_dict())  # e3nn adds entries when it copies
    assert report(unpatch(twin)).accelerated == 0
    assert nm.replaced_layers(fast) == 3


def test_torchscript(model: Model) -> None:
    scripted = jit.script(copy.deepcopy(patched(model)))
    loaded = duplicated(scripted, "save")
    for structure in nm.structures():
        expected = model(nm.data([structure]))
        for program in (scripted, loaded):
            outputs = program(nm.data([structure]))
            for name in OUTPUTS:
                assert_close(outputs[name], expected[name])
    with pytest.raises(PatchError, match="TorchScript"):
        patch(scripted)


@pytest.mark.slow
def test_training_time_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """NequIP traces energy and forces into one graph and differentiates that; the code generator is torch's own."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **options: compile_(*a, **options | {"backend": "aot_eager"}))
    gradients = []
    for mode in ("eager", "compile"):
        model = patched(nm.model(compile_mode=mode, num_layers=2)).train()
        outputs = model(nm.data())
        loss = (outputs["forces"] ** 2).sum() + outputs["stress"].sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    assert any(model._compiled_cache)
    assert_same_gradients(gradients[1], gradients[0])
    for change in (patch, unpatch):
        with pytest.raises(PatchError, match="compiled itself"):
            change(model)
    assert nm.replaced_layers(patch(nm.model(compile_mode="compile", num_layers=2))) == 2


def test_calculator(model: Model) -> None:
    atoms = nm.structures()[0]
    calculator = NequIPCalculator(model, device="cpu", transforms=nm.transforms())
    atoms.calc = calculator
    energy, forces, stress = atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()
    assert patch(calculator) is calculator
    rows = [row for row in report(calculator).rows if row.accelerated and row.kind == "TensorProductScatter"]
    assert rows[1].path == "model.model.func.layer1_convnet.conv.tp_scatter"
    calculator.reset()
    assert atoms.get_potential_energy() == pytest.approx(energy, rel=RELATIVE)
    assert abs(atoms.get_forces() - forces).max() <= RELATIVE * abs(forces).max()
    assert abs(atoms.get_stress() - stress).max() <= RELATIVE * abs(stress).max()
    assert report(unpatch(calculator)).accelerated == 0


def test_models_of_several_layers_of_modules() -> None:
    ensemble = torch.nn.ModuleDict({"one": nm.model(), "two": nm.model(seed=2)})
    assert nm.replaced_layers(patch(ensemble)) == 6
    with pytest.raises(AlreadyPatchedError):
        patch(torch.nn.Sequential(nm.model(), ensemble["two"]))


def test_models_with_fields_of_their_own() -> None:
    charge = {"field": "charge", "num_features": 4, "min": -2, "max": 2}
    assert nm.replaced_layers(patch(nm.model(categorical_graph_field_embed=[charge]))) == 3


def test_energy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nm.replaced_layers(patch(nm.model(do_derivatives=False))) == 3
    monkeypatch.setattr(convolution, "TensorProductConv", DetachedWeights)
    with pytest.raises(VerificationError, match="forces"):
        patch(nm.model(do_derivatives=False))


class Ghosts:
    """What LAMMPS gives a model through ML-IAP: here the last atoms are images of the first."""

    def __init__(self, num_local: int, num_ghosts: int) -> None:
        self.nlocal, self.ntotal = num_local, num_local + num_ghosts

    def forward_exchange(self, features: torch.Tensor, out: torch.Tensor, _: int) -> None:
        out.copy_(torch.cat([features[: self.nlocal], features[: self.ntotal - self.nlocal]]))

    def reverse_exchange(self, gradient: torch.Tensor, out: torch.Tensor, _: int) -> None:
        out.copy_(gradient)
        out[: self.ntotal - self.nlocal] += gradient[self.nlocal :]
        out[self.nlocal :] = 0.0


def test_models_prepared_for_mliap(model: Model) -> None:
    """Atoms and ghosts send, only atoms receive."""
    modify(model, [{"modifier": "enable_LAMMPSMLIAPGhostExchange"}, {"modifier": "disable_ForceStressOutput"}])
    ghosts, generator = Ghosts(6, 2), torch.Generator().manual_seed(0)
    vectors = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    species = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    ends = [torch.randint(number, (40,), generator=generator) for number in (ghosts.nlocal, ghosts.ntotal)]
    results = []
    for change in (unpatch, patch):
        vectors = vectors.detach().requires_grad_()
        inputs = {"edge_vectors": vectors, "edge_index": torch.stack(ends), "atom_types": species}
        inputs["num_local_ghost_atoms"] = torch.tensor([ghosts.nlocal, ghosts.ntotal - ghosts.nlocal])
        energies = change(model)(inputs | {"lmp_mliap_data": ghosts})["atomic_energy"][: ghosts.nlocal]
        results.append((energies, *torch.autograd.grad(energies.sum(), vectors)))
    for value, expected in zip(results[1], results[0], strict=True):
        assert_close(value, expected)


def test_report(model: Model) -> None:
    before = report(model)
    assert before.accelerated == 0
    assert "not patched yet" in str(before)
    after = report(patched(model))
    rows = {row.path.removeprefix("model.func."): row for row in after.rows}
    first = rows["layer1_convnet.conv.tp_scatter"]
    assert first.accelerated
    assert (first.kind, first.paths, first.weight_numel, first.mul) == ("TensorProductScatter", 4, 24, (8, 4))
    assert "by eqaccel.MatrixProduct" in rows["layer1_convnet.conv.edge_mlp"].note
    for name in ("conv.sc", "conv.linear_1", "conv.linear_2"):
        assert rows[f"layer1_convnet.{name}"].accelerated
        assert "eqaccel.Linear" in rows[f"layer1_convnet.{name}"].note
    assert not rows["layer1_convnet.equivariant_nonlin"].accelerated
    assert "on a GPU" in rows["layer1_convnet.equivariant_nonlin"].note
    assert "16 modules accelerated" in str(after)


def test_compiled_models_name_the_library_of_their_operators(model: Model) -> None:
    assert "nequip_custom_ops_libs" not in model.metadata
    assert patched(model).metadata["nequip_custom_ops_libs"] == "eqaccel.ops"


def _named(name: str, *bases: type) -> type:
    return type(name, bases or (torch.nn.Module,), {})


def _as_subclass(name: str, **members: object) -> Callable[[Model], None]:
    """Makes the scatter of the last layer one of a derived class."""

    def change(model: Model) -> None:
        scatter = layers(model)[-1].tp_scatter
        scatter.__class__ = type(name, (type(scatter),), members)

    return change


def _other_product(model: Model) -> None:
    layers(model)[-1].tp_scatter.tp = torch.nn.Identity()


def _shared_weights(model: Model) -> None:
    layers(model)[-1].tp_scatter.tp.shared_weights = True


def _wrong_mode(model: Model) -> None:
    take_other_mode(layers(model)[-1].tp_scatter.tp)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_as_subclass("OpenEquivarianceTensorProductScatter"), AlreadyPatchedError, "OpenEquivariance"),
        (_as_subclass("CuEquivarianceTensorProductScatter"), AlreadyPatchedError, "cuEquivariance"),
        (_as_subclass("MyScatter", forward=lambda self, x, *edges: x), PatchError, "MyScatter"),
        (_other_product, PatchError, "Identity"),
        (_shared_weights, PatchError, "shared"),
        (_wrong_mode, PatchError, "weight_numel"),
    ],
)
def test_refusals_change_nothing(
    model: Model, change: Callable[[Model], None], error: type[Exception], message: str
) -> None:
    change(model)
    assert_refused(model, "model.func.layer2_convnet.conv.tp_scatter", error, message)


def test_patching_twice_is_refused_and_harmless(model: Model) -> None:
    with pytest.raises(AlreadyPatchedError, match="unpatch"):
        patch(patched(model))
    assert nm.replaced_layers(model) == 3


def _allegro() -> Model:
    allegro = pytest.importorskip("allegro.model")
    shape = {"l_max": 1, "num_layers": 1, "num_scalar_features": 8, "num_tensor_features": 4}
    options = {"seed": 1, "model_dtype": "float64", "r_max": nm.CUTOFF, "type_names": nm.ELEMENTS}
    embed = {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 4}
    return allegro.AllegroModel(**options, **shape, avg_num_neighbors=9.0, radial_chemical_embed=embed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_allegro, "Allegro model, which has no convolution over node features"),
        (type("GraphModel", (torch.nn.Module,), {"__module__": "nequip.nn"}), "no TensorProductScatter"),
        (lambda: DictInputOutputWrapper(None, [], []), "nequip-compile --modifiers enable_eqaccel"),
        (lambda: torch.compile(nm.model()), "torch.compile"),
        (lambda: types.SimpleNamespace(model=None), "calculator"),
        (lambda: types.SimpleNamespace(model=torch.nn.Linear(2, 2)), "known kind"),
    ],
)
def test_other_models_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PatchError, match=message):
        patch(make())


def test_report_says_why_allegro_is_left() -> None:
    assert "Allegro" in report(_allegro()).rows[0].note


@pytest.mark.parametrize("conv", [Wrong, Unequivariant])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_verification_restores_the_model(monkeypatch: pytest.MonkeyPatch, conv: type, dtype: str) -> None:
    model = nm.model(dtype=dtype)
    monkeypatch.setattr(convolution, "TensorProductConv", conv)
    with pytest.raises(VerificationError, match=r"by \d\.\d+e[+-]\d+ where at most \d\.\d+e[+-]\d+"):
        patch(model)
    assert_untouched(model, nm.model(dtype=dtype))


def test_failing_kernel_restores_the_model(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "TensorProductConv", Broken)
    with pytest.raises(ArithmeticError):
        patch(model)
    assert_untouched(model, nm.model())


def test_model_that_cannot_be_run_is_refused(model: Model) -> None:
    del model._metadata["r_max"]
    with pytest.raises(VerificationError, match="verify=False"):
        patch(model)
    assert report(model).accelerated == 0


def test_verification_leaves_no_trace(model: Model) -> None:
    model.train()
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    with torch.no_grad():
        patch(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(module.training for module in unpatch(model).modules())


def test_edges_of_a_batch_start_at_their_receivers() -> None:
    """NequIP's rows are the other way round than MACE's: a directed graph tells them apart."""
    scatter = layers(nm.model())[1].tp_scatter
    product = scatter.tp
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, product.irreps_in1.dim), (7, product.irreps_in2.dim), (7, product.weight_numel))
    operands = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    receivers, senders = torch.tensor([0, 0, 0, 2, 2, 4, 4]), torch.tensor([1, 2, 3, 1, 4, 0, 1])
    conv = convolution.build_convolution("tp", product, Options(), operands[0].device)
    assert_close(
        preview(scatter, NequipConvolution, conv)(*operands, receivers, senders), scatter(*operands, receivers, senders)
    )


def test_batches_agree_with_their_frames(model: Model) -> None:
    fast = patched(model)
    both = fast(nm.data())
    single = [fast(nm.data([structure])) for structure in nm.structures()]
    assert_close(both["forces"], torch.cat([outputs["forces"] for outputs in single]))
    assert AtomicDataDict.num_frames(nm.data()) == 2


@pytest.mark.parametrize(("built_in", "other"), [("float64", torch.float32), ("float32", torch.float64)])
def test_models_that_were_converted(built_in: str, other: torch.dtype, tmp_path: Path) -> None:
    """NequIP cannot run them itself."""
    model = nm.model("small", built_in).to(other)
    with pytest.raises(PatchError, match=f"expected torch.{built_in}, got weights in {other}"):
        patch(model)
    fast = patched(nm.model("small", built_in)).to(other)
    with pytest.raises(PatchError, match=r"convert them back with model\.to"):
        eqaccel.export(fast, tmp_path / "model.pt")
    with pytest.raises(PatchError, match="keep the type that they were built in"):
        eqaccel.Calculator(fast)
