"""The products of `eqaccel.o3` are those of e3nn: instructions, path weights, numbers, derivatives and state dicts."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

pytest.importorskip("e3nn", reason="needs e3nn")

import e3nn.o3
from e3nn_pairs import assert_alike, assert_same, made_alike, rows
from mode_cases import CASES as MODE_CASES
from torch import Tensor, nn

import eqaccel
from eqaccel import TensorProductSpec, o3
from eqaccel.errors import OperandError, SpecError
from eqaccel.o3 import instructions

pytestmark = pytest.mark.filterwarnings("ignore")

MIXED = "3x0e+2x1o+1x0e+2x1e"
DEFINITIONS = [
    ("FullyConnectedTensorProduct", instructions.fully_connected, (MIXED, "0e+2x1o", "2x0e+3x1o+2e"), {}),
    ("ElementwiseTensorProduct", instructions.elementwise, ("5x1o+5x1e+0x2e", "10x1e"), {}),
    ("ElementwiseTensorProduct", instructions.elementwise, (MIXED, "8x1o", ["0e", "1o"]), {}),
    ("FullTensorProduct", instructions.full, (MIXED, "2x1o+0e+0e"), {}),
    ("FullTensorProduct", instructions.full, (MIXED, "2x1o", ["1e", (0, 1)]), {}),
    *(
        ("TensorSquare", instructions.square, (MIXED, *args), {"irrep_normalization": normalization})
        for normalization in ("component", "norm", "none")
        for args in ((), ("3x0e+2x1o+0x2e+2e",), (None, ["0e", "2e", "1e"]))
    ),
]


@pytest.mark.parametrize(("name", "define", "args", "options"), DEFINITIONS)
def test_instructions_and_path_weights(name: str, define: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    original = getattr(e3nn.o3, name)(*args, **options, compile_left_right=False)
    found = define(*args, **options)
    sides = (original.irreps_in1, original.irreps_in2, original.irreps_out)
    assert tuple(map(str, found[:3])) == tuple(map(str, sides))
    ours = getattr(o3, name)(*args, **options, compile_left_right=False)
    assert [tuple(item) for item in ours.instructions] == [tuple(item) for item in original.instructions]
    assert (str(ours), ours.weight_numel) == (str(original), original.weight_numel)
    assert torch.equal(ours.output_mask, original.output_mask)


UVU = [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True, 0.5), (1, 1, 2, "uvu", False), (1, 1, 1, "uvu", True)]
CASES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "channelwise": (
        "TensorProduct",
        ("4x0e+4x1o", "0e+1o", "4x0e+4x1o+4x1e", [*UVU[:2], UVU[2], (1, 0, 1, "uvu", True)]),
        {"shared_weights": False, "in1_var": [0.5, 2.0], "path_normalization": "path", "irrep_normalization": "norm"},
    ),
    "own weights": (
        "TensorProduct",
        ("4x1e", "0e+1e+2e", "4x1e+4x2e", [(0, 2, 1, "uvu", True), (0, 1, 0, "uvw", True)]),
        {},
    ),
    "modes": ("TensorProduct", MODE_CASES["modes"], {"shared_weights": False}),
    "fully connected": ("FullyConnectedTensorProduct", ("5x0e+3x1o", "2x0e+1o", "4x0e+2x1o+2e"), {}),
    "many channels": ("FullyConnectedTensorProduct", ("5x0e+4x1o", "4x0e+6x1o", "4x0e+3x1o+4x1e"), {}),
    "scalars": (
        "FullyConnectedTensorProduct",
        ("5x0e+3x1o+2x1o+2x2e", "4x0o", "4x0o+2x1e+2e"),
        {"path_normalization": "path", "in2_var": [2.0]},
    ),
    "of edges": (
        "FullyConnectedTensorProduct",
        ("5x0e+3x1o", "0e+1o", "4x0e+2x1o+1e"),
        {"shared_weights": False, "normalization": "component"},
    ),
    "elementwise": ("ElementwiseTensorProduct", (MIXED, "8x1o"), {}),
    "full": ("FullTensorProduct", ("2x0e+2x1o+2e", "2x1o+1e"), {}),
    "square": ("TensorSquare", ("3x0e+2x1o+2e",), {}),
    "mixed square": ("TensorSquare", ("3x0e+2x1o+2e", "3x0e+2x1o+2e"), {"irrep_normalization": "norm"}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_derivatives(case: str, device: torch.device) -> None:
    name, args, options = CASES[case]
    dtype = torch.float32 if case == "of edges" else torch.float64
    original, ours = pair = made_alike(name, *args, dtype=dtype, device=device, **options)
    assert_alike(pair, operands(original, (5,)), dtype)
    assert_alike(pair, operands(original, (2, 3)), dtype)
    x = [operand.to(device, dtype) for operand in operands(original, (4,))]
    taken = getattr(o3, name).from_e3nn(original)
    assert torch.equal(taken(*x), ours(*x))
    assert all(mine is theirs for mine, theirs in zip(taken.parameters(), original.parameters(), strict=True))
    views = [list(module.weight_views(*x[2:])) for module in (ours, original)] if ours.weight_numel else []
    assert all(torch.equal(*both) for both in zip(*views, strict=True))


def operands(product: nn.Module, leading: tuple[int, ...]) -> list[Tensor]:
    found = [rows(*leading, product.irreps_in1.dim)]
    if "Square" not in type(product).__name__:
        found.append(rows(*leading, product.irreps_in2.dim, seed=1))
    if not product.shared_weights:
        found.append(rows(*leading, product.weight_numel, seed=2))
    return found


@pytest.mark.parametrize(
    ("irreps2", "shared", "is_linear"), [("4x0o", True, True), ("3x0o+0o", True, False), ("4x0o", False, False)]
)
def test_a_product_with_scalars_is_a_linear_map(irreps2: str, shared: bool, is_linear: bool) -> None:
    """Of weights that all rows share, and of one block of scalars."""
    product = o3.FullyConnectedTensorProduct("5x0e+3x1o", irreps2, "4x0o+2x1e", shared_weights=shared)
    assert product.kernel.is_linear == is_linear


def test_leading_dimensions_are_broadcast() -> None:
    _, args, options = CASES["channelwise"]
    original, ours = pair = made_alike("TensorProduct", *args, compile_right=True, **options)
    x, y, w = operands(original, (5,))
    for given in ((x, y[:1], w), (x[0], y, w), (x[:, None], y, w[:1]), (x[:0], y[:0], w[:0])):
        assert_alike(pair, given)
    assert_same(ours.right(y, w), original.right(y, w), torch.float64)
    assert_same(torch.jit.script(ours)(x, y[:1], w), original(x, y[:1], w), torch.float64)
    views = [w[:, :4], w[:, 4:8].reshape(5, 4, 1), w[:, 8:]]
    assert torch.equal(ours(x, y, views), ours(x, y, w))
    for given, match in (((x, y, None), "none of its own"), ((x, y, w[0]), "expected shape"), ((x, y, w[:, 1:]), "12")):
        with pytest.raises(OperandError, match=match):
            ours(*given)


@pytest.mark.parametrize("name", ["modes", "mixed square", "elementwise", "full"])
def test_state_dicts_go_both_ways(name: str) -> None:
    kind, args, options = CASES[name]
    options = options | ({} if name != "modes" else {"shared_weights": True})
    original, ours = made_alike(kind, *args, dtype=torch.float32, **options)
    assert ours.state_dict().keys() == original.state_dict().keys()
    original.load_state_dict(ours.state_dict())
    again = copy.deepcopy(ours)
    again.load_state_dict(original.state_dict())
    x = [operand.float() for operand in operands(original, (4,))]
    assert torch.equal(again(*x), ours(*x))
    stream = io.BytesIO()
    torch.save(ours, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(*x), ours(*x))
    assert TensorProductSpec.from_e3nn(ours) == ours.spec


@pytest.mark.parametrize("program", [{"compile_left_right": False}, {}])
@pytest.mark.parametrize("weighted", [True, False])
def test_state_dicts_have_the_constants_of_right(weighted: bool, program: dict[str, bool]) -> None:
    """Those of every mode that e3nn has the method for, with degrees of zero and without."""
    irreps = "3x0e+3x1o+3x1e"
    modes = [("uuw", "3x1e"), ("uuu", "3x1e"), ("uvu", "3x1e"), ("uvv", "3x1e"), ("uvuv", "9x1e")]
    modes += [("uvw", "2x1e")] if weighted else []
    couplings = [(0, 2), (2, 0), (1, 1), (2, 2)]
    for number, (mode, block) in enumerate(modes):
        if mode == "uuw" and not weighted:
            block = "1x1e"
        instructions = [(i, j, 0, mode, weighted) for i, j in couplings]
        for kept in (instructions, instructions[:2], instructions[number % 2 :: 3]):
            arguments = (irreps, irreps, block, kept)
            original = e3nn.o3.TensorProduct(*arguments, **program, compile_right=True)
            for ours in (
                o3.TensorProduct(*arguments, **program, compile_right=True),
                o3.TensorProduct.from_e3nn(original),
            ):
                assert ours.state_dict().keys() == original.state_dict().keys(), (mode, kept)
                original.load_state_dict(ours.state_dict())
                ours.load_state_dict(original.state_dict())


def test_programs_of_torch_take_the_classes() -> None:
    product, linear = o3.FullyConnectedTensorProduct("2x0e+2x1o", "0e+1o", "3x0e+2x1o"), o3.Linear("2x1o", "3x1o")
    x, y = rows(5, 8, dtype=torch.float32), rows(1, 4, dtype=torch.float32)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    exported = torch.export.export(product, (x, y)).module()
    assert torch.equal(compiled(x, y), product(x, y))
    assert torch.equal(exported(x, y), product(x, y))
    assert torch.equal(torch.func.vmap(linear)(x[:, :6]), linear(x[:, :6]))


TRACED = [
    ("FullyConnectedTensorProduct", ("2x0e+3x1o", "0e+1o", "2x0e+1o"), {}),
    ("FullyConnectedTensorProduct", ("2x0e+3x1o", "0e+1o", "2x0e+1o"), {"shared_weights": False}),
    ("FullTensorProduct", ("2x0e+1o", "0e+1o"), {}),
    ("TensorSquare", ("2x0e+1o",), {}),
    ("Linear", ("2x0e+1o", "0e+1o"), {"shared_weights": False}),
]


@pytest.mark.parametrize(("name", "args", "options"), TRACED)
def test_traces_take_any_number_of_rows(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    module = getattr(o3, name)(*args, **options).double()

    def inputs(count: int) -> tuple[Tensor, ...]:
        sides = [getattr(module, side) for side in ("irreps_in", "irreps_in1", "irreps_in2") if hasattr(module, side)]
        dims = [side.dim for side in (sides[:1] if name in ("TensorSquare", "Linear") else sides)]
        return tuple(rows(count, dim, seed=dim) for dim in [*dims, *([module.weight_numel] if options else [])])

    traced = torch.jit.trace(module, inputs(5))
    for count in (5, 3, 8, 0):
        assert torch.equal(traced(*inputs(count)), module(*inputs(count)))


class OfRight(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.product = o3.FullyConnectedTensorProduct("2x0e+3x1o", "0e+1o", "2x0e+1o", **options)

    def forward(self, y: Tensor, w: Tensor) -> Tensor:
        return self.product.right(y, w)


@pytest.mark.parametrize("shared", [True, False])
def test_scripted_products_have_their_right(shared: bool) -> None:
    parent = OfRight(shared_weights=shared).double()
    y, w = rows(3, 4), rows(*(() if shared else (3,)), parent.product.weight_numel, seed=1)
    assert torch.equal(torch.jit.script(parent)(y, w), parent(y, w))
    assert torch.equal(torch.jit.script(parent.product).right(y, w), parent(y, w))
    assert_same(torch.einsum("zi,zio->zo", rows(3, 11), parent(y, w)), parent.product(rows(3, 11), y, w), torch.float64)


def test_squares_can_be_scripted() -> None:
    square = o3.TensorSquare("2x0e+1o").double()
    assert torch.equal(torch.jit.script(square)(rows(4, 5)), square(rows(4, 5)))


def test_signs_of_another_version_are_refused() -> None:
    old, new = (o3.FullTensorProduct("2x1o", "2e", convention=c) for c in ("e3nn<0.5", "e3nn>=0.5"))
    x, y = rows(3, 6, dtype=torch.float32), rows(3, 5, dtype=torch.float32)
    assert not torch.equal(old(x, y), new(x, y))
    with pytest.raises(RuntimeError, match="signs of another version of e3nn"):
        old.load_state_dict(new.state_dict())
    installed = e3nn.o3.FullTensorProduct("2x1o", "2e")
    ours = old if eqaccel.WignerConvention.installed() is eqaccel.WignerConvention.E3NN_0_4 else new
    ours.load_state_dict(installed.state_dict())
    assert_same(ours(x, y), installed(x, y), torch.float32)


def test_initial_weights_are_those_of_e3nn() -> None:
    weights = []
    for library in (e3nn.o3, o3):
        torch.manual_seed(3)
        weights.append(library.FullyConnectedTensorProduct("2x0e+1o", "1o", "0e+1o").weight)
    assert torch.equal(*weights)


def test_bad_arguments_are_named() -> None:
    for make, match in (
        (lambda: o3.FullTensorProduct("0e", "0e", internal_weights=True, shared_weights=False), "internal_weights"),
        (lambda: o3.ElementwiseTensorProduct("2x0e", "0e"), "as many irreps"),
        (lambda: o3.TensorSquare("2x0e", "0e", ["0e"]), "irreps_out"),
        (lambda: o3.TensorSquare("2x0e", irrep_normalization="x"), "irrep_normalization"),
        (lambda: o3.TensorProduct.from_e3nn(nn.Linear(1, 1)), r"e3nn.o3.TensorProduct"),
        (lambda: o3.FullTensorProduct.from_e3nn(e3nn.o3.TensorSquare("0e")), r"FullTensorProduct"),
    ):
        with pytest.raises(SpecError, match=match):
            make()
