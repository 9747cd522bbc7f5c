"""eqaccel.ops.Gate: values and derivatives against a reference of more digits, and what operators owe torch."""

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
from eqaccel.families.gate import Activation, GatedChannels, GateSpec, Scalars, execute_gate, gate_payload
from eqaccel.ops import Gate

SILU, TANH = Activation("silu", 1.6791767), Activation("tanh", -1.5925374)
SPECS = {
    "mixed": GateSpec(  # parts in another order than columns, and counts that fill no SIMD vector
        (Scalars(4, 9, SILU), Scalars(0, 4, TANH)),
        (GatedChannels(13, 3, TANH, 24, 5), GatedChannels(16, 2, SILU, 18, 3)),
    ),
    "wide": GateSpec.of_irreps(17, "16x1o+3x2e", SILU),
    "scalars": GateSpec.of_irreps(8, "", TANH),
    "gates": GateSpec.of_irreps(0, "3x1o", SILU),
    **{kind: GateSpec.of_irreps(5, "3x1o", Activation(kind, 0.7)) for kind in ("sigmoid", "ssp", "abs")},
}


def operands(spec: GateSpec, rows: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, gz and the tangent a: scalars from where activations are lines to where they are zero."""
    generator = torch.Generator().manual_seed(1)
    widths = (spec.num_inputs, spec.num_outputs, spec.num_inputs)
    x, gz, a = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for width in widths)
    x = x * 10 ** (3 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 2)
    return [t.to(device, dtype).requires_grad_() for t in (x, gz, a)]


def results(module: Gate, tensors: list[torch.Tensor]) -> dict[Direction, dict[str, torch.Tensor]]:
    x, gz, a = tensors
    z = module(x)
    first = grad(z, x, gz, create_graph=True)
    second = grad(first, (gz, x), a)
    return {
        Direction.FORWARD: {"z": z},
        Direction.BACKWARD: {"gx": first[0]},
        Direction.DOUBLE_BACKWARD: dict(zip(("z", "gx"), second, strict=True)),
    }


def assert_matches(spec: GateSpec, module: Gate, tensors: list[torch.Tensor]) -> None:
    x, gz, a = (t.detach().double().cpu().numpy().astype(np.longdouble) for t in tensors)
    given = {"x": x, "gz": gz, "a": a}
    # As for SiLU (test_silu.py), of the argument of the logistic function, which is 2 x for the hyperbolic tangent; and
    # a sum over components is off by as many as it has.
    eps, tiny = torch.finfo(tensors[0].dtype).eps, torch.finfo(tensors[0].dtype).tiny
    dims = max((part.dim for part in spec.gated), default=1)
    roundings = 13 + dims + 2 * np.abs(x).max(initial=0.0)
    size = (1 + np.abs(x).max(initial=0.0)) ** 2 * (1 + np.abs(gz).max(initial=0.0)) * (1 + np.abs(a).max(initial=0.0))
    for direction, outputs in results(module, tensors).items():
        names = {"forward": ("x",), "backward": ("x", "gz")}.get(direction.value, ("x", "gz", "a"))
        chosen = {name: given[name] for name in names}
        right, absolute = (execute_gate(spec, direction, **chosen, absolute=flag) for flag in (False, True))
        for name, value in outputs.items():
            error = np.abs(value.detach().double().cpu().numpy() - getattr(right, name))
            bound = roundings * eps * getattr(absolute, name) + 64 * tiny * size
            assert (error <= bound).all(), (direction, name, (error / bound).max())


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("name", SPECS)
def test_values_and_derivatives(name: str, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    assert_matches(SPECS[name], Gate(SPECS[name]).to(device), operands(SPECS[name], rows, device, dtype))


def test_torchs_own(device: torch.device) -> None:
    functions = {
        "silu": torch.nn.functional.silu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "ssp": lambda x: torch.nn.functional.softplus(x) - np.log(2.0),
        "abs": torch.abs,
    }
    for kind, function in functions.items():
        spec = GateSpec.of_irreps(2, "2x1o", Activation(kind))
        x, *_ = operands(spec, 50, device, torch.float64)
        channels = x[:, 4:].view(-1, 2, 3) * function(x[:, 2:4])[..., None]
        expected = torch.cat([function(x[:, :2]), channels.flatten(1)], 1)
        torch.testing.assert_close(Gate(spec).to(device)(x), expected)


def test_operands_of_any_stride_and_offset(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["mixed"]
    tensors = operands(spec, 40, device, dtype)
    strided = [t.detach().t().contiguous().t().requires_grad_() for t in tensors]
    shifted = [torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view_as(t).requires_grad_() for t in tensors]
    for variant in (strided, shifted):
        assert_matches(spec, Gate(spec).to(device), variant)


def test_what_is_no_number_stays_in_its_channel(device: torch.device, dtype: torch.dtype) -> None:
    spec = GateSpec.of_irreps(2, "2x1o", SILU)
    x = torch.ones(2, spec.num_inputs, device=device, dtype=dtype)
    x[0, 0], x[0, 2], x[1, 4] = torch.nan, torch.nan, torch.inf
    z = Gate(spec).to(device)(x)
    assert z[0].isnan().tolist() == [True, False, True, True, True, False, False, False]
    assert z[1].isfinite().tolist() == [True, True, False, True, True, True, True, True]


def test_derivatives_of_any_order(device: torch.device) -> None:
    spec = SPECS["mixed"]
    module = Gate(spec).to(device)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, spec.num_inputs, generator=generator, dtype=torch.float64).to(device).requires_grad_()

    def second(x: torch.Tensor) -> torch.Tensor:
        (slope,) = grad(module(x).square().sum(), x, create_graph=True)
        return grad(slope.square().sum(), x, create_graph=True)[0]

    assert gradcheck(module, x, check_forward_ad=True)
    assert gradgradcheck(module, x)
    assert gradcheck(second, x)
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(second, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
        torch.testing.assert_close(traced(x), second(x))


@pytest.mark.parametrize("kind", ["sigmoid", "ssp"])
def test_third_derivatives_of_other_activations(kind: str, device: torch.device) -> None:
    module = Gate(SPECS[kind]).to(device)
    x, gz, a = operands(SPECS[kind], 2, device, torch.float64)
    ops, rest = torch.ops.eqaccel, (module.payload, module.key)

    def second(gz: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(ops.gate_double_backward(*rest, gz, x, a, module.parts))

    assert gradcheck(second, (gz, x.detach().clamp(-3, 3).requires_grad_(), a))


def test_repeats_bitwise(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["mixed"]
    module, tensors = Gate(spec).to(device), operands(spec, 33, device, dtype)

    def run(chosen: slice) -> list[torch.Tensor]:
        found = results(module, [t.detach()[chosen].requires_grad_() for t in tensors])
        return [value for outputs in found.values() for value in outputs.values()]

    assert_rows_stand_alone(run, 33)


def test_opcheck(device: torch.device) -> None:
    module = Gate(SPECS["mixed"]).to(device)
    x, gz, a = operands(SPECS["mixed"], 4, device, torch.float64)
    ops = torch.ops.eqaccel
    torch.library.opcheck(ops.gate.default, (module.payload, module.key, x, module.parts))
    torch.library.opcheck(ops.gate_backward.default, (module.payload, module.key, gz, x, module.parts))
    torch.library.opcheck(ops.gate_double_backward.default, (module.payload, module.key, gz, x, a, module.parts))


def test_copies_and_wrappers(device: torch.device) -> None:
    module = Gate(SPECS["wide"]).to(device)
    x, *_ = operands(SPECS["wide"], 9, device, torch.float32)
    expected = module(x)
    assert not module.state_dict()
    for other in forms(module):
        assert torch.equal(other(x), expected)
        assert torch.equal(grad(other(x).sum(), x)[0], grad(module(x).sum(), x)[0])
    assert torch.equal(torch.func.vmap(module)(x[:, None])[:, 0], expected)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(module(x.bfloat16()), module(x.bfloat16().float()))
    assert module.to("meta")(x.to("meta")).shape == expected.shape


def test_what_does_not_fit(device: torch.device) -> None:
    spec = SPECS["mixed"]
    module = Gate(spec).to(device)
    x = torch.ones(3, spec.num_inputs, device=device)
    with pytest.raises(OperandError, match="'x' must be float32 or float64"):
        module(x.half())
    with pytest.raises(OperandError, match=rf"'x' must have shape \(3, {spec.num_inputs}\), got \[3, 5\]"):
        module(x[:, :5])
    with pytest.raises(OperandError, match=rf"'x' must have shape \(rows, {spec.num_inputs}\), got"):
        module(x[0])
    rest = (module.payload, module.key)
    with pytest.raises(RuntimeError, match=rf"'gz' must have shape \(3, {spec.num_outputs}\), got"):
        torch.ops.eqaccel.gate_backward(*rest, x, x, module.parts)
    with pytest.raises(SpecError, match=r"activation: expected one of silu, .*, got 'relu'"):
        GateSpec.of_irreps(2, "", Activation("relu"))
    with pytest.raises(SpecError, match="factor: expected a finite number, got nan"):
        GateSpec.of_irreps(2, "", Activation("silu", float("nan")))
    with pytest.raises(SpecError, match="columns: expected each to be read once"):
        GateSpec((Scalars(0, 2, SILU), Scalars(1, 2, SILU)))
    with pytest.raises(SpecError, match="nothing to compute"):
        GateSpec(())


@pytest.mark.parametrize("direction", COMMON)
def test_wrong_kernels_are_refused(direction: Direction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path))
    content = gate_payload(SPECS["scalars"])[0]
    wrong = str(TANH.factor), str(TANH.factor * 1.01)
    assert_wrong_kernels_are_refused(content, direction, lambda body: body.replace(*wrong))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_cuda_kernels_compile(arch: str) -> None:
    for _, _, used in cuda_resources(gate_payload(SPECS["wide"])[0], COMMON, arch):
        assert used["eq_rows"]["spill_store_bytes"] == used["eq_rows"]["stack_bytes"] == 0


@needs_hipcc
@pytest.mark.parametrize("direction", COMMON)
def test_hip_text_compiles(direction: Direction, tmp_path: Path) -> None:
    assert_hip_text_compiles(gate_payload(SPECS["mixed"])[0], direction, tmp_path)
