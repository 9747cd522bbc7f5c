"""Fine-tuning, adapters and MACE's own tools do to patched models what they do to plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.mixing import SumCalculator
from e3nn import o3
from mace.calculators import MACECalculator
from mace.modules.lora import inject_LoRAs, merge_lora_weights
from mace.tools import AtomicNumberTable
from mace.tools.finetuning_utils import load_foundations_elements
from mace.tools.scripts_utils import extract_config_mace_model, extract_model, remove_pt_head
from patch_checks import RELATIVE, assert_close, assert_same_gradients, patched

from eqaccel import export, patch, report, unpatch, warmup
from eqaccel.errors import OperandError, PatchError
from eqaccel.ops import graph
from eqaccel.patches import dense
from eqaccel.patches.replacement import Replacement
from eqaccel.patches.torch_state import default_dtype

pytestmark = pytest.mark.filterwarnings("ignore")
Model = torch.nn.Module
FULL = {"compute_force": True, "compute_stress": True}


def everywhere(x: torch.Tensor) -> bool:
    """Stands in for `prefers_dense`, in TorchScript too."""
    return x.dim() > 0


@pytest.fixture(autouse=True)
def forms_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU too."""
    monkeypatch.setattr(dense, "prefers_dense", everywhere)
    with default_dtype(torch.float64):
        yield


def assert_alike(fast: Model, plain: Model, training: bool = False) -> None:
    """Energies and forces, and a training loss's gradients in everything that can be trained."""
    results = []
    for model in (plain, fast):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        outputs = model(mm.batch(model), training=training, **FULL)
        gradients = ()
        if training:
            loss = outputs["energy"].sum() + (outputs["forces"] ** 2).sum()
            gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        results.append((outputs, gradients, [name for name, _ in named]))
    (expected, wanted, names), (values, gradients, own) = results
    for name in ("energy", "forces", "stress"):
        assert_close(values[name], expected[name])
    assert own == names
    if training:
        assert_same_gradients(gradients, wanted)


def trained(model: Model) -> Model:
    """Adapters as a training leaves them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def inject_then_patch(model: Model) -> Model:
    return patch(inject_LoRAs(model))


def patch_then_inject(model: Model) -> Model:
    return inject_LoRAs(patch(model))


@pytest.mark.parametrize(
    ("order", "interaction"), [(inject_then_patch, mm.INTERACTIONS[5]), (patch_then_inject, mm.INTERACTIONS[1])]
)
def test_adapters(order: Callable[[Model], Model], interaction: str, tmp_path: Path) -> None:
    few_kernels = mm.TINY | {"hidden_irreps": "4x0e+4x1o"}
    torch.manual_seed(1)
    plain = inject_LoRAs(mm.energy_model(interaction, **few_kernels))
    torch.manual_seed(1)
    fast = order(mm.energy_model(interaction, **few_kernels))
    fast.load_state_dict(plain.state_dict())
    for model in (plain, fast):
        trained(model)
    assert sum("lora_" in name for name, _ in fast.named_parameters()) > 20
    assert_alike(fast, plain, training=True)
    for model in (plain, fast):
        model.eval()
    assert_alike(fast, plain)
    with torch.no_grad():
        values = [model(mm.batch(model), compute_force=False)["energy"] for model in (plain, fast)]
    assert_close(values[1], values[0])
    assert report(fast).accelerated >= 8
    merged = [merge_lora_weights(model, inplace=False) for model in (plain, fast)]
    assert any(isinstance(module, Replacement) for module in merged[1].modules())
    assert_alike(merged[1], merged[0], training=True)
    export(merged[1], tmp_path / "merged.pt")  # compares the file with the model
    unpatch(fast)
    assert not any(isinstance(module, Replacement) for module in fast.modules())
    assert_alike(fast, plain, training=True)


def test_a_patched_model_takes_the_weights_of_a_foundation_model() -> None:
    foundation = mm.energy_model(hidden_irreps="8x0e+8x1o")
    with torch.no_grad():
        for parameter in foundation.parameters():
            parameter *= 1.2
    plain, fast = mm.energy_model(), patched(mm.energy_model())
    for model, source in ((plain, foundation), (fast, patched(copy.deepcopy(foundation)))):
        load_foundations_elements(
            model, source, AtomicNumberTable(list(mm.ELEMENTS)), load_readout=True, max_L=1, default_dtype=torch.float64
        )
    assert [name for name, _ in fast.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(fast.state_dict().values(), plain.state_dict().values(), strict=True))
    assert_alike(fast, plain, training=True)
    assert_alike(unpatch(fast), plain)


def test_configurations_and_what_is_built_of_them() -> None:
    plain, fast = mm.energy_model(), patched(mm.energy_model())
    config, expected = extract_config_mace_model(fast), extract_config_mace_model(plain)
    assert config.keys() == expected.keys()
    assert str(config) == str(expected)
    rebuilt = extract_model(fast)
    assert type(rebuilt) is type(plain)
    assert report(rebuilt).accelerated == 0
    assert_alike(rebuilt, plain)


def test_heads_are_removed() -> None:
    heads = {"heads": ["pt_head", "own"], "atomic_energies": [[-1.0, -2.0, -3.0], [-2.0, -3.0, -4.0]]}
    heads |= {"atomic_inter_scale": [1.0, 1.2], "atomic_inter_shift": [0.0, 0.1], "MLP_irreps": o3.Irreps("16x0e")}
    plain, fast = mm.energy_model(**heads), patched(mm.energy_model(**heads))
    assert_alike(remove_pt_head(fast), remove_pt_head(plain))


def test_autocast_is_refused() -> None:
    fast = patched(mm.energy_model(dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(PatchError, match=r"ScaleShiftMACE: .* autocast"):
        fast(mm.batch(fast))


def test_layers_share_one_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    sorts, sort = [], graph._sort
    monkeypatch.setattr(graph, "_sort", lambda *arguments: sorts.append(1) or sort(*arguments))
    model = patched(mm.energy_model())
    model(mm.batch(model))
    assert len(model.interactions) == 2
    assert len(sorts) == 1


def test_inference_mode() -> None:
    plain, fast = mm.energy_model(), mm.energy_model()
    with torch.inference_mode():
        patch(fast)
    assert_alike(fast, plain, training=True)
    with torch.inference_mode():
        unpatch(fast)
    assert_alike(fast, plain, training=True)


def test_lists() -> None:
    models = [mm.energy_model(), mm.energy_model(mm.INTERACTIONS[2])]
    assert patch(models) is models
    rows = [row.path for row in report(models).rows if row.kind == "TensorProduct"]
    assert rows == [f"{model}.interactions.{layer}.conv_tp" for model in (0, 1) for layer in (0, 1)]
    assert any("1.interactions.0" in kernel.name for kernel in warmup(models[1:] + models[:1]).kernels)
    assert report(unpatch(models)).accelerated == 0
    with pytest.raises(PatchError, match=r"model\.1: expected a torch\.nn\.Module .*, got int"):
        patch([models[0], 3])
    assert report(models).accelerated == 0


class Dispersion(Calculator):
    """Stands for one without a model."""

    implemented_properties = ("energy", "forces")

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        self.results = {"energy": 0.5, "forces": 0.0 * atoms.positions}


def test_sums_of_calculators() -> None:
    atoms = mm.structures()[0]
    calculator = SumCalculator([MACECalculator(models=mm.energy_model(), device="cpu"), Dispersion()])
    atoms.calc = calculator
    energy = atoms.get_potential_energy()
    assert patch(calculator) is calculator
    assert "calcs.0.models.0.interactions.0.conv_tp" in [row.path for row in report(calculator).rows if row.accelerated]
    assert any("calcs.0.models.0." in kernel.name for kernel in warmup(calculator).kernels)
    calculator.atoms = calculator.mixer.calcs[0].atoms = None  # what they know already
    assert atoms.get_potential_energy() == pytest.approx(energy, rel=RELATIVE)
    assert report(unpatch(calculator)).accelerated == 0
    with pytest.raises(PatchError, match=r"expected a torch\.nn\.Module or an ASE calculator"):
        patch(SumCalculator([Dispersion()]))


def test_averaged_models_follow_a_patched_one() -> None:
    """MACE trains with them: torch goes through the buffers of the model and of its copy side by side."""
    model = patched(mm.energy_model())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert [name for name, _ in averaged.module.named_buffers()] == [name for name, _ in model.named_buffers()]
    for _ in range(2):
        averaged.update_parameters(model)
    assert_close(averaged(mm.batch(model), **FULL)["forces"], model(mm.batch(model), **FULL)["forces"])


def test_compiled_models_see_what_was_loaded() -> None:
    """Another cutoff, of which tables of the radial functions are made."""
    plain, fast = mm.energy_model(**mm.TINY), patched(mm.energy_model(**mm.TINY))
    other = mm.energy_model(**mm.TINY | {"r_max": 4.0})
    for model in (plain, fast):
        model.load_state_dict(other.state_dict())
    assert not any(part._made_from.is_doubted for part in fast.modules() if isinstance(part, Replacement))
    torch._dynamo.reset()
    compiled = torch.compile(fast, backend="eager")
    energy = compiled(mm.batch(plain), compute_force=False)["energy"]
    assert_close(energy, plain(mm.batch(plain), compute_force=False)["energy"])


def test_a_model_that_was_patched_without_values_has_no_kernels() -> None:
    plain = mm.energy_model(**mm.TINY)
    fast = patched(mm.energy_model(**mm.TINY).to("meta"))
    fast.load_state_dict(plain.state_dict(), assign=True)
    with pytest.raises(OperandError, match="has no kernels: make the module, or patch the model, when its weights are"):
        fast(mm.batch(plain))
    assert torch.equal(unpatch(fast)(mm.batch(plain))["energy"], plain(mm.batch(plain))["energy"])


def test_a_model_keeps_its_values() -> None:
    """Before any of them is lost."""
    plain = mm.energy_model(**mm.TINY)
    fast = patched(mm.energy_model(**mm.TINY))
    for leave in (lambda model: model.to("meta"), lambda model: model.to_empty(device="cpu")):
        with pytest.raises(PatchError, match="expected a function that keeps the values of tensors"):
            leave(fast)
    assert_close(fast(mm.batch(fast))["forces"], plain(mm.batch(plain))["forces"])
    with pytest.raises(PatchError, match="keeps the values"):
        patched(mm.energy_model(**mm.TINY).to("meta")).float().to("meta").to_empty(device="cpu")
    emptied = unpatch(fast).to("meta").to_empty(device="cpu")
    emptied.load_state_dict(plain.state_dict())
    assert_close(patched(emptied)(mm.batch(emptied))["forces"], plain(mm.batch(plain))["forces"])
