"""Compiling ahead: what `warmup` finds in a model, that nothing is left to compile, and what it refuses."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest
import torch

import eqaccel
from eqaccel import (
    TensorProduct,
    TensorProductConv,
    TensorProductSpec,
    runtime,
    warmup,
)
from eqaccel.errors import CompileError, WarmupError
from eqaccel.testing import random_operands

FIRST = TensorProductSpec.channelwise("3x0e", "0e+1o", "0e+1o")
SECOND = TensorProductSpec.channelwise("3x0e+3x1o", "0e+1o", "0e+1o")


pytestmark = pytest.mark.usefixtures("cache_folder")


class Layers(torch.nn.Module):
    """A model with three convolutions, of which two are alike, and a parameter that sets its dtype."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=dtype))
        self.first = TensorProductConv(FIRST)
        self.second = torch.nn.ModuleList([TensorProductConv(SECOND), TensorProductConv(SECOND)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def keys(result: object) -> list[tuple[str, str, torch.dtype, str]]:
    return [(k.name, k.direction, k.dtype, k.device) for k in result.kernels]


def test_every_kernel_of_a_model_once(device: torch.device, dtype: torch.dtype) -> None:
    model = Layers(dtype).to(device)
    result = warmup(model)
    label = "cpu" if device.type == "cpu" else "cuda:0"
    names = ("first", "second.0, second.1")
    assert keys(result) == [(name, d, dtype, label) for name in names for d in ("forward", "backward")]
    assert result.compiled == 4
    assert not any(kernel.cached for kernel in result.kernels)
    assert 0 < max(kernel.seconds for kernel in result.kernels) <= result.seconds

    again = warmup(model)
    assert keys(again) == keys(result)
    assert again.compiled == 0
    assert all(kernel.cached for kernel in again.kernels)


def test_nothing_is_left_to_do(device: torch.device) -> None:
    spec = TensorProductSpec.channelwise("7x0e", "0e+1o", "0e+1o")  # compiled nowhere else
    o = random_operands(spec, 4, 9, device=device, dtype=torch.float32)
    module = TensorProductConv(spec).to(device)
    warmup(module, directions=("forward", "backward", "double_backward"))
    before = runtime.cache_stats()
    x = o.x.requires_grad_()
    (gx,) = torch.autograd.grad(module(x, o.y, o.w, o.edge_index).square().sum(), x, create_graph=True)
    gx.square().sum().backward()
    assert runtime.cache_stats() == before, "kernels are loaded: neither compiled nor looked up"


def test_choices() -> None:
    module = TensorProduct(FIRST)
    default = warmup(module)
    assert {kernel.dtype for kernel in default.kernels} == {torch.get_default_dtype()}
    assert {kernel.name for kernel in default.kernels} == {"TensorProduct"}
    one = warmup(module, directions="double_backward", dtypes=torch.float64, devices="cpu")
    assert keys(one) == [("TensorProduct", "double_backward", torch.float64, "cpu")]
    both = warmup(module, directions=["forward"], dtypes=[torch.float32, torch.float64, torch.float32])
    assert [kernel.dtype for kernel in both.kernels] == [torch.float32, torch.float64]
    table = str(both).splitlines()
    assert table[0].startswith("1 of 2 kernels compiled in ")
    assert table[1].split() == ["kernel", "direction", "dtype", "device", "seconds"]
    assert table[2].split()[:4] == ["TensorProduct", "forward", "float32", "cpu"]
    assert table[2].endswith("cached")
    assert table[3].endswith("compiled")


@pytest.mark.skipif(runtime.locate_nvrtc() is None, reason="the nvidia-cuda-nvrtc package is not installed")
def test_architectures_need_no_gpu() -> None:
    result = warmup(TensorProduct(FIRST), directions="forward", devices=["sm_80", "sm_90", "cpu"])
    assert [(kernel.device, kernel.cached) for kernel in result.kernels] == [
        ("sm_80", False),
        ("sm_90", False),
        ("cpu", False),
    ]


@pytest.mark.parametrize("wrap", [torch.jit.script, torch.compile], ids=["script", "compile"])
def test_scripted_and_compiled_modules(wrap) -> None:
    names = {kernel.name.removeprefix("_orig_mod") for kernel in warmup(wrap(TensorProduct(FIRST))).kernels}
    assert len(names) == 1


def test_calculator() -> None:
    calculator = types.SimpleNamespace(models=[Layers(torch.float32), Layers(torch.float64)])
    result = warmup(calculator, directions="forward")
    assert [kernel.name for kernel in result.kernels] == [
        "models.0.first",
        "models.0.second.0, models.0.second.1",
        "models.1.first",
        "models.1.second.0, models.1.second.1",
    ]
    assert [kernel.dtype for kernel in result.kernels] == [torch.float32] * 2 + [torch.float64] * 2


def test_patched_mace() -> None:
    pytest.importorskip("mace")
    import mace_models

    model = mace_models.energy_model(dtype=torch.float32)
    with pytest.raises(WarmupError, match=r"eqaccel\.patch"):
        warmup(model)
    result = warmup(eqaccel.patch(model, verify=False))
    contraction = "products.{}.symmetric_contractions.contractions.{}.eqaccel.polynomial"
    names = ["spherical_harmonics.eqaccel", *(f"interactions.{number}.conv_tp.eqaccel" for number in (0, 1))]
    names += [f"{contraction.format(0, 0)}, {contraction.format(1, 0)}", contraction.format(0, 1)]
    others = (eqaccel.Linear, eqaccel.MatrixProduct, eqaccel.RadialBasis, eqaccel.RadialLayer, eqaccel.ScaledSilu)
    maps = {name for name, module in model.named_modules() if isinstance(module, others)}
    warmed = {name for kernel in result.kernels for name in kernel.name.split(", ")}
    assert maps < warmed
    found = [(kernel.name, kernel.direction) for kernel in result.kernels if kernel.name.split(", ")[0] not in maps]
    assert found == [(name, direction) for name in names for direction in ("forward", "backward")]
    assert {kernel.dtype for kernel in result.kernels} == {torch.float32}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core compiles one kernel at a time")
def test_kernels_compile_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    command = " ".join(runtime.host_compiler()["command"])
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || sleep 2\nexec {command} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("EQACCEL_CXX", str(compiler))
    result = warmup(TensorProduct(FIRST))
    assert result.seconds < 0.9 * sum(kernel.seconds for kernel in result.kernels)


def test_errors_of_the_compiler_come_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "c++ 99" || exit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("EQACCEL_CXX", str(compiler))
    with pytest.raises(CompileError, match="host compiler failed"):
        warmup(Layers())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"model": torch.nn.Linear(2, 2)}, r"model: .* got none in Linear; eqaccel\.patch"),
        ({"model": object()}, "model: expected a torch.nn.Module or an ASE calculator .*, got object"),
        ({"model": types.SimpleNamespace(models=[1])}, "model: expected a torch.nn.Module"),
        (
            {"directions": "sideways"},
            "directions: expected some of forward, backward, double_backward, triple_backward, got 'sideways'",
        ),
        ({"directions": ()}, "model: expected at least one"),
        ({"dtypes": torch.float16}, "dtypes: expected torch.float32 or torch.float64, got torch.float16"),
        ({"dtypes": "float32"}, "dtypes: expected torch.float32 or torch.float64, got 'float32'"),
        ({"model": Layers(torch.bfloat16)}, "dtypes: .* got torch.bfloat16"),
        ({"devices": "tpu"}, "devices: expected 'cpu', .* got 'tpu'"),
        ({"devices": "meta"}, "devices: expected 'cpu', .* got 'meta'"),
        ({"devices": "cuda:99"}, "devices: expected one of .* GPUs .*, got 'cuda:99'"),
    ],
)
def test_refusals(choices: dict[str, object], message: str) -> None:
    with pytest.raises(WarmupError, match=message):
        warmup(**{"model": TensorProduct(FIRST)} | choices)
