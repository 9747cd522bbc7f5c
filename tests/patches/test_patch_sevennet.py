"""Patched SevenNet models beside the unpatched ones: SevenNet's architectures, checkpoints, modalities, training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sevenn", reason="needs sevenn")

import sevennet_models as sm
from patch_checks import (
    Wrong,
    assert_close,
    assert_on,
    assert_refused,
    assert_same_gradients,
    duplicated,
    patched,
    take_other_mode,
)
from sevenn.checkpoint import SevenNetCheckpoint
from sevenn.model_build import build_E3_equivariant_model
from sevenn.nn.convolution import IrrepsScatterGatterFusedConvolution
from sevenn.nn.edge_embedding import PolynomialCutoff, XPLORCutoff

from eqaccel import patch, report, unpatch
from eqaccel.errors import AlreadyPatchedError, PatchError, VerificationError
from eqaccel.patches import convolution
from eqaccel.patches.gate import FusedGate
from eqaccel.patches.precision import Options
from eqaccel.patches.replacement import preview
from eqaccel.patches.rounding import FACTOR, ROUNDING
from eqaccel.patches.sevennet.embedding import FusedEdgeEmbedding, SplitEdgeEmbedding
from eqaccel.patches.sevennet.parts import convolutions
from eqaccel.patches.sevennet.swapping import SevennetConvolution

pytestmark = pytest.mark.filterwarnings("ignore")
Model = Any
SINGLE = FACTOR * ROUNDING * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", sm.KINDS)
def test_numbers(kind: str, device: torch.device) -> None:
    """In float64, with virials of atoms."""
    plain = sm.model(kind, "float64").to(device)
    plain.force_output.use_atomic_virial = True
    fast = patched(copy.deepcopy(plain))
    assert_on(fast, device.type)
    for modality in sm.MODALITIES:
        found, expected = (sm.outputs(m, sm.data(m, modality=modality, device=device)) for m in (fast, plain))
        assert len(found) == 5
        for name, value in found.items():
            assert_close(value, expected[name])


@pytest.mark.usefixtures("dense_everywhere")
def test_gates_as_on_a_gpu() -> None:
    """Of scalars and gates of both parities."""
    model = sm.model("mf-ompa", "float64")
    wanted = sm.outputs(model, sm.data(model))["inferred_force"]
    fast = patched(model)
    assert sum(isinstance(module, FusedGate) for module in fast.modules()) == 4
    assert_close(sm.outputs(fast, sm.data(fast))["inferred_force"], wanted)


def test_single_precision(device: torch.device) -> None:
    """In float32, as SevenNet has its models, and verified."""
    model = sm.model("omni").to(device)
    expected = sm.outputs(model, sm.data(model, device=device))
    found = sm.outputs(patch(model), sm.data(model, device=device))
    for name, value in found.items():
        assert float((value - expected[name]).abs().max()) <= SINGLE * float(expected[name].abs().sum())


@pytest.mark.parametrize("kind", ["0", "omni"])
def test_training_gradients(kind: str, device: torch.device) -> None:
    """A loss on forces and stress needs the derivative of the derivative, in every parameter."""
    gradients = []
    trained = {"train_denominator": True, "train_shift_scale": True}
    for model in (sm.model(kind, "float64", **trained), patched(sm.model(kind, "float64", **trained))):
        found = sm.outputs(model.train().to(device), sm.data(model, device=device))
        forces, stress = found["inferred_force"], found["inferred_stress"]
        loss = found["inferred_total_energy"].sum() + (forces**2).sum() + (stress**2).sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    assert sum(gradient is not None for gradient in gradients[0]) > 10
    assert_same_gradients(gradients[1], gradients[0])


def test_state_dict_and_parameters_stay() -> None:
    model, plain = sm.model("0", "float64"), sm.model("0", "float64")
    parameters, buffers = dict(model.named_parameters()), {id(b) for b in model.buffers()}
    fast = patched(model)
    assert all(after is parameters[name] for name, after in fast.named_parameters())
    assert buffers <= {id(b) for b in fast.buffers()}
    assert list(fast.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 0.1
    assert fast.load_state_dict(plain.state_dict(), strict=True) == ([], [])
    wanted = sm.outputs(plain, sm.data(plain))["inferred_force"]
    assert_close(sm.outputs(fast, sm.data(fast))["inferred_force"], wanted)
    assert sm.replaced_layers(fast) == 2
    assert unpatch(fast) is model
    assert report(model).accelerated == 0
    assert [type(a).__name__ for a in model.modules()] == [type(b).__name__ for b in plain.modules()]
    assert not any(hasattr(module, "eqaccel") for module in model.modules())
    assert torch.equal(sm.outputs(model, sm.data(model))["inferred_force"], wanted)


@pytest.mark.parametrize("duplicate", ["deepcopy", "save"])
def test_copies(duplicate: str) -> None:
    fast = patched(sm.model("omni"))
    twin = duplicated(fast, duplicate)
    forces = sm.outputs(fast, sm.data(fast))["inferred_force"]
    assert torch.equal(sm.outputs(twin, sm.data(twin))["inferred_force"], forces)
    assert report(unpatch(twin)).accelerated == 0
    assert sm.replaced_layers(fast) == 2


def test_checkpoints(tmp_path: Path) -> None:
    """What SevenNet writes of a patched model, SevenNet reads; and what it reads can be patched."""
    model = patched(sm.model("omni"))
    expected = sm.outputs(model, sm.data(model))
    file = sm.checkpoint(tmp_path / "checkpoint.pth", "omni", model)
    read = SevenNetCheckpoint(file).build_model().eval()
    assert list(read.state_dict()) == list(sm.model("omni").state_dict())
    found = sm.outputs(patched(read), sm.data(read))
    assert sm.replaced_layers(read) == sm.replaced_layers(model)
    for name, value in found.items():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize("kind", ["0", "omni"])
def test_cutoffs_that_are_exchanged(kind: str) -> None:
    """By another function or power, or with a wrapper around it, which becomes a part of the same form or ends it."""
    kinds = {"0": SplitEdgeEmbedding, "omni": FusedEdgeEmbedding}
    plain, fast = sm.model(kind, "float64"), patched(sm.model(kind, "float64"))
    assert isinstance(fast.edge_embedding, kinds[kind])
    for cutoff in (PolynomialCutoff(sm.CUTOFF, 4), XPLORCutoff(sm.CUTOFF, 1.7), Halved(PolynomialCutoff(sm.CUTOFF, 6))):
        for model in (plain, fast):
            model.edge_embedding.cutoff_function = cutoff
        found, expected = (sm.outputs(model, sm.data(model)) for model in (fast, plain))
        for name, value in found.items():
            assert_close(value, expected[name])
        is_same = kind == "0" or type(cutoff) is PolynomialCutoff
        assert isinstance(fast.edge_embedding, kinds[kind]) is is_same


def test_hooks_of_what_is_called() -> None:
    """Of the radial network and the spherical harmonics, which keep eqaccel's kernels around them."""
    plain, fast = sm.model("0", "float64"), patched(sm.model("0", "float64"))
    for model in (plain, fast):
        model.edge_embedding.spherical.register_forward_hook(lambda module, args, output: 0.5 * output)
        for _, _, layer in convolutions(model):
            layer.weight_nn.register_forward_hook(lambda module, args, output: 2 * output)
    found, expected = (sm.outputs(model, sm.data(model)) for model in (fast, plain))
    for name, value in found.items():
        assert_close(value, expected[name])
    assert sm.replaced_layers(fast) == 2
    assert isinstance(fast.edge_embedding, SplitEdgeEmbedding)


def test_numbers_in_children() -> None:
    plain, fast = sm.model("omni", "float64"), patched(sm.model("omni", "float64"))
    for model in (plain, fast):
        model.edge_embedding.basis_function.prefactor *= 1.5
        for _, _, layer in convolutions(model):
            layer.weight_nn.layer0.var_in = 1.3
    found, expected = (sm.outputs(model, sm.data(model)) for model in (fast, plain))
    for name, value in found.items():
        assert_close(value, expected[name])
    assert report(fast).accelerated == report(patched(sm.model("omni", "float64"))).accelerated


@pytest.mark.parametrize(("name", "factor"), [("p", 2), ("coeff_p0", 1.1), ("coeff_p1", 1.1), ("coeff_p2", 1.1)])
def test_a_cutoff_whose_coefficients_do_not_follow_from_its_power(name: str, factor: float) -> None:
    plain, fast = sm.model("omni", "float64"), patched(sm.model("omni", "float64"))
    for model in (plain, fast):
        cutoff = model.edge_embedding.cutoff_function
        setattr(cutoff, name, factor * getattr(cutoff, name))
    found, expected = (sm.outputs(model, sm.data(model)) for model in (fast, plain))
    for name, value in found.items():
        assert_close(value, expected[name])


class Halved(torch.nn.Module):
    """Half of what a function gives."""

    def __init__(self, function: torch.nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.function(x)


@pytest.mark.parametrize("prepared", [False, True])
def test_modalities_of_single_structures(prepared: bool) -> None:
    """As the calculator sets a model up, and as SevenNet deploys one."""
    model = sm.model("omni", "float64")
    crystal = sm.structures()[:1]
    batches = [sm.data(model, crystal, modality) for modality in sm.MODALITIES]
    wanted = [sm.outputs(model, batch)["inferred_total_energy"] for batch in batches]
    assert abs(wanted[0] - wanted[1]) > 1.0
    model.set_is_batch_data(False)
    if prepared:
        model.prepare_modal_deploy("omat24")
    fast = patch(model)
    for modality, energy in zip(sm.MODALITIES, wanted, strict=True):
        single = sm.data(model, crystal, modality)
        single["data_modality"] = modality
        single["num_atoms"], single["cell_volume"] = single["num_atoms"][0], single["cell_volume"][0]
        found = fast(single)["inferred_total_energy"]
        assert_close(found.reshape(1), wanted[1] if prepared else energy)


def test_coupling_tensors_of_other_signs() -> None:
    """Checkpoints may bring coupling tensors of another sign than this version of e3nn has."""
    model = sm.model("mf-ompa", "float64")
    product = model._modules["1_convolution"].convolution
    (tensor,) = [b for name, b in product.named_buffers() if name.endswith("_w3j_1_1_1")]
    before = sm.outputs(model, sm.data(model))["inferred_force"]
    tensor.neg_()
    wanted = sm.outputs(model, sm.data(model))["inferred_force"]
    assert float((wanted - before).abs().max()) > 1e-6
    assert_close(sm.outputs(patched(model), sm.data(model))["inferred_force"], wanted)


def test_edges_start_at_their_receivers() -> None:
    """A directed graph tells senders and receivers apart."""
    module = sm.model("0", "float64")._modules["1_convolution"]
    product, generator = module.convolution, torch.Generator().manual_seed(0)
    shapes = {"x": (5, product.irreps_in1.dim), "edge_attr": (7, product.irreps_in2.dim), "edge_embedding": (7, 8)}
    data = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    data["edge_index"] = torch.tensor([[0, 0, 0, 2, 2, 4, 4], [1, 2, 3, 1, 4, 0, 1]])
    conv = convolution.build_convolution("tp", product, Options(), torch.device("cpu"))
    found, expected = (form(dict(data))["x"] for form in (preview(module, SevennetConvolution, conv), module))
    assert_close(found, expected)


def test_energy_only() -> None:
    """Forces that a model leaves to others are verified too."""
    model = sm.model("0", "float64")
    model.delete_module_by_key("force_output")
    assert sm.replaced_layers(patch(model)) == 2


def test_report() -> None:
    before = report(sm.model("0"))
    assert before.accelerated == 0
    assert "not patched yet" in str(before)
    after = report(patched(sm.model("0")))
    rows = {row.path: row for row in after.rows}
    second = rows["1_convolution"]
    assert second.accelerated
    assert (second.kind, second.paths, second.weight_numel, second.mul) == ("IrrepsConvolution", 3, 7, (4, 2, 1))
    assert "by eqaccel.MatrixProduct" in rows["1_convolution.weight_nn"].note
    assert "RadialBasis, but for its cutoff" in rows["edge_embedding"].note
    for name in ("edge_embedding.spherical.sph", "0_self_connection_intro.linear", "reduce_hidden_to_energy.linear"):
        assert rows[name].accelerated
    assert "on a GPU" in rows["0_equivariant_gate.gate"].note
    assert after.accelerated == 15


def test_what_is_not_known_is_left_and_named() -> None:
    """Its activation is a scripted function, which torch cannot copy."""
    cutoff = {"cutoff_function_name": "poly_cut", "poly_cut_p_value": 1}
    options = {"use_bias_in_linear": True, "act_radial": "ssp", "cutoff_function": cutoff}
    model = sm.model.__wrapped__("omni", "float64", **options)
    expected = sm.outputs(model, sm.data(model))["inferred_force"]
    assert_close(sm.outputs(patch(model), sm.data(model))["inferred_force"], expected)
    rows = {row.path: row for row in report(model).rows}
    assert rows["0_self_interaction_1.linear"].note == "left: it has biases"
    assert rows["edge_embedding"].note == "left: no kernel for a cutoff of power 1"
    assert rows["0_convolution"].accelerated


def _accelerated(name: str) -> Callable[[Model], None]:
    """Puts what SevenNet's switches put there in place of the last convolution, of a class named as the library's."""

    def change(model: Model) -> None:
        conv = model._modules["1_convolution"]
        fused = IrrepsScatterGatterFusedConvolution.from_irreps_convolution(conv)
        fused.convolution = type(name, (torch.nn.Module,), {})()
        model.replace_module("1_convolution", fused)

    return change


def _other_product(name: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model._modules["1_convolution"].convolution = type(name, (torch.nn.Module,), {})()

    return change


def _own_forward(model: Model) -> None:
    conv = model._modules["1_convolution"]
    conv.__class__ = type("MyConvolution", (type(conv),), {"forward": lambda self, data: data})


def _parallel(model: Model) -> None:
    model._modules["1_convolution"].is_parallel = True


def _wrong_mode(model: Model) -> None:
    take_other_mode(model._modules["1_convolution"].convolution)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_accelerated("uvu_TP"), AlreadyPatchedError, r"FlashTP \(enable_flash\)"),
        (_accelerated("OEQConvolution"), AlreadyPatchedError, r"OpenEquivariance \(enable_oeq\)"),
        (_accelerated("cueq_fused_scatter_channelwise_conv"), AlreadyPatchedError, r"cuEquivariance \(enable_cueq\)"),
        (_other_product("ChannelWiseTensorProduct"), AlreadyPatchedError, r"cuEquivariance \(enable_cueq\)"),
        (
            _accelerated("Unknown"),
            PatchError,
            r"got that of sevenn\.nn\.convolution\.IrrepsScatterGatterFusedConvolution;",
        ),
        (_other_product("Unknown"), PatchError, "e3nn TensorProduct, got Unknown"),
        (_own_forward, PatchError, rf"got that of {__name__}\.MyConvolution;"),
        (_parallel, PatchError, "several processes of LAMMPS"),
        (_wrong_mode, PatchError, "weight_numel"),
    ],
)
def test_refusals_change_nothing(change: Callable[[Model], None], error: type[Exception], message: str) -> None:
    model = sm.model("0")
    change(model)
    assert_refused(model, "1_convolution", error, message)


def test_other_refusals() -> None:
    with pytest.raises(AlreadyPatchedError, match="unpatch"):
        patch(patched(sm.model("0")))
    parts = build_E3_equivariant_model(sm.configuration("0"), parallel=True)
    with pytest.raises(PatchError, match="several processes of LAMMPS"):
        patch(parts)


def test_verification_restores_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sm.model("omni")
    monkeypatch.setattr(convolution, "TensorProductConv", Wrong)
    with pytest.raises(VerificationError, match=r"by \d\.\d+e[+-]\d+ where at most \d\.\d+e[+-]\d+"):
        patch(model)
    assert report(model).accelerated == 0
    assert not any(module._forward_hooks for module in model.modules())
