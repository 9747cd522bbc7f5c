"""eqaccel.ops.ScaledSilu: values and derivatives against a reference of more digits, and what operators owe torch."""

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

from eqaccel.codegen import COMMON, Direction
from eqaccel.errors import OperandError, SpecError
from eqaccel.families.silu import SiluSpec, execute_silu, silu_payload
from eqaccel.ops import ScaledSilu

SPEC = SiluSpec(1.6791767, 0.25)


def operands(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, gz and the tangent a: arguments from where SiLU is a line to where it is zero."""
    generator = torch.Generator().manual_seed(1)
    x, gz, a = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    x = x * 10 ** (4 * torch.rand(shape, generator=generator, dtype=torch.float64) - 2)
    return [t.to(device, dtype).requires_grad_() for t in (x, gz, a)]


def results(module: ScaledSilu, tensors: list[torch.Tensor]) -> dict[Direction, dict[str, torch.Tensor]]:
    x, gz, a = tensors
    z = module(x)
    first = grad(z, x, gz, create_graph=True)
    second = grad(first, (gz, x), a)
    return {
        Direction.FORWARD: {"z": z},
        Direction.BACKWARD: {"gx": first[0]},
        Direction.DOUBLE_BACKWARD: dict(zip(("z", "gx"), second, strict=True)),
    }


def assert_matches(spec: SiluSpec, module: ScaledSilu, tensors: list[torch.Tensor]) -> None:
    x, gz, a = (t.detach().double().cpu().numpy().astype(np.longdouble) for t in tensors)
    given = {"x": x, "gz": gz, "a": a}
    # The argument is rounded, and its exponential has 2 roundings besides; the logistic function has 2, what is made of
    # it 6, and factors 2. An argument y that is off by one part in 1/eps changes its exponential by y of these.
    eps, tiny = torch.finfo(tensors[0].dtype).eps, torch.finfo(tensors[0].dtype).tiny
    roundings = 13 + np.abs(spec.scale * x)
    for direction, outputs in results(module, tensors).items():
        names = {"forward": ("x",), "backward": ("x", "gz")}.get(direction.value, ("x", "gz", "a"))
        chosen = {name: given[name] for name in names}
        right, absolute = (execute_silu(spec, direction, **chosen, absolute=flag) for flag in (False, True))
        for name, value in outputs.items():
            error = np.abs(value.detach().double().cpu().numpy() - getattr(right, name))
            # Where SiLU is below the smallest number, it is some such number times its argument.
            least = 64 * tiny * (1 + np.abs(x)) ** 2 * (1 + np.abs(gz)) * (1 + np.abs(a))
            assert (error <= roundings * eps * getattr(absolute, name) + least).all(), (direction, name)


@pytest.mark.parametrize("shape", [(1,), (37, 3), (64, 64), (5, 3, 2), (0, 64)], ids=str)
def test_values_and_derivatives(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
    for spec in (SPEC, SiluSpec(), SiluSpec(-2.0, -3.0)):
        assert_matches(spec, ScaledSilu(spec).to(device), operands(shape, device, dtype))


def test_torchs_own(device: torch.device) -> None:
    x, *_ = operands((50, 4), device, torch.float64)
    torch.testing.assert_close(ScaledSilu(SiluSpec()).to(device)(x), torch.nn.functional.silu(x))


def test_operands_of_any_stride_and_offset(device: torch.device, dtype: torch.dtype) -> None:
    tensors = operands((40, 7), device, dtype)
    strided = [t.detach().t().contiguous().t().requires_grad_() for t in tensors]
    shifted = [torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view_as(t).requires_grad_() for t in tensors]
    for variant in (strided, shifted):
        assert_matches(SPEC, ScaledSilu(SPEC).to(device), variant)


def test_what_is_no_number(device: torch.device, dtype: torch.dtype) -> None:
    module = ScaledSilu(SPEC).to(device)
    x = torch.tensor([torch.nan, torch.inf, -1e30, 1e30, 0.0], device=device, dtype=dtype).requires_grad_()
    z = module(x)
    (slope,) = grad(z.sum(), x)
    assert bool(z[0].isnan())
    assert float(z[1]) == torch.inf
    assert bool((z[2] <= 0) & (z[2] > -1))
    assert float(z[4]) == 0
    assert bool(slope[0].isnan())
    assert float(slope[2]) == pytest.approx(0, abs=1)
    assert float(slope[4]) == pytest.approx(0.5 * SPEC.factor * SPEC.scale, rel=4 * torch.finfo(dtype).eps)


def test_derivatives_of_any_order(device: torch.device) -> None:
    module = ScaledSilu(SPEC).to(device)
    x = torch.tensor([[-3.0, 0.0, 0.7]], dtype=torch.float64, device=device, requires_grad=True)

    def second(x: torch.Tensor) -> torch.Tensor:
        (slope,) = grad(module(x).square().sum(), x, create_graph=True)
        return grad(slope.square().sum(), x, create_graph=True)[0]

    assert gradcheck(module, x, check_forward_ad=True)
    assert gradgradcheck(module, x)
    assert gradcheck(second, x)
    assert gradgradcheck(second, x)
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(second, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
        torch.testing.assert_close(traced(x), second(x))


def test_repeats_bitwise(device: torch.device, dtype: torch.dtype) -> None:
    module = ScaledSilu(SPEC).to(device)
    tensors = operands((33, 3), device, dtype)

    def run(chosen: slice) -> list[torch.Tensor]:
        found = results(module, [t.detach()[chosen].requires_grad_() for t in tensors])
        return [value for outputs in found.values() for value in outputs.values()]

    assert_rows_stand_alone(run, 33)


def test_opcheck(device: torch.device) -> None:
    module = ScaledSilu(SPEC).to(device)
    x, gz, a = operands((4, 3), device, torch.float64)
    rest, ops = (SPEC.factor, SPEC.scale), torch.ops.eqaccel
    torch.library.opcheck(ops.silu.default, (module.payload, module.key, x, *rest))
    torch.library.opcheck(ops.silu_backward.default, (module.payload, module.key, gz, x, *rest))
    torch.library.opcheck(ops.silu_double_backward.default, (module.payload, module.key, gz, x, a, *rest))


def test_copies_and_wrappers(device: torch.device) -> None:
    module = ScaledSilu(SPEC).to(device)
    x, *_ = operands((9, 5), device, torch.float32)
    expected = module(x)
    assert not module.state_dict()
    for other in forms(module):
        assert torch.equal(other(x), expected)
        assert torch.equal(grad(other(x).sum(), x)[0], grad(module(x).sum(), x)[0])
    assert torch.equal(torch.func.vmap(module)(x), expected)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(module(x.bfloat16()), module(x.bfloat16().float()))
    assert module.to("meta")(x.to("meta")).shape == (9, 5)


def test_what_does_not_fit(device: torch.device) -> None:
    module = ScaledSilu(SPEC).to(device)
    with pytest.raises(OperandError, match="'x' must be float32 or float64"):
        module(torch.ones(3, device=device, dtype=torch.float16))
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match=r"'gz' must have shape \[3\], like 'x', got \[4\]"):
        torch.ops.eqaccel.silu_backward(module.payload, module.key, torch.ones(4, device=device), x, 1.0, 1.0)
    with pytest.raises(SpecError, match="scale: expected a finite number, got nan"):
        SiluSpec(1.0, float("nan"))


@pytest.mark.parametrize("direction", COMMON)
def test_wrong_kernels_are_refused(direction: Direction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path))
    content = silu_payload(SPEC)[0]
    assert_wrong_kernels_are_refused(content, direction, lambda body: body.replace("scale = 0.25", "scale = 0.251"))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_cuda_kernels_compile(arch: str) -> None:
    for _, _, used in cuda_resources(silu_payload(SPEC)[0], COMMON, arch):
        assert used["eq_rows"]["spill_store_bytes"] == used["eq_rows"]["stack_bytes"] == 0


@needs_hipcc
@pytest.mark.parametrize("direction", COMMON)
def test_hip_text_compiles(direction: Direction, tmp_path: Path) -> None:
    assert_hip_text_compiles(silu_payload(SPEC)[0], direction, tmp_path)
