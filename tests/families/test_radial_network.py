"""eqaccel.ops.RadialNetwork: values and derivatives against a reference of more digits; what operators owe torch."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from family_checks import assert_rows_stand_alone, forms
from hosts import gpu_kernels, needs_nvrtc
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from eqaccel import families, runtime
from eqaccel.codegen import Direction
from eqaccel.errors import OperandError, SpecError
from eqaccel.families.radial_network import RadialNetworkSpec, execute_radial_network, radial_network_payload
from eqaccel.families.radial_network.body import print_radial_network
from eqaccel.ops import RadialNetwork

SPECS = {
    "mace": RadialNetworkSpec((8, 64, 64, 64), (1.6791767,) * 3, (0.3535, 0.125, 0.125)),
    "nequip": RadialNetworkSpec((8, 128), scales=(-0.5,)),
    "sevennet": RadialNetworkSpec((8, 64, 64), (1.68, 1.68), (0.3535, 0.125)),
    "one": RadialNetworkSpec((1, 8)),
    "ragged": RadialNetworkSpec((5, 24, 40), (-1.5, 1.0), (0.7, 0.2)),
    "odd": RadialNetworkSpec((13, 16, 8, 24, 8), (1.0, 2.0, 0.5, 1.0), (0.25, 0.5, 1.0, 0.5)),
}
DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD)


def operands(spec: RadialNetworkSpec, rows: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, w and gz; rows of different sizes, and so small weights in one column that they are not among halves."""
    generator = torch.Generator().manual_seed(1)
    made = {"generator": generator, "dtype": torch.float64}
    x, w = torch.randn(rows, spec.widths[0], **made), torch.randn(spec.num_weights, **made)
    x = x * 10 ** (4 * torch.rand(rows, 1, **made) - 3)
    w[:: spec.widths[1]] *= 1e-6
    return [t.to(device, dtype).requires_grad_() for t in (x, w, torch.randn(rows, spec.widths[-1], **made))]


def assert_close(spec: RadialNetworkSpec, tensors: list[torch.Tensor], z: torch.Tensor, gx: torch.Tensor) -> None:
    x, w, gz = (t.detach().double().cpu().numpy().astype(np.longdouble) for t in tensors)
    # A layer adds as many roundings as it has terms, those of its activation, and what splitting floats loses, 2^-20,
    # which are 8 units of rounding. What is lost beside the largest of a row or of all weights is 2^-39 of it a term.
    eps, tiny = torch.finfo(tensors[0].dtype).eps, torch.finfo(tensors[0].dtype).tiny
    roundings = sum(spec.widths) + 32 * spec.num_layers
    for direction, value in zip(DIRECTIONS, (z, gx), strict=True):
        given = {"gz": gz} if direction is Direction.BACKWARD else {}
        right, absolute = (execute_radial_network(spec, direction, x, w, **given, absolute=flag) for flag in (0, 1))
        name, passes = ("gx", 2) if given else ("z", 1)
        size = getattr(absolute, name)
        lost = 2.0**-39 / eps * size.max(axis=1, initial=0.0)[:, None]
        error = np.abs(value.detach().double().cpu().numpy() - getattr(right, name))
        assert (error <= passes * roundings * eps * (size + lost) + 64 * tiny).all(), direction


def assert_matches(spec: RadialNetworkSpec, module: RadialNetwork, tensors: list[torch.Tensor]) -> None:
    z = module(tensors[0], tensors[1])
    assert_close(spec, tensors, z, *grad(z, tensors[0], tensors[2]))


@pytest.mark.parametrize("rows", [0, 1, 37, 300])
@pytest.mark.parametrize("name", SPECS)
def test_values_and_gradients(name: str, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    module = RadialNetwork(SPECS[name]).to(device)
    assert_matches(SPECS[name], module, operands(SPECS[name], rows, device, dtype))


def test_operands_of_any_stride_and_offset(device: torch.device, dtype: torch.dtype) -> None:
    x, w, gz = (t.detach() for t in operands(SPECS["ragged"], 40, device, dtype))
    strided = [x.t().contiguous().t(), torch.stack([w, w], 1)[:, 0], gz.t().contiguous().t()]
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t) for t in (x, w, gz)]
    for variant in (strided, shifted):
        module = RadialNetwork(SPECS["ragged"]).to(device)
        assert_matches(SPECS["ragged"], module, [t.requires_grad_() for t in variant])


def test_what_is_no_number_stays_in_its_row(device: torch.device, dtype: torch.dtype) -> None:
    x, w, gz = operands(SPECS["mace"], 40, device, dtype)
    with torch.no_grad():
        x[3, 2], x[33, 0] = torch.nan, torch.inf
    z = RadialNetwork(SPECS["mace"]).to(device)(x, w)
    for values in (z, *grad(z, x, gz)):
        assert values.isfinite().logical_not().any(1).nonzero().flatten().tolist() == [3, 33]


def test_arguments_so_large_that_exponentials_overflow(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["one"]
    x = torch.tensor([[-1e4], [-200.0], [200.0], [1e4]], device=device, dtype=dtype, requires_grad=True)
    w = torch.ones(8, device=device, dtype=dtype)
    z = RadialNetwork(spec).to(device)(x, w)
    slopes = x.new_tensor([0.0, 0.0, 1.0, 1.0])
    close = {"rtol": 0.0, "atol": 200 * math.exp(-200.0)}
    torch.testing.assert_close(z[:, 0], torch.relu(x[:, 0]), **close)
    torch.testing.assert_close(grad(z[:, 0].sum(), x)[0].flatten(), slopes, **close)


def test_derivatives_of_any_order(device: torch.device) -> None:
    spec = RadialNetworkSpec((2, 8, 8), (1.5, 0.5), (0.5, 0.25))
    module = RadialNetwork(spec).to(device)
    x, w, _ = operands(spec, 3, device, torch.float64)

    def second(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        slopes = grad(module(x, w).square().sum(), (x, w), create_graph=True)
        return grad(sum(slope.square().sum() for slope in slopes), (x, w), create_graph=True)

    assert gradcheck(module, (x, w), check_forward_ad=True)
    assert gradgradcheck(module, (x, w))
    assert gradcheck(second, (x, w))
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(second, tracing_mode=mode, _allow_non_fake_inputs=True)(x, w)
        torch.testing.assert_close(traced(x, w), second(x, w))


def test_gradients_of_weights_come_with_those_of_rows(device: torch.device, dtype: torch.dtype) -> None:
    """They are composed, and so is the gradient of x beside them."""
    module, (x, w, gz) = RadialNetwork(SPECS["ragged"]).to(device), operands(SPECS["ragged"], 60, device, dtype)
    alone = grad(module(x, w.detach()), x, gz)[0]
    together, of_weights = grad(module(x, w), (x, w), gz)
    wide, w_wide = x.detach().double().cpu(), w.detach().double().cpu().requires_grad_()
    expected = grad(RadialNetwork(SPECS["ragged"])(wide, w_wide), w_wide, gz.double().cpu())[0]
    bound = 1e3 * torch.finfo(dtype).eps
    assert (alone - together).abs().max() <= bound * together.abs().max()
    assert (of_weights.double().cpu() - expected).abs().max() <= bound * expected.abs().max()


def test_repeats_bitwise(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["mace"]
    module, (x, w, gz) = RadialNetwork(spec).to(device), operands(spec, 133, device, dtype)

    def run(chosen: slice) -> list[torch.Tensor]:
        rows = x.detach()[chosen].requires_grad_()
        z = module(rows, w.detach())
        return [z, *grad(z, rows, gz[chosen])]

    if module.has_kernel(device, dtype):  # products of torch's add up in another order for other numbers of rows
        assert_rows_stand_alone(run, 133)
    assert all(map(torch.equal, run(slice(0, 133)), run(slice(0, 133))))


def test_opcheck(device: torch.device) -> None:
    module = RadialNetwork(SPECS["ragged"]).to(device)
    x, w, gz = operands(SPECS["ragged"], 4, device, torch.float64)
    rest, ops = (module.widths, module.factors, module.scales), torch.ops.eqaccel
    torch.library.opcheck(ops.radial_network.default, (module.payload, module.key, x, w, *rest))
    torch.library.opcheck(ops.radial_network_backward.default, (module.payload, module.key, gz, x, w, *rest))


def test_copies_and_wrappers(device: torch.device) -> None:
    module = RadialNetwork(SPECS["mace"]).to(device)
    x, w, _ = (t.detach() for t in operands(SPECS["mace"], 9, device, torch.float32))
    x.requires_grad_()
    expected = module(x, w)
    assert not module.state_dict()
    for other in forms(module):
        assert torch.equal(other(x, w), expected)
        assert torch.equal(grad(other(x, w).sum(), x)[0], grad(module(x, w).sum(), x)[0])
    torch.testing.assert_close(torch.func.vmap(module, (0, None))(x[:, None], w)[:, 0], expected)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(module(x.bfloat16(), w), module(x.bfloat16().float(), w))
    assert module.to("meta")(x.to("meta"), w.to("meta")).shape == expected.shape


def test_what_does_not_fit(device: torch.device) -> None:
    module = RadialNetwork(SPECS["mace"]).to(device)
    x, w, _ = (t.detach() for t in operands(SPECS["mace"], 3, device, torch.float32))
    with pytest.raises(OperandError, match="'x' must be float32 or float64"):
        module(x.half(), w.half())
    with pytest.raises(OperandError, match=r"'x' must have shape \(3, 8\), got \[3, 5\]"):
        module(x[:, :5], w)
    with pytest.raises(OperandError, match=r"'w' must have shape \(8704\), got \[8703\]"):
        module(x, w[1:])
    rest = (module.widths, module.factors, module.scales)
    with pytest.raises(RuntimeError, match=r"'gz' must have shape \(3, 64\), got \[3, 8\]"):
        torch.ops.eqaccel.radial_network_backward(module.payload, module.key, x, x, w, *rest)
    for wrong, message in (
        (((8,),), "widths: expected columns of x and features of at least one layer, got"),
        (((17, 64),), "widths: expected 1 to 16 columns of x, got 17"),
        (((8, 60),), "widths: expected multiples of 8 up to 128, got 60"),
        (((8, 128, 128),), "widths: expected weights of at most 48128 bytes, got"),
        (((8, 64), (1.0, 2.0)), "factors: expected 1 finite numbers, got"),
        (((8, 64), (), (float("inf"),)), "scales: expected 1 finite numbers, got"),
    ):
        with pytest.raises(SpecError, match=message):
            RadialNetworkSpec(*wrong)


def test_kernels_on_a_cpu(tmp_path: Path) -> None:
    """Each number is where it is looked for: the text of the kernels without a GPU."""
    spec, rows = SPECS["odd"], 150
    tensors = [t.detach() for t in operands(spec, rows, torch.device("cpu"), torch.float32)]
    results = [torch.full((rows + 8, columns), torch.nan) for columns in (spec.widths[-1], spec.widths[0])]
    places = [ctypes.c_void_p(t.data_ptr()) for t in (*tensors, *results)]
    family, body = Path(families.__file__).parent / "radial_network", print_radial_network(spec)
    for number in range(2):
        gpu_kernels("network.cpp", tmp_path, body, family, SCALAR="float", DIRECTION=number).run(*places, rows, 2)
    assert all(result[rows:].isnan().all() for result in results)
    assert_close(spec, tensors, *(result[:rows] for result in results))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile_without_spills(arch: str) -> None:
    for name in ("mace", "nequip", "sevennet", "odd"):
        program = runtime.Program(radial_network_payload(SPECS[name])[0])
        for direction in DIRECTIONS:
            compiled = runtime.compile_program(program, "cuda", "float32", direction.value, arch)
            used = compiled["resources"]["eq_rows"]
            assert used["spill_store_bytes"] == used["stack_bytes"] == 0, (name, direction)
