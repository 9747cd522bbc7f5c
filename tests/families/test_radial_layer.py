"""eqaccel.ops.RadialLayer: values and derivatives against a reference of more digits, and what operators owe torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from family_checks import (
    assert_hip_text_compiles,
    assert_rows_stand_alone,
    assert_wrong_kernels_are_refused,
    cuda_resources,
    forms,
)
from hosts import needs_hipcc, needs_nvrtc
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from eqaccel.codegen import Direction
from eqaccel.errors import OperandError, SpecError
from eqaccel.families.radial_layer import RadialLayerSpec, execute_radial_layer, radial_layer_payload
from eqaccel.ops import RadialLayer

SPECS = {
    "mace": RadialLayerSpec(8, 64, 1.6791767, 0.3535),
    "nequip": RadialLayerSpec(8, 128, 1.0, -0.5),
    "one": RadialLayerSpec(1, 4),
    "ragged": RadialLayerSpec(5, 36, -1.5, 0.7),
    "wide": RadialLayerSpec(16, 256, 1.5, 0.25),
    "narrow": RadialLayerSpec(13, 12, 1.0, 2.0),
}
DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD)


def operands(spec: RadialLayerSpec, rows: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, w and gz."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, spec.num_inputs), (spec.num_inputs, spec.num_outputs), (rows, spec.num_outputs)]
    x, w, gz = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    x = x * 10 ** (2 * torch.rand(rows, 1, generator=generator, dtype=torch.float64) - 1)
    return [t.to(device, dtype).requires_grad_() for t in (x, w, gz)]


def assert_matches(spec: RadialLayerSpec, module: RadialLayer, tensors: list[torch.Tensor]) -> None:
    x, w, gz = (t.detach().double().cpu().numpy().astype(np.longdouble) for t in tensors)
    z = module(tensors[0], tensors[1])
    (gx,) = grad(z, tensors[0], tensors[2])
    # A sum of products is off by as many roundings as there are products, its activation by that and what SiLU is off
    # by (test_silu.py); gx is a sum over outputs besides.
    eps, tiny = torch.finfo(tensors[0].dtype).eps, torch.finfo(tensors[0].dtype).tiny
    size = abs(spec.scale) * (np.abs(x) @ np.abs(w))
    roundings = 16 + spec.num_inputs + size.max(axis=1, initial=0.0)[:, None]
    for direction, value in zip(DIRECTIONS, (z, gx), strict=True):
        given = {"gz": gz} if direction is Direction.BACKWARD else {}
        right, absolute = (execute_radial_layer(spec, direction, x, w, **given, absolute=flag) for flag in (0, 1))
        name, sums = ("gx", spec.num_outputs) if given else ("z", 0)
        error = np.abs(value.detach().double().cpu().numpy() - getattr(right, name))
        bound = (roundings + sums) * eps * getattr(absolute, name) + 64 * tiny * (1 + size.max(initial=0.0)) ** 2
        assert (error <= bound).all(), direction


@pytest.mark.parametrize("rows", [0, 1, 37, 300])
@pytest.mark.parametrize("name", SPECS)
def test_values_and_gradients(name: str, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    assert_matches(SPECS[name], RadialLayer(SPECS[name]).to(device), operands(SPECS[name], rows, device, dtype))


def test_operands_of_any_stride_and_offset(device: torch.device, dtype: torch.dtype) -> None:
    tensors = operands(SPECS["ragged"], 40, device, dtype)
    strided = [t.detach().t().contiguous().t().requires_grad_() for t in tensors]
    shifted = [torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view_as(t).requires_grad_() for t in tensors]
    for variant in (strided, shifted):
        assert_matches(SPECS["ragged"], RadialLayer(SPECS["ragged"]).to(device), variant)


def test_what_is_no_number_stays_in_its_row(device: torch.device, dtype: torch.dtype) -> None:
    x, w, _ = (t.detach() for t in operands(SPECS["mace"], 20, device, dtype))
    x[3, 2] = torch.nan
    z = RadialLayer(SPECS["mace"]).to(device)(x, w)
    assert z.isnan().all(1).nonzero().flatten().tolist() == [3]


def test_derivatives_of_any_order(device: torch.device) -> None:
    module = RadialLayer(SPECS["one"]).to(device)
    x, w, _ = operands(SPECS["one"], 3, device, torch.float64)

    def second(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        slopes = grad(module(x, w).square().sum(), (x, w), create_graph=True)
        return grad(sum(slope.square().sum() for slope in slopes), (x, w), create_graph=True)

    assert gradcheck(module, (x, w), check_forward_ad=True)
    assert gradgradcheck(module, (x, w))
    assert gradcheck(second, (x, w))
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(second, tracing_mode=mode, _allow_non_fake_inputs=True)(x, w)
        torch.testing.assert_close(traced(x, w), second(x, w))


def test_repeats_bitwise(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["nequip"]
    module, (x, w, gz) = RadialLayer(spec).to(device), operands(spec, 133, device, dtype)

    def run(chosen: slice) -> list[torch.Tensor]:
        rows = x.detach()[chosen].requires_grad_()
        z = module(rows, w)
        return [z, *grad(z, rows, gz[chosen])]

    assert_rows_stand_alone(run, 133)


def test_opcheck(device: torch.device) -> None:
    module = RadialLayer(SPECS["ragged"]).to(device)
    x, w, gz = operands(SPECS["ragged"], 4, device, torch.float64)
    rest, ops = (module.factor, module.scale), torch.ops.eqaccel
    torch.library.opcheck(ops.radial_layer.default, (module.payload, module.key, x, w, *rest))
    torch.library.opcheck(ops.radial_layer_backward.default, (module.payload, module.key, gz, x, w, *rest))


def test_copies_and_wrappers(device: torch.device) -> None:
    module = RadialLayer(SPECS["mace"]).to(device)
    x, w, _ = operands(SPECS["mace"], 9, device, torch.float32)
    expected = module(x, w)
    assert not module.state_dict()
    for other in forms(module):
        assert torch.equal(other(x, w), expected)
        assert torch.equal(grad(other(x, w).sum(), x)[0], grad(module(x, w).sum(), x)[0])
    assert torch.equal(torch.func.vmap(module, (0, None))(x[:, None], w)[:, 0], expected)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(module(x.bfloat16(), w), module(x.bfloat16().float(), w))
    assert module.to("meta")(x.to("meta"), w.to("meta")).shape == expected.shape


def test_what_does_not_fit(device: torch.device) -> None:
    module = RadialLayer(SPECS["mace"]).to(device)
    x, w, _ = (t.detach() for t in operands(SPECS["mace"], 3, device, torch.float32))
    with pytest.raises(OperandError, match="'x' must be float32 or float64"):
        module(x.half(), w.half())
    with pytest.raises(OperandError, match=r"'x' must have shape \(3, 8\), got \[3, 5\]"):
        module(x[:, :5], w)
    with pytest.raises(OperandError, match=r"'w' must have shape \(8, 64\), got \[64, 8\]"):
        module(x, w.t())
    with pytest.raises(RuntimeError, match=r"'gz' must have shape \(3, 64\), got \[3, 8\]"):
        torch.ops.eqaccel.radial_layer_backward(module.payload, module.key, x, x, w, 1.0, 1.0)
    for wrong, message in (
        ((17, 64), "num_inputs: expected 1 to 16, got 17"),
        ((8, 6), "num_outputs: expected a multiple of 4 up to 256, got 6"),
        ((8, 64, float("inf")), "factor: expected a finite number, got inf"),
    ):
        with pytest.raises(SpecError, match=message):
            RadialLayerSpec(*wrong)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_wrong_kernels_are_refused(direction: Direction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path))
    content = radial_layer_payload(SPECS["wide"])[0]
    assert_wrong_kernels_are_refused(content, direction, lambda body: body.replace("scale = 0.25", "scale = 0.251"))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_cuda_kernels_compile(arch: str) -> None:
    for name in ("mace", "nequip"):
        for _, _, used in cuda_resources(radial_layer_payload(SPECS[name])[0], DIRECTIONS, arch):
            assert used["eq_rows"]["spill_store_bytes"] == used["eq_rows"]["stack_bytes"] == 0


@needs_hipcc
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_hip_text_compiles(direction: Direction, tmp_path: Path) -> None:
    assert_hip_text_compiles(radial_layer_payload(SPECS["ragged"])[0], direction, tmp_path)
