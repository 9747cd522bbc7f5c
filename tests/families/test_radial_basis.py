"""eqaccel.ops.RadialBasis: values and derivatives against a reference of more digits, and what operators owe torch."""

from __future__ import annotations

from pathlib import Path

import mpmath
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

from eqaccel import warmup
from eqaccel.codegen import COMMON, Direction
from eqaccel.errors import OperandError, SpecError
from eqaccel.families.radial_basis import RadialBasisSpec, execute_radial_basis, radial_payload
from eqaccel.ops import RadialBasis

# Lengths and factors that float32 holds exactly.
SPECS = {
    "mace": RadialBasisSpec(8, 6.0, 5, 0.5, is_undefined_at_zero=True),
    "nequip": RadialBasisSpec(8, 1.0, 6, 0.25, 3.1),
    "steep": RadialBasisSpec(3, 4.5, 12),
    "lowest power": RadialBasisSpec(5, 2.5, 2),
    "no cutoff": RadialBasisSpec(4, 5.0, 0),
    "one": RadialBasisSpec(1, 5.0, 3),
    "cutoff": RadialBasisSpec(0, 6.0, 5),
}
_Tensors = list[torch.Tensor]


def operands(spec: RadialBasisSpec, rows: int, device: torch.device, dtype: torch.dtype) -> _Tensors:
    """x, w, gz and the tangents a and c: lengths from next to nothing to beyond the cutoff, on both sides of it."""
    generator = torch.Generator().manual_seed(rows)
    lengths = 1.2 * spec.r_max * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    special = [1e-12, 1e-3, spec.r_max * (1 - 1e-6), spec.r_max, spec.r_max * (1 + 1e-6)]
    lengths[: len(special), 0] = torch.tensor(special, dtype=torch.float64)[:rows]
    n = torch.arange(1, spec.num_basis + 1, dtype=torch.float64)
    w = n * (3.1 / spec.r_max / spec.unit) * (1 + 0.01 * torch.rand(spec.num_basis, generator=generator))
    rest = [torch.randn(rows, size, generator=generator, dtype=torch.float64) for size in (spec.num_outputs, 1)]
    c = torch.randn(spec.num_basis, generator=generator, dtype=torch.float64)
    return [value.to(device, dtype).requires_grad_() for value in (lengths, w, *rest, c)]


def results(module: RadialBasis, tensors: _Tensors) -> dict[Direction, dict[str, torch.Tensor]]:
    """z and all first and second derivatives, of frequencies too if there are any."""
    x, w, gz, a, c = tensors
    z = module(x, w)
    inputs, tangents = ((x, w), (a, c)) if len(w) else ((x,), (a,))
    first = grad(z, inputs, gz, create_graph=True)
    second = grad(first, (gz, *inputs), tangents)
    return {
        Direction.FORWARD: {"z": z},
        Direction.BACKWARD: dict(zip(("gx", "gw"), first, strict=False)),
        Direction.DOUBLE_BACKWARD: dict(zip(("z", "gx", "gw"), second, strict=False)),
    }


def assert_matches(spec: RadialBasisSpec, module: RadialBasis, tensors: _Tensors) -> None:
    """Compares all results with the reference in extended precision, within what rounding may do."""
    x, w, gz, a, c = (t.detach().double().cpu().numpy().astype(np.longdouble) for t in tensors)
    given = {"x": x, "w": w, "gz": gz, "a": a, "c": np.broadcast_to(c, (len(x), len(c)))}
    # Sine or cosine has 3 roundings, and so has each of the at most two divisions or products behind it; the cutoff has
    # two for each power and six besides; three products and a sum of six terms follow, and a sum over functions. Rows
    # are added up in float64, or in pairs.
    roundings = 3 + 2 * 3 + 2 * spec.power + 6 + 3 + 6 + spec.num_basis
    eps, tiny = torch.finfo(tensors[0].dtype).eps, torch.finfo(tensors[0].dtype).tiny
    for direction, outputs in results(module, tensors).items():
        names = {"forward": ("x", "w"), "backward": ("x", "w", "gz")}.get(direction.value, tuple(given))
        chosen = {name: given[name] for name in names}
        right, absolute = (execute_radial_basis(spec, direction, **chosen, absolute=flag) for flag in (False, True))
        for name, value in outputs.items():
            expected, scale = getattr(right, name), getattr(absolute, name)
            bound = roundings * eps * scale + tiny  # powers of the smallest length are no numbers of the dtype
            if name == "gw":
                expected, bound = expected.sum(0), bound.sum(0) + len(x) * eps * scale.sum(0)
            error = np.abs(value.detach().double().cpu().numpy() - expected)
            assert (error <= bound).all(), (direction, name, float((error / bound).max()))


@pytest.mark.parametrize("rows", [1, 37, 300])
@pytest.mark.parametrize("name", SPECS)
def test_values_and_derivatives(name: str, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    assert_matches(spec, RadialBasis(spec).to(device), operands(spec, rows, device, dtype))


@pytest.mark.parametrize("name", SPECS)
def test_the_reference(name: str) -> None:
    """Against the functions as they are written down, differentiated numerically with many digits."""
    spec = SPECS[name]
    x, w, *_ = (t.detach().double().numpy() for t in operands(spec, 12, torch.device("cpu"), torch.float64))
    ones = np.ones((len(x), spec.num_outputs))
    first = execute_radial_basis(spec, Direction.BACKWARD, x, w, gz=ones)
    second = execute_radial_basis(
        spec, Direction.DOUBLE_BACKWARD, x, w, gz=ones, a=np.ones((len(x), 1)), c=np.zeros_like(ones[:, : len(w)])
    )
    value = execute_radial_basis(spec, Direction.FORWARD, x, w).z
    scale = execute_radial_basis(spec, Direction.FORWARD, x, w, absolute=True).z
    with mpmath.workdps(40):

        def function(r: mpmath.mpf, k: float | None) -> mpmath.mpf:
            if spec.power and r >= spec.r_max:
                return mpmath.mpf(0)
            p, y = spec.power, r / mpmath.mpf(spec.r_max)
            cutoff = 1 - (p + 1) * (p + 2) * y**p / 2 + p * (p + 2) * y ** (p + 1) - p * (p + 1) * y ** (p + 2) / 2
            wave = 1 if k is None else mpmath.sin(mpmath.mpf(spec.unit) * mpmath.mpf(k) * r) / r
            return spec.factor * wave * (cutoff if p else 1)

        for row, length in enumerate(x[:, 0]):
            if abs(length - spec.r_max) < 1e-9 or length < 1e-9:  # numerical differences would reach across
                continue
            frequencies = [float(k) for k in w] or [None]
            for n, k in enumerate(frequencies):
                expected = function(mpmath.mpf(float(length)), k)
                angle = spec.unit * (k or 0.0) * length  # whose rounding counts in float64
                assert abs(float(expected) - value[row, n]) <= (40 + angle) * 2e-16 * max(scale[row, n], 1e-300) + (
                    2e-16 * angle / length
                )
            step = {"h": mpmath.mpf(10) ** -15}
            for order, found in ((1, first.gx[row, 0]), (2, second.gx[row, 0])):
                total = sum(
                    mpmath.diff(lambda r, k=k: function(r, k), float(length), order, **step) for k in frequencies
                )
                size = max(1.0, float(sum(abs(spec.unit * (k or 1.0)) for k in frequencies))) ** (order + 1)
                assert abs(float(total) - found) <= 1e-11 * size * max(1.0, spec.power / spec.r_max) ** 2


def test_zero_from_the_cutoff_on(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["mace"]
    tensors = operands(spec, 4, device, dtype)
    beyond = torch.tensor([[6.0], [6.5], [1e8], [torch.inf]], device=device, dtype=dtype).requires_grad_()
    found = results(RadialBasis(spec).to(device), [beyond, *tensors[1:]])
    assert all(bool((value == 0).all()) for outputs in found.values() for value in outputs.values())


def test_digits_stay_close_to_the_cutoff(device: torch.device, dtype: torch.dtype) -> None:
    """The usual form of the cutoff subtracts numbers of size twenty there; ours is right to a few units each."""
    spec = SPECS["cutoff"]
    steps = 2.0 ** -torch.arange(1, 12, dtype=torch.float64)
    x = (spec.r_max * (1 - steps)).to(dtype).double().view(-1, 1)
    value = RadialBasis(spec).to(device)(x.to(device, dtype), torch.empty(0, device=device, dtype=dtype))
    exact = execute_radial_basis(spec, Direction.FORWARD, x.numpy().astype(np.longdouble), np.empty(0)).z
    bound = (2 * spec.power + 8) * torch.finfo(dtype).eps
    assert (np.abs(value.double().cpu().numpy() - exact) <= bound * np.abs(exact)).all()


def test_what_is_no_number(device: torch.device, dtype: torch.dtype) -> None:
    nan = torch.tensor([[torch.nan]], device=device, dtype=dtype)
    zero = torch.zeros_like(nan)
    for name, spec in SPECS.items():
        module = RadialBasis(spec).to(device)
        w = operands(spec, 1, device, dtype)[1]
        assert bool(module(nan, w).isnan().all())
        at_zero = module(zero, w)
        limit = spec.factor * spec.unit * w.double() if len(w) else spec.factor * torch.ones_like(at_zero)
        if name == "mace":
            assert bool(at_zero.isnan().all())
        else:
            assert bool(((at_zero - limit).abs() <= 4 * torch.finfo(dtype).eps * limit).all())
        slope = zero.clone().requires_grad_()
        assert name == "mace" or float(grad(module(slope, w).sum(), slope)[0]) == 0


def test_no_rows(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["mace"]
    found = results(RadialBasis(spec).to(device), operands(spec, 0, device, dtype))
    shapes = [[tuple(value.shape) for value in outputs.values()] for outputs in found.values()]
    assert shapes == [[(0, 8)], [(0, 1), (8,)], [(0, 8), (0, 1), (8,)]]


def test_operands_of_any_stride_and_offset(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["mace"]
    tensors = operands(spec, 40, device, dtype)
    strided = [torch.stack([t.detach(), t.detach()], -1)[..., 0].requires_grad_() for t in tensors]
    shifted = [torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view_as(t).requires_grad_() for t in tensors]
    for variant in (strided, shifted):
        assert_matches(spec, RadialBasis(spec).to(device), variant)


@pytest.mark.parametrize("name", ["nequip", "no cutoff", "cutoff"])
def test_derivatives_of_any_order(name: str, device: torch.device) -> None:
    spec = SPECS[name]
    module = RadialBasis(spec).to(device)
    x = (spec.r_max * torch.tensor([[0.2], [0.7]], dtype=torch.float64, device=device)).requires_grad_()
    w = operands(spec, 1, device, torch.float64)[1]
    inputs = (x, w) if len(w) else (x,)

    def first(*values: torch.Tensor) -> torch.Tensor:
        return module(values[0], values[1] if len(values) > 1 else w)

    def second(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        slopes = grad(first(*values).square().sum(), values, create_graph=True)
        return grad(sum(g.square().sum() for g in slopes), values, create_graph=True)

    assert gradcheck(first, inputs, check_forward_ad=True)
    assert gradgradcheck(first, inputs)
    assert gradcheck(second, inputs)
    assert gradgradcheck(second, inputs)


def test_repeats_bitwise_in_any_company(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["mace"]
    module = RadialBasis(spec).to(device)

    def run(chosen: slice) -> _Tensors:
        x, w, gz, a, _ = operands(spec, 200, device, dtype)
        x, gz, a = (t.detach()[chosen].requires_grad_() for t in (x, gz, a))
        z = module(x, w)
        first = grad(z, x, gz, create_graph=True)
        return [z, *first, *grad(first, (gz, x), (a,))]

    assert_rows_stand_alone(run)


def test_opcheck(device: torch.device) -> None:
    spec = SPECS["nequip"]
    module = RadialBasis(spec).to(device)
    x, w, gz, a, c = operands(spec, 4, device, torch.float64)
    rest = (spec.factor, spec.r_max, spec.unit, spec.power)
    ops = torch.ops.eqaccel
    torch.library.opcheck(ops.radial_basis.default, (module.payload, module.key, x, w, *rest))
    for of_w in (False, True):
        torch.library.opcheck(ops.radial_basis_backward.default, (module.payload, module.key, gz, x, w, *rest, of_w))
        torch.library.opcheck(
            ops.radial_basis_double_backward.default, (module.payload, module.key, gz, x, w, a, c, *rest, of_w)
        )


def test_derivatives_of_any_order_are_traced(device: torch.device) -> None:
    spec = SPECS["nequip"]
    module = RadialBasis(spec).to(device)
    x, w, *_ = operands(spec, 7, device, torch.float64)

    def third(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        inner = module(x, w).square().sum()
        for _ in range(3):
            inner = sum(g.square().sum() for g in grad(inner, (x, w), create_graph=True))
        return inner.detach()

    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(third, tracing_mode=mode, _allow_non_fake_inputs=True)(x[1:], w)
        rows = slice(2, 7) if mode == "symbolic" else slice(1, 7)
        torch.testing.assert_close(traced(x[rows], w), third(x[rows], w))


def test_copies_and_wrappers(device: torch.device) -> None:
    module = RadialBasis(SPECS["mace"]).to(device)
    x, w, *_ = operands(module.spec, 9, device, torch.float32)
    expected = module(x, w)
    assert not module.state_dict()
    for other in forms(module):
        assert torch.equal(other(x, w), expected)
        for variable in (x, w):
            assert torch.equal(grad(other(x, w).sum(), variable)[0], grad(module(x, w).sum(), variable)[0])
    assert module.to("meta")(x.to("meta"), w.to("meta")).shape == (9, 8)


def test_torch_func(device: torch.device) -> None:
    module = RadialBasis(SPECS["nequip"]).to(device)
    x, w, *_ = (t.detach() for t in operands(module.spec, 6, device, torch.float64))
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: module(row.view(1, 1), w)[0]))(x[:, 0])
    forward = torch.func.vmap(torch.func.jacfwd(lambda row: module(row.view(1, 1), w)[0]))(x[:, 0])
    torch.testing.assert_close(jacobian, forward)
    assert jacobian.shape == (6, 8)


def test_autocast_keeps_single_precision(device: torch.device) -> None:
    module = RadialBasis(SPECS["mace"]).to(device)
    x, w, *_ = operands(module.spec, 9, device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(module(x.bfloat16(), w), module(x.bfloat16().float(), w))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x[:, 0], w), r"'x' must have shape \(rows, 1\)"),
        (lambda x, w: (x.expand(5, 2), w), r"'x' must have shape \(5, 1\), got \[5, 2\]"),
        (lambda x, w: (x, w[1:]), r"'w' must have shape \(8\), got \[7\]"),
        (lambda x, w: (x, w.double()), r"'w' must be Float"),
        (lambda x, w: (x.half(), w.half()), "'x' must be float32 or float64"),
    ],
)
def test_operands_that_do_not_fit(change, message: str, device: torch.device) -> None:
    module = RadialBasis(SPECS["mace"]).to(device)
    x, w, *_ = operands(module.spec, 5, device, torch.float32)
    with pytest.raises(OperandError, match=message):
        module(*change(x, w))
    with pytest.raises(RuntimeError, match=message):
        torch.jit.script(module)(*change(x, w))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((-1, 5.0, 5), "num_basis: expected 0 or more, got -1"),
        ((8, 5.0, 1), "power: expected 2 or more, or 0 for no cutoff, got 1"),
        ((8, 0.0, 5), "r_max: expected a positive number, got 0.0"),
        ((8, 5.0, 5, float("inf")), "factor: expected a finite number, got inf"),
        ((8, 5.0, 5, 1.0, float("nan")), "unit: expected a finite number, got nan"),
        ((0, 5.0, 0), "there is nothing to compute"),
    ],
)
def test_specs_that_make_no_sense(numbers: tuple[float, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RadialBasisSpec(*numbers)


@pytest.mark.parametrize("direction", COMMON)
def test_wrong_kernels_are_refused(direction: Direction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path))
    content = radial_payload(SPECS["mace"])[0]
    assert_wrong_kernels_are_refused(content, direction, lambda body: body.replace("factor = 0.5", "factor = 0.51"))


def test_warmup(device: torch.device) -> None:
    module = RadialBasis(SPECS["one"]).to(device)
    result = warmup(module, directions=("forward", "double_backward"), dtypes=torch.float64)
    assert [(k.direction, k.dtype) for k in result.kernels] == [
        (d, torch.float64) for d in ("forward", "double_backward")
    ]


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_cuda_kernels_compile(arch: str) -> None:
    for name in ("mace", "cutoff"):
        for _, _, used in cuda_resources(radial_payload(SPECS[name])[0], COMMON, arch):
            assert used["eq_rows"]["spill_store_bytes"] == used["eq_rows"]["stack_bytes"] == 0


@needs_hipcc
@pytest.mark.parametrize("direction", COMMON)
def test_hip_text_compiles(direction: Direction, tmp_path: Path) -> None:
    assert_hip_text_compiles(radial_payload(SPECS["mace"])[0], direction, tmp_path)
