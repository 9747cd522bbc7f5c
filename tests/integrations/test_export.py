"""Exported MACE models: the numbers of the model they came from, on any structure, with and without ghosts."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import hosts
import mace_models as mm
from export_checks import assert_close, assert_ghosts, assert_moves_to_a_gpu, forces, with_ghosts
from ghosts import Images
from mace.modules import MACE, NonLinearBiasReadoutBlock

import eqaccel
from eqaccel.errors import ExportError, OperandError
from eqaccel.ops import library_path
from eqaccel.targets import host_target

pytestmark = pytest.mark.filterwarnings("ignore")

NON_LINEAR = "RealAgnosticResidualNonLinearInteractionBlock"
KINDS: dict[str, dict[str, Any]] = {
    "agnostic": {"interaction": "RealAgnosticInteractionBlock", "cls": MACE},
    "residual": {},
    "three layers": {"num_interactions": 3, "pair_repulsion": True, "distance_transform": "Agnesi"},
    "density": {"interaction": "RealAgnosticDensityInteractionBlock", "apply_cutoff": False},
    "density residual": {
        "interaction": "RealAgnosticDensityResidualInteractionBlock",
        "use_last_readout_only": True,
    },
    "non-linear": {"interaction": NON_LINEAR, "use_agnostic_product": True, "apply_cutoff": False},
}


CPU = torch.device("cpu")


def _model(kind: str, device: torch.device = CPU) -> torch.nn.Module:
    return mm.energy_model(**KINDS[kind]).to(device)


def patched(kind: str = "residual", device: torch.device = CPU) -> torch.nn.Module:
    return eqaccel.patch(_model(kind, device), verify=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The file of a kind of model whose tensors are on a device; each is written once."""
    folder = tmp_path_factory.mktemp("written")

    @functools.cache
    def file(kind: str = "residual", device: torch.device = CPU) -> Path:
        eqaccel.export(patched(kind, device), folder / f"{kind} {device.type}.pt", verify=False)
        return folder / f"{kind} {device.type}.pt"

    return file


@pytest.fixture
def file(written: Callable[..., Path]) -> Path:
    return written()


@pytest.fixture
def placed(written: Callable[..., Path], device: torch.device) -> Path:
    """A file whose tensors are on the device."""
    return written(device=device)


def on(device: torch.device, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(device) for tensor in tensors)


def arguments(model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Vectors, edges and types of the test structures, where the model is."""
    batch = mm.batch(model)
    senders, receivers = batch["edge_index"]
    vectors = batch["positions"][receivers] - batch["positions"][senders] + batch["shifts"]
    return vectors.detach(), batch["edge_index"], batch["node_attrs"].argmax(dim=1)


def crystal(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Which edges belong to the crystal, the first of the test structures, and its volume."""
    batch = mm.batch(model)
    return batch["batch"][batch["edge_index"][1]] == 0, torch.linalg.det(batch["cell"][:3]).abs()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind: str, device: torch.device, tmp_path: Path) -> None:
    """Equal to the unpatched model, on structures of other sizes than those that the file was checked on."""
    assert eqaccel.export(patched(kind, device), tmp_path / "model.pt")["device"] == device.type
    loaded = eqaccel.load_exported(tmp_path / "model.pt")
    plain = _model(kind, device)
    with mm.default_dtype(torch.float64):  # MACE's pair repulsion depends on it
        wanted = plain(mm.batch(plain), compute_stress=True)
    vectors, edge_index, types = arguments(plain)
    edges, volume = crystal(plain)
    for _ in range(2):  # TorchScript profiles, then specialises
        energies, gradient = loaded(vectors, edge_index, types)
        assert energies.device.type == gradient.device.type == device.type
        assert_close(energies, wanted["node_energy"].detach())
        assert_close(forces(gradient, edge_index, len(types)), wanted["forces"])
        virial = vectors[edges].T @ gradient[edges]
        assert_close((virial + virial.T) / (2 * volume), wanted["stress"][0])
    assert loaded.metadata["exchange_widths"] == [32] * (len(plain.interactions) - 1)


@pytest.mark.parametrize("kind", ["agnostic", "three layers", "density residual", "non-linear"])
def test_ghosts(kind: str, device: torch.device, written: Callable[..., Path]) -> None:
    assert_ghosts(eqaccel.load_exported(written(kind, device)), arguments(_model(kind, device)))


def test_a_rank_without_atoms_takes_part(placed: Path, device: torch.device) -> None:
    loaded, nobody = eqaccel.load_exported(placed), Images([])
    vectors, edge_index, types = on(device, (*nothing(), torch.zeros(0, dtype=torch.int64)))
    energies, gradient = loaded(vectors, edge_index, types, 0, nobody.handle)
    assert energies.shape == (0,)
    assert gradient.shape == (0, 3)
    assert nobody.calls == [("forward", 32), ("reverse", 32)]


def nothing() -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors and index of no edges."""
    return torch.zeros(0, 3, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.int64)


def test_isolated_atoms(placed: Path, device: torch.device) -> None:
    loaded, images = eqaccel.load_exported(placed), Images([])
    energies, gradient = loaded(*on(device, (*nothing(), torch.tensor([0, 2]))), 2, images.handle)
    assert torch.isfinite(energies).all()
    assert gradient.shape == (0, 3)
    assert images.calls == [("forward", 32), ("reverse", 32)]


def test_heads(device: torch.device, tmp_path: Path) -> None:
    with mm.default_dtype(torch.float64):
        energies = torch.tensor([[-3.0, -2.0, -1.0], [-1.0, -1.5, -4.0]]).numpy()
    plain = mm.energy_model(
        heads=["first", "second"],
        atomic_energies=energies,
        atomic_inter_scale=[1.1, 0.9],
        atomic_inter_shift=[0.1, -0.2],
        readout_cls=NonLinearBiasReadoutBlock,
    ).to(device)
    model = eqaccel.patch(copy.deepcopy(plain), verify=False)
    with pytest.raises(ExportError, match="head: expected one of 'first', 'second', got None"):
        eqaccel.export(model, tmp_path / "model.pt")
    vectors, edge_index, types = arguments(plain)
    for number, head in enumerate(plain.heads):
        eqaccel.export(model, tmp_path / "model.pt", head=head)
        batch = mm.batch(plain)
        batch["head"] = torch.full_like(batch["head"], number)
        loaded = eqaccel.load_exported(tmp_path / "model.pt")
        assert loaded.metadata["head"] == head
        assert_close(loaded(vectors, edge_index, types)[0], plain(batch)["node_energy"].detach())


def test_single_precision(device: torch.device, tmp_path: Path) -> None:
    model = patched(device=device)
    metadata = eqaccel.export(model, tmp_path / "model.pt", dtype="float32")
    assert metadata["dtype"] == "float32"
    assert next(model.parameters()).dtype == torch.float64
    vectors, edge_index, types = arguments(model)
    loaded = eqaccel.load_exported(tmp_path / "model.pt")
    energies, gradient = loaded(vectors.float(), edge_index, types)
    assert (energies.dtype, gradient.dtype) == (torch.float64, torch.float32)
    wanted = model(mm.batch(model))
    eps = torch.finfo(torch.float32).eps
    assert_close(energies, wanted["node_energy"].detach(), 256 * eps)
    assert_close(forces(gradient, edge_index, len(types)).double(), wanted["forces"], 4096 * eps)


def test_energies_of_isolated_atoms_keep_their_digits(device: torch.device, tmp_path: Path) -> None:
    """A float32 file of a model of all electrons: what float32 rounds is the rest, a few eV."""
    constants = torch.tensor([-13.605693, -10345.123456789, -20042.987654321], dtype=torch.float64)
    model = mm.energy_model(atomic_energies=constants.numpy()).to(device)
    eqaccel.export(eqaccel.patch(copy.deepcopy(model), verify=False), tmp_path / "model.pt", dtype="float32")
    vectors, edge_index, types = arguments(model)
    energies, _ = eqaccel.load_exported(tmp_path / "model.pt")(vectors.float(), edge_index, types)
    of_atoms = constants.to(device)[types]
    wanted = model(mm.batch(model))["node_energy"].detach() - of_atoms
    assert_close(energies - of_atoms, wanted, 256 * torch.finfo(torch.float32).eps)
    lost = (of_atoms.float().double() - of_atoms).abs().max()
    assert lost > 256 * torch.finfo(torch.float32).eps * wanted.abs().max()  # or there is nothing to keep


def _precompiled_target(device: torch.device) -> str:
    if device.type == "cpu":
        return host_target().name
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def test_precompiled_files_need_no_compiler(device: torch.device, tmp_path: Path) -> None:
    """Nor do they fill a cache. The same program stops at a file that holds no kernels."""
    model = eqaccel.patch(mm.energy_model(**mm.TINY).to(device), verify=False).float()
    target = _precompiled_target(device)
    eqaccel.export(model, tmp_path / "bare.pt", verify=False)
    eqaccel.export(model, tmp_path / "model.pt", precompile=[target])
    whole = arguments(model)
    expected = eqaccel.load_exported(tmp_path / "model.pt")(*whole)
    torch.save((whole, expected), tmp_path / "whole.pt")
    script = f"""
import sys, torch, eqaccel
whole, expected = torch.load("whole.pt")
loaded = eqaccel.load_exported(sys.argv[1])
assert loaded.metadata["precompiled"] == [{target!r}] or sys.argv[1] == "bare.pt"
with torch.jit.optimized_execution(False):
    assert all(torch.equal(a, b) for a, b in zip(loaded(*whole), expected))
"""
    # Not even by chance: a library that is not NVRTC stands in for it.
    environment = {"EQACCEL_CXX": "/nonexistent", "EQACCEL_NVRTC": str(library_path())}
    environment["EQACCEL_CACHE_DIR"] = str(tmp_path / "cache")

    def run(file: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", script, file]
        return subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True)

    done = run("model.pt")
    assert done.returncode == 0, done.stderr
    kept = [path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert set(kept) <= {".ok"}, "nothing was compiled; what was checked is remembered"
    done = run("bare.pt")
    assert done.returncode != 0
    assert ("/nonexistent" if device.type == "cpu" else "it has no function nvrtc") in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_on_the_cpu(kind: str, written: Callable[..., Path]) -> None:
    assert_moves_to_a_gpu(eqaccel.load_exported(written(kind)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("made_for", "opened_on"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_files_move_between_devices(kind: str, made_for: str, opened_on: str, tmp_path: Path) -> None:
    """The model stays where it is."""
    model = patched(kind)
    metadata = eqaccel.export(model, tmp_path / "model.pt", device=made_for)
    assert metadata["device"] == made_for
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    whole = arguments(model)
    here, there = (eqaccel.load_exported(tmp_path / "model.pt", device=name) for name in (made_for, opened_on))
    assert there.metadata["device"] == opened_on
    tensors = (*there.module.parameters(), *there.module.buffers())
    assert {tensor.device.type for tensor in tensors} == {opened_on}
    for value, wanted in zip(
        there(*on(torch.device(opened_on), whole)), here(*on(torch.device(made_for), whole)), strict=True
    ):
        assert value.device.type == opened_on
        assert_close(value.cpu(), wanted.cpu())


@pytest.mark.gpu
def test_packages_are_for_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"device: expected 'cpu' for format 'aotinductor', got 'cuda:0'; pass"):
        eqaccel.export(patched(device=torch.device("cuda", 0)), tmp_path / "model.pt2", "aotinductor")
    assert not list(tmp_path.iterdir())


def test_metadata(file: Path) -> None:
    metadata = eqaccel.load_exported(file).metadata
    assert metadata | {"versions": 0, "kernels": 0} == {
        "format": 2,
        "kind": "torchscript",
        "family": "mace",
        "head": "Default",
        "cutoff": mm.CUTOFF,
        "type_names": ["H", "C", "O"],
        "dtype": "float64",
        "device": "cpu",
        "units": {"energy": "eV", "length": "angstrom"},
        "exchange_widths": [32],
        "precompiled": [],
        "versions": 0,
        "kernels": 0,
    }
    assert metadata["versions"]["torch"] == torch.__version__
    assert len(metadata["kernels"]) == 2


def test_the_model_is_left_alone(tmp_path: Path) -> None:
    model = patched()
    kinds = [(name, type(module)) for name, module in model.named_modules()]
    state = copy.deepcopy(model.state_dict())
    flags = [p.requires_grad for p in model.parameters()]
    eqaccel.export(model, tmp_path / "other.pt", dtype=torch.float32)
    assert [(name, type(module)) for name, module in model.named_modules()] == kinds
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert torch.get_default_dtype() == torch.float32
    assert [path.name for path in tmp_path.iterdir()] == ["other.pt"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_any_mode(mode: Any, tmp_path: Path) -> None:
    model = patched()
    with mode():
        eqaccel.export(model, tmp_path / "model.pt")
        loaded = eqaccel.load_exported(tmp_path / "model.pt")
    energies, _ = loaded(*arguments(model))
    assert_close(energies, model(mm.batch(model))["node_energy"].detach())


def test_a_model_that_is_not_patched(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"interactions.0.conv_tp = TensorProduct; call eqaccel.patch\(model\) first"):
        eqaccel.export(_model("residual"), tmp_path / "model.pt")


def test_a_model_that_can_not_be_scripted(tmp_path: Path) -> None:
    model = eqaccel.patch(mm.energy_model("RealAgnosticAttResidualInteractionBlock"), verify=False)
    with pytest.raises(ExportError, match=r"interactions.0 \(RealAgnosticAttResidualInteractionBlock\) cannot be"):
        eqaccel.export(model, tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["readouts.0.linear", "interactions.0.conv_tp_weights.layer0"])
def test_weights_that_parametrizations_make(path: str, tmp_path: Path) -> None:
    """TorchScript reads them, and raises only when it computes."""
    model = patched()
    layer = model.get_submodule(path)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    with pytest.raises(ExportError, match="cannot be scripted: parametrizations make its weight"):
        eqaccel.export(model, tmp_path / "model.pt", verify=False)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    eqaccel.export(model, tmp_path / "model.pt")


def test_a_model_with_a_forward_of_its_own(tmp_path: Path) -> None:
    model = patched()
    model.__class__ = type("Doubled", (type(model),), {"forward": _doubled})
    with pytest.raises(ExportError, match="but Doubled has a forward method of its own; use the model from Python"):
        eqaccel.export(model, tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def _doubled(self: torch.nn.Module, *arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
    outputs = super(type(self), self).forward(*arguments, **options)
    return outputs | {name: 2 * outputs[name] for name in ("node_energy", "forces")}


def _foreign_target() -> str:
    return "cpu-avx2" if host_target().name == "cpu-neon" else "cpu-neon"


def _mixed() -> torch.nn.Module:
    model = patched()
    readout = model.readouts[0].linear
    readout.weight = torch.nn.Parameter(readout.weight.to("meta"))
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (patched, {"format": "onnx"}, "format: expected 'torchscript' or 'aotinductor', got 'onnx'"),
        (patched, {"format": "aotinductor"}, "path: expected a name that ends in '.pt2' .*, got 'model.pt'"),
        (patched, {"dtype": torch.float16}, "dtype: expected torch.float32 or torch.float64, got torch.float16"),
        (lambda: patched().half(), {}, "dtype: .* got a model in torch.float16"),
        (patched, {"device": "tpu"}, "device: expected 'cpu' or 'cuda', got 'tpu'"),
        (patched, {"precompile": "sm_90"}, "precompile: expected a list of cpu-avx512, .*, got 'sm_90'"),
        (patched, {"precompile": ["sm_90", "h100"]}, "precompile: .* got 'h100'"),
        (
            patched,
            {"precompile": [_foreign_target()]},
            f"precompile: no kernel for {_foreign_target()}: .* of this machine",
        ),
        (patched, {"head": "other"}, "head: expected one of 'Default', got 'other'"),
        (patched, {"path": "missing/model.pt"}, "path: expected the name of a file in an existing folder"),
        (patched, {"path": "."}, "path: .* got a folder"),
        (_mixed, {}, "model: expected all of its tensors on one device, got cpu, meta"),
        (lambda: torch.nn.Linear(2, 2), {}, "model: expected a model of a kind that can be exported .*, got Linear"),
        (lambda: torch.jit.script(torch.nn.Linear(2, 2)), {}, "model: expected the Python model, got a scripted one"),
        (mm.dipole_model, {}, "got AtomicDipolesMACE"),
    ],
)
def test_bad_arguments(model: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    name = options.pop("path", "model.pt")
    with pytest.raises(ExportError, match=message):
        eqaccel.export(model(), tmp_path / name, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_no_gpu(file: Path) -> None:
    with pytest.raises(ExportError, match="device: expected 'cpu', because this machine has no GPU"):
        eqaccel.export(patched(), file, device="cuda")
    with pytest.raises(ExportError, match=r"device: .* is to run on a GPU, and torch finds none"):
        eqaccel.load_exported(file, device="cuda")


def test_a_device_that_is_none(file: Path) -> None:
    with pytest.raises(ExportError, match="device: expected 'cpu' or 'cuda', got 'tpu'"):
        eqaccel.load_exported(file, device="tpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v, e, t: (v[:, :2], e, t), r"vectors: expected shape \(num_edges, 3\), got \[\d+, 2\]"),
        (lambda v, e, t: (v.float(), e, t), "vectors: expected float64"),
        (lambda v, e, t: (v, e[:, 1:], t), r"edge_index: expected shape \(2, \d+\), got \[2, \d+\]"),
        (lambda v, e, t: (v, e, t[None]), r"types: expected shape \(num_nodes,\)"),
        (lambda v, e, t: (v, e, t, len(t) + 1), "num_local: expected 0 to 12"),
        (lambda v, e, t: (v, e, t, len(t) - 1), "'handle' is 0, which means that there are no ghosts"),
    ],
)
def test_bad_operands(change: Any, message: str, file: Path) -> None:
    loaded = eqaccel.load_exported(file)
    with pytest.raises(Exception, match=message):
        loaded(*change(*arguments(_model("residual"))))


@pytest.mark.slow
def test_cpp_host(written: Callable[..., Path], tmp_path: Path) -> None:
    """A C++ program without Python opens a file and exchanges ghosts."""
    file, whole = written("three layers"), arguments(_model("three layers"))
    *rest, images = with_ghosts(*whole)
    operands = torch.nn.Module()
    for name, tensor in zip(("vectors", "edge_index", "types", "owner"), (*rest[:3], images.owner), strict=True):
        operands.register_buffer(name, tensor)
    torch.jit.script(operands).save(tmp_path / "operands.pt")
    program = hosts.build("exported.cpp", tmp_path)
    printed = hosts.run(program, library_path(), file, tmp_path / "operands.pt")
    for values, wanted in zip(printed, eqaccel.load_exported(file)(*whole), strict=True):
        assert_close(torch.tensor(values, dtype=torch.float64), wanted.flatten())


@pytest.mark.slow
def test_aotinductor(tmp_path: Path) -> None:
    """One compilation serves every number of atoms and edges."""
    plain = mm.energy_model(**mm.TINY)
    path = tmp_path / "model.pt2"
    with torch._inductor.config.patch("aot_inductor.precompile_headers", False):  # one package is built faster without
        eqaccel.export(eqaccel.patch(copy.deepcopy(plain), verify=False), path, "aotinductor")
    loaded = eqaccel.load_exported(path)
    assert loaded.metadata["kind"] == "aotinductor"
    wanted = plain(mm.batch(plain))
    vectors, edge_index, types = arguments(plain)
    energies, gradient = loaded(vectors, edge_index, types)
    assert_close(energies, wanted["node_energy"].detach())
    assert_close(forces(gradient, edge_index, len(types)), wanted["forces"])
    with pytest.raises(OperandError, match="num_local: an AOTInductor package needs all atoms to be local"):
        loaded(vectors, edge_index, types, len(types) - 1)
    with pytest.raises(OperandError, match=r"vectors: expected torch.float64 on cpu, got torch.float32"):
        loaded(vectors.float(), edge_index, types)


def test_every_call_gives_the_same_bits(tmp_path: Path) -> None:
    """TorchScript may specialise a program after its first calls."""
    plain = mm.energy_model(mm.INTERACTIONS[2])
    path = tmp_path / "model.pt"
    eqaccel.export(eqaccel.patch(copy.deepcopy(plain), verify=False), path, verify=False)
    loaded = eqaccel.load_exported(path)
    first, *others = [loaded(*arguments(plain)) for _ in range(4)]
    assert all(torch.equal(value, wanted) for other in others for value, wanted in zip(other, first, strict=True))


def test_a_program_without_the_operators_says_what_to_load(file: Path) -> None:
    script = f"import torch; torch.jit.load({str(file)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "Unknown builtin op: eqaccel::exchange" in done.stderr
    assert "Load libeqaccel_ops before this file: `python -m eqaccel libs` says where it is." in done.stderr
