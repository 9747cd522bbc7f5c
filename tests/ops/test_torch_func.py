"""Forward-mode derivatives and torch.func over every operator: tangents, compositions of transforms, vmap."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from patch_checks import RELATIVE
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from eqaccel import (
    Linear,
    LinearSpec,
    MatrixProduct,
    Polynomial,
    PolynomialSpec,
    TensorProduct,
    TensorProductConv,
    TensorProductSpec,
)
from eqaccel.errors import OperandError
from eqaccel.families.polynomial import Term
from eqaccel.testing import assert_close, random_operands, reference

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")

SPEC = TensorProductSpec.channelwise("2x0e+2x1o", "0e+1o", "0e+1o")
# What paths without weights give does not depend on weights.
MIXED, WEIGHTLESS = (
    TensorProductSpec("2x0e+2x1o", "0e+1o", "2x0e+2x1o", [(0, 0, 0, "uvu", weighted), (0, 1, 1, "uvu", False)])
    for weighted in (True, False)
)
POLYNOMIAL = PolynomialSpec(
    4,
    3,
    2,
    (
        Term(0, 0, (0, 1, 3), 0.5),
        Term(0, 1, (2, 2), -1.5),
        Term(0, 2, (), 2.0),
        Term(1, 0, (1, 1, 1), 0.7),
        Term(1, 1, (0, 2, 2), 3.0),
        Term(1, 2, (3,), -0.3),
        Term(1, 0, (0, 1), 1.1),
    ),
)
Case = tuple[Callable[..., Tensor | tuple[Tensor, ...]], list[Tensor]]


def normal(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def like(tensors: Sequence[Tensor], seed: int = 1) -> tuple[Tensor, ...]:
    return tuple(normal(*t.shape, seed=seed + number).to(t) for number, t in enumerate(tensors))


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def product_case(
    order: int,
    device: torch.device,
    spec: TensorProductSpec = SPEC,
    *,
    shared: bool = False,
    deterministic: bool = True,
) -> Case:
    """One of the three operators of a convolution, and its operands."""
    o = random_operands(spec, 3, 5, num_senders=4, shared=shared, device=device)
    module = TensorProductConv(spec, deterministic=deterministic).to(device)
    graph = torch.ops.eqaccel.graph(o.edge_index[1], o.edge_index[0], 3, 4)
    names = ("tensor_product", "tensor_product_backward", "tensor_product_double_backward")
    operator = getattr(torch.ops.eqaccel, names[order])
    first = [normal(3, spec.z_dim).to(device)] if order > 0 else []
    last = list(like((o.x, o.y, o.w), 5)) if order > 1 else []
    tail = (graph, 3, spec.z_dim, True, deterministic)
    return lambda *v: operator(module.payload, module.key, *v, *tail), [*first, o.x, o.y, o.w, *last]


def polynomial_case(order: int, device: torch.device) -> Case:
    """One of the three operators of a polynomial, and its operands."""
    module = Polynomial(POLYNOMIAL).to(device)
    names = ("polynomial", "polynomial_backward", "polynomial_double_backward")
    operator = getattr(torch.ops.eqaccel, names[order])
    widths = {0: (4, 3), 1: (2, 4, 3), 2: (2, 4, 3, 4, 3)}[order]
    operands = [normal(2, width, seed=width + number).to(device) for number, width in enumerate(widths)]
    return lambda *v: operator(module.payload, module.key, *v, 2), operands


def form_case(missing: int, device: torch.device) -> Case:
    """The polar form without one of its operands."""
    module = Polynomial(POLYNOMIAL).to(device)
    widths = [2, 3, 5, 5, 5]
    columns = widths.pop(missing)
    operands = [normal(2, width, seed=number).to(device) for number, width in enumerate(widths)]
    form = torch.ops.eqaccel.polynomial_polar_form
    return lambda *v: form(module.payload, module.key, *v, missing, columns), operands


def matrix_case(device: torch.device) -> Case:
    return MatrixProduct().to(device), [normal(3, 4).to(device), normal(4, 2, seed=1).to(device)]


def linear_case(missing: int, device: torch.device) -> Case:
    """The form of a linear map without one of its operands."""
    spec = LinearSpec("2x0e+1x1o", "1x0e+2x1o+1x0e", ((0, 0, 0.5), (1, 1, -2.0)), 2)
    module = Linear(spec).to(device)
    shapes = [(2, spec.irreps_in.dim), (2, 2), (spec.weight_numel,), (2, spec.irreps_out.dim)]
    columns = shapes.pop(missing)[-1]
    operands = [normal(*shape, seed=number).to(device) for number, shape in enumerate(shapes)]
    return lambda *v: torch.ops.eqaccel.linear(module.payload, module.key, *v, missing, columns), operands


CASES = {
    "tensor_product": lambda device: product_case(0, device),
    "tensor_product_backward": lambda device: product_case(1, device),
    "tensor_product_double_backward": lambda device: product_case(2, device),
    "shared_weights": lambda device: product_case(0, device, shared=True),
    "shared_weights_backward": lambda device: product_case(1, device, shared=True),
    "shared_weights_double_backward": lambda device: product_case(2, device, shared=True),
    "mixed_weights": lambda device: product_case(0, device, MIXED),
    "mixed_weights_backward": lambda device: product_case(1, device, MIXED),
    "mixed_weights_double_backward": lambda device: product_case(2, device, MIXED),
    "no_weights": lambda device: product_case(0, device, WEIGHTLESS),
    "no_weights_double_backward": lambda device: product_case(2, device, WEIGHTLESS),
    "atomic_backward": lambda device: product_case(1, device, deterministic=False),
    "polynomial": lambda device: polynomial_case(0, device),
    "polynomial_backward": lambda device: polynomial_case(1, device),
    "polynomial_double_backward": lambda device: polynomial_case(2, device),
    "polar_form": lambda device: form_case(0, device),
    "polar_form_weights": lambda device: form_case(1, device),
    "polar_form_features": lambda device: form_case(3, device),
    "matrix_product": matrix_case,
    "linear": lambda device: linear_case(3, device),
    "linear_features": lambda device: linear_case(0, device),
    "linear_attributes": lambda device: linear_case(1, device),
    "linear_weights": lambda device: linear_case(2, device),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, device: torch.device) -> Case:
    return CASES[request.param](device)


# Atomic additions give sums that differ by rounding from call to call.
CHECK = {"fast_mode": True, "nondet_tol": 1e-12}


def test_gradcheck_in_both_modes(case: Case) -> None:
    function, operands = case
    inputs = [t.requires_grad_() for t in operands]
    batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(function, inputs, check_forward_ad=True, **batched, **CHECK)


def test_second_derivatives_in_all_orders_of_modes(case: Case) -> None:
    function, operands = case
    inputs = [t.requires_grad_() for t in operands]
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, **CHECK)

    def tangents(*values: Tensor) -> Tensor | tuple[Tensor, ...]:
        return jvp(function, values[: len(operands)], values[len(operands) :])[1]

    both = [*inputs, *(t.requires_grad_() for t in like(inputs))]
    assert gradcheck(tangents, both, **CHECK)

    # Forward over forward against reverse over forward, which are transposes of each other.
    at, along = [t.detach() for t in both], like(both, 20)
    _, second = jvp(lambda *v: as_tuple(tangents(*v)), tuple(at), along)
    weights = like(second, 40)
    gradients = vjp(lambda *v: as_tuple(tangents(*v)), *at)[1](weights)
    forward = sum((t * s).sum() for t, s in zip(second, weights, strict=True))
    torch.testing.assert_close(forward, sum((g * d).sum() for g, d in zip(gradients, along, strict=True)))


@pytest.mark.parametrize("chosen", range(3))
def test_tangents_of_some_operands(case: Case, chosen: int) -> None:
    """The tangent along all operands is the sum of those along each, whether or not a gradient is recorded."""
    function, operands = case
    along = like(operands)
    chosen %= len(operands)

    def tangents(present: Sequence[int], recorded: Sequence[int] = ()) -> list[Tensor]:
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(t.clone().requires_grad_(i in recorded), along[i]) if i in present else t
                for i, t in enumerate(operands)
            ]
            results = as_tuple(function(*duals))
            found = [forward_ad.unpack_dual(t).tangent for t in results]
            return [torch.zeros_like(r) if t is None else t.clone() for r, t in zip(results, found, strict=True)]

    everything = tangents(range(len(operands)))
    others = [i for i in range(len(operands)) if i != chosen]
    for whole, one, rest in zip(everything, tangents([chosen]), tangents(others), strict=True):
        torch.testing.assert_close(one + rest, whole)
    for whole, again in zip(everything, tangents(range(len(operands)), [chosen]), strict=True):
        torch.testing.assert_close(again, whole)
    with torch.no_grad():
        for whole, again in zip(everything, tangents(range(len(operands))), strict=True):
            torch.testing.assert_close(again, whole)


class Product:
    """A convolution and its float64 reference, as functions of x, y and w."""

    def __init__(self, device: torch.device, dtype: torch.dtype, layout: str = "mul_ir") -> None:
        o = random_operands(SPEC, 6, 20, num_senders=7, dtype=dtype, device=device)
        self.operands, self.edge_index = (o.x, o.y, o.w), o.edge_index
        self.module, self.layout = TensorProductConv(SPEC, layout=layout).to(device), layout

    def ours(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return self.module(x, y, w, self.edge_index, 6)

    def exact(self, absolute: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda *v: reference(SPEC, *v, self.edge_index, 6, layout=self.layout, absolute=absolute)

    def assert_agrees(self, transform: Callable, *others: Tensor) -> None:
        """Compares transform(function)(operands, others), a tuple of tensors, with that of the reference."""

        def results(function: Callable, prepare: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
            return transform(function)(*(prepare(t) for t in (*self.operands, *others)))

        assert_close(
            results(self.ours, lambda t: t),
            results(self.exact(absolute=False), lambda t: t.double()),
            results(self.exact(absolute=True), lambda t: t.double().abs()),
        )


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_tangents_of_values_and_gradients_match_the_reference(
    layout: str, device: torch.device, dtype: torch.dtype
) -> None:
    product = Product(device, dtype, layout)
    along = like(product.operands)
    gz = like([product.ours(*product.operands)], 9)[0]

    def tangents(function: Callable) -> Callable:
        def of(x: Tensor, y: Tensor, w: Tensor, a: Tensor, b: Tensor, c: Tensor, g: Tensor) -> tuple[Tensor, ...]:
            def gradients(*v: Tensor) -> tuple[Tensor, ...]:
                return vjp(function, *v)[1](g)

            value = jvp(function, (x, y, w), (a, b, c))
            first = jvp(gradients, (x, y, w), (a, b, c))
            return (*value, *first[0], *first[1])

        return of

    product.assert_agrees(tangents, *along, gz)


@pytest.mark.parametrize("outer", [jacfwd, jacrev])
@pytest.mark.parametrize("inner", [jacfwd, jacrev])
def test_hessians_by_any_modes_match_the_reference(outer: Callable, inner: Callable, device: torch.device) -> None:
    product = Product(device, torch.float64)

    def second(function: Callable) -> Callable:
        def of(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            def energy(part: Tensor) -> Tensor:
                return (function(x, torch.cat([part, y[2:]]), w) ** 2).sum()

            return (outer(inner(energy))(y[:2]),)

        return of

    product.assert_agrees(second)


def test_gradients_of_gradients_of_gradients(device: torch.device) -> None:
    product = Product(device, torch.float64)

    def third(function: Callable) -> Callable:
        def of(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            def once(x: Tensor) -> Tensor:
                return (function(x, y, w) ** 3).sum()

            def twice(x: Tensor) -> Tensor:
                return (grad(once)(x) * x).sum()

            def thrice(x: Tensor) -> Tensor:
                return jvp(twice, (x,), (x,))[1]

            return grad(once)(x), grad(twice)(x), grad(thrice)(x), jvp(thrice, (x,), (x,))[1]

        return of

    product.assert_agrees(third)


def by_terms(x: Tensor, w: Tensor) -> Tensor:
    """The polynomial by torch's operators."""
    z = [torch.zeros_like(x[:, 0]) for _ in range(POLYNOMIAL.num_outputs)]
    for term in POLYNOMIAL.terms:
        product = term.coefficient * w[:, term.weight]
        for feature in term.features:
            product = product * x[:, feature]
        z[term.output] = z[term.output] + product
    return torch.stack(z, 1)


TRANSFORMS = {
    "grad": grad,
    "hessian": hessian,
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f)),
    "jacfwd of hessian": lambda f: jacfwd(hessian(f)),
    "jacrev of hessian": lambda f: jacrev(hessian(f)),
    "hessian of jacfwd of jacrev": lambda f: hessian(jacfwd(jacrev(f))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", ["polynomial", "matrix_product"])
def test_transforms_of_other_modules(kind: str, name: str, device: torch.device) -> None:
    if kind == "polynomial":
        module, plain = Polynomial(POLYNOMIAL).to(device), by_terms
        x, w = normal(2, 4).to(device), normal(2, 3, seed=1).to(device)
    else:
        module, plain = MatrixProduct().to(device), torch.mm
        x, w = normal(2, 3).to(device), normal(3, 2, seed=1).to(device)
    for number in (0, 1):

        def energy(function: Callable, v: Tensor, number: int = number) -> Tensor:
            return (function(*((v, w) if number == 0 else (x, v))) ** 2).sum()

        at = (x, w)[number]
        found = TRANSFORMS[name](lambda v: energy(module, v))(at)
        expected = TRANSFORMS[name](lambda v: energy(plain, v))(at)
        torch.testing.assert_close(found, expected, rtol=0, atol=RELATIVE * float(expected.abs().max()))


def test_vmap_is_a_loop_over_samples(case: Case) -> None:
    function, operands = case
    for batched in (range(len(operands)), [0], [len(operands) - 1]):
        stacked = [torch.stack([t, 2 * t, t - 1], 1) if i in batched else t for i, t in enumerate(operands)]
        dims = tuple(1 if i in batched else None for i in range(len(operands)))
        found = as_tuple(vmap(function, dims)(*stacked))
        for sample in range(3):
            alone = [t.select(1, sample) if i in batched else t for i, t in enumerate(stacked)]
            for result, wanted in zip(found, as_tuple(function(*alone)), strict=True):
                torch.testing.assert_close(result[sample], wanted)


def test_vmap_of_modules(device: torch.device) -> None:
    batch = TensorProduct(SPEC).to(device)
    o = random_operands(SPEC, 4, 4, batch=True, device=device)
    xs, ys = torch.stack([o.x, -o.x]), torch.stack([o.y, 3 * o.y, 0 * o.y])
    nested = vmap(lambda x: vmap(lambda y: batch(x, y, o.w))(ys))(xs)
    torch.testing.assert_close(nested[1, 1], -3 * batch(o.x, o.y, o.w))

    def energy(x: Tensor, y: Tensor) -> Tensor:
        return batch(x, y, o.w).square().sum()

    torch.testing.assert_close(vmap(grad(energy), (0, None))(xs, o.y)[1], grad(energy)(-o.x, o.y))
    torch.testing.assert_close(grad(lambda xs: vmap(energy, (0, None))(xs, o.y).sum())(xs)[0], grad(energy)(o.x, o.y))
    with pytest.raises(OperandError, match=r"expected a dimension of torch\.vmap with one sample or more"):
        vmap(batch, (0, None, None))(xs[:0], o.y, o.w)


def test_vmap_over_graphs(device: torch.device) -> None:
    o = random_operands(SPEC, 4, 9, device=device)
    conv = TensorProductConv(SPEC).to(device)
    graphs = torch.stack([o.edge_index, o.edge_index.flip(0)])
    found = vmap(conv, (None, None, None, 0))(o.x, o.y, o.w, graphs)
    for result, graph in zip(found, graphs, strict=True):
        torch.testing.assert_close(result, conv(o.x, o.y, o.w, graph))


def test_gradients_outside_of_a_transform_flow_through_it(device: torch.device) -> None:
    """torch.func inside of a recorded computation: parameters that it closes over get their gradients."""
    product = Product(device, torch.float64)
    x, y, w = product.operands
    expected = torch.autograd.functional.hvp(lambda w: (product.ours(x, y, w) ** 2).sum(), w, w)[1]
    w = w.clone().requires_grad_()
    inner = grad(lambda v: (product.ours(x, y, v) ** 2).sum())(w)
    (found,) = torch.autograd.grad(inner, w, w.detach())
    torch.testing.assert_close(found, expected)
    tangent = jvp(lambda x: product.ours(x, y, w), (x,), (x,))[1]
    (found,) = torch.autograd.grad(tangent.sum(), w)
    torch.testing.assert_close(found, grad(lambda w: product.ours(x, y, w).sum())(w.detach()))


def test_tangents_in_scripted_modules(device: torch.device) -> None:
    product = Product(device, torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(product.module)
    x, y, w = product.operands
    for _ in range(3):  # TorchScript changes a program after it has seen it run
        with forward_ad.dual_level():
            z = scripted(forward_ad.make_dual(x, x), y, w, product.edge_index, 6)
            tangent = forward_ad.unpack_dual(z).tangent
        torch.testing.assert_close(tangent, product.ours(x, y, w))


@pytest.mark.slow
def test_compiled_transforms(device: torch.device) -> None:
    product = Product(device, torch.float64)
    _, y, w = product.operands

    def force(x: Tensor) -> Tensor:
        return grad(lambda x: (product.ours(x, y, w) ** 2).sum())(x)

    torch.compiler.reset()
    compiled = torch.compile(force, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(product.operands[0]), force(product.operands[0]))
