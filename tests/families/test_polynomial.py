"""eqaccel.Polynomial: values and derivatives against the float64 reference, and what operators owe torch."""

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
    with_another_coefficient,
)
from hosts import needs_hipcc, needs_nvrtc
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from eqaccel import Polynomial, PolynomialSpec, runtime, warmup
from eqaccel.codegen import COMMON, Direction
from eqaccel.errors import OperandError, SpecError
from eqaccel.families.polynomial import Term, execute_polynomial, polynomial_payload
from eqaccel.integrations.export.precompiled import add_entries, precompiled_entries
from eqaccel.targets import host_target


def random_spec(
    features: int = 7, weights: int = 5, outputs: int = 3, terms: int = 90, powers: int = 3
) -> PolynomialSpec:
    rng = np.random.default_rng(terms)

    def term() -> Term:
        chosen = rng.integers(0, features, rng.integers(1, powers + 1))
        return Term(
            int(rng.integers(outputs)), int(rng.integers(weights)), tuple(map(int, chosen)), float(rng.normal())
        )

    return PolynomialSpec(features, weights, outputs, tuple(term() for _ in range(terms)))


SPECS = {
    "cubic": random_spec(),
    "wide": random_spec(16, 13, 4, 400),
    "quadratic": random_spec(8, 4, 2, 20, 2),
    "linear": random_spec(4, 2, 3, 5, 1),
    "one": PolynomialSpec(1, 1, 1, (Term(0, 0, (0, 0, 0), -2.0),)),
    # Features 1 and 3, weight 2 and output 0 have no terms.
    "constant": PolynomialSpec(2, 2, 2, (Term(0, 0, (), 3.0), Term(0, 1, (0, 1), 0.5), Term(1, 1, (), -1.5))),
    "gaps": PolynomialSpec(4, 3, 2, (Term(1, 0, (2, 0, 2), 0.5), Term(1, 1, (0,), 3.0))),
}


def operands(spec: PolynomialSpec, rows: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, w, gz and the tangents a and c."""
    generator = torch.Generator().manual_seed(rows)
    widths = (spec.num_features, spec.num_weights, spec.num_outputs, spec.num_features, spec.num_weights)
    values = [torch.randn(rows, width, generator=generator, dtype=torch.float64) for width in widths]
    return [value.to(device, dtype).requires_grad_() for value in values]


def assert_matches(spec: PolynomialSpec, module: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
    """Compares z and all first and second derivatives with the reference, within what rounding may do."""
    x, w, gz, a, c = tensors
    z = module(x, w)
    gx, gw = grad(z, (x, w), gz, create_graph=True)
    second = grad((gx, gw), (gz, x, w), (a, c))
    found = {
        Direction.FORWARD: {"z": z},
        Direction.BACKWARD: {"gx": gx, "gw": gw},
        Direction.DOUBLE_BACKWARD: dict(zip(("z", "gx", "gw"), second, strict=True)),
    }
    arrays = [t.detach().double().cpu().numpy() for t in tensors]
    given = {"x": arrays[0], "w": arrays[1], "gz": arrays[2], "a": arrays[3], "c": arrays[4]}
    # A term is a product of at most five factors, coefficient included, and a sum of at most twelve such in double
    # backward; sums over terms add a rounding each.
    bound = (20 + len(spec.terms)) * torch.finfo(x.dtype).eps
    for direction, outputs in found.items():
        names = {"forward": ("x", "w"), "backward": ("x", "w", "gz")}.get(direction.value, tuple(given))
        chosen = {name: given[name] for name in names}
        right, absolute = (execute_polynomial(spec, direction, **chosen, absolute=flag) for flag in (False, True))
        for name, value in outputs.items():
            error = np.abs(value.detach().double().cpu().numpy() - getattr(right, name))
            assert (error <= bound * getattr(absolute, name)).all(), (direction, name)


@pytest.mark.parametrize("rows", [1, 37, 300])
@pytest.mark.parametrize("name", SPECS)
def test_values_and_derivatives(name: str, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    assert_matches(spec, Polynomial(spec).to(device), operands(spec, rows, device, dtype))


def test_no_rows(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["cubic"]
    x, w, gz, a, c = operands(spec, 0, device, dtype)
    z = Polynomial(spec).to(device)(x, w)
    first = grad(z, (x, w), gz, create_graph=True)
    second = grad(first, (gz, x, w), (a, c))
    assert [tuple(t.shape) for t in (z, *first, *second)] == [(0, 3), (0, 7), (0, 5), (0, 3), (0, 7), (0, 5)]


def test_operands_of_any_stride_and_offset(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["wide"]
    tensors = operands(spec, 40, device, dtype)
    strided = [t.detach().t().contiguous().t().requires_grad_() for t in tensors]
    shifted = [torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view_as(t).requires_grad_() for t in tensors]
    for variant in (strided, shifted):
        assert_matches(spec, Polynomial(spec).to(device), variant)


@pytest.mark.parametrize("name", ["cubic", "linear", "gaps", "constant"])
def test_derivatives_of_any_order(name: str, device: torch.device) -> None:
    spec = SPECS[name]
    x, w, *_ = operands(spec, 2, device, torch.float64)
    module = Polynomial(spec).to(device)

    def second(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = grad(module(x, w).square().sum(), (x, w), create_graph=True)
        return grad(sum(g.square().sum() for g in first), (x, w), create_graph=True)

    assert gradgradcheck(module, (x, w))
    assert gradcheck(second, (x, w))
    assert gradgradcheck(second, (x, w))


@pytest.mark.parametrize("name", ["cubic", "linear", "gaps", "constant"])
def test_weights_without_a_tangent(name: str, device: torch.device) -> None:
    """As the weights of a model have none in the gradient of its forces."""
    spec = SPECS[name]
    x, w, gz, a, c = operands(spec, 3, device, torch.float64)
    module = Polynomial(spec).to(device)

    def of_forces(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (first,) = grad(module(x, w).square().sum(), x, create_graph=True)
        return grad(first.square().sum(), (x, w), create_graph=True)

    assert gradcheck(of_forces, (x, w))
    assert gradgradcheck(of_forces, (x, w))
    operator = torch.ops.eqaccel.polynomial_double_backward
    found, expected = (
        operator(module.payload, module.key, gz, x, w, a, tangent, spec.num_outputs)
        for tangent in (c.new_empty(0), torch.zeros_like(c))
    )
    for value, right in zip(found, expected, strict=True):
        assert torch.equal(value, right)


def test_repeats_bitwise_in_any_company(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["wide"]
    module = Polynomial(spec).to(device)

    def run(chosen: slice) -> list[torch.Tensor]:
        x, w, gz, a, c = (t.detach()[chosen].requires_grad_() for t in operands(spec, 200, device, dtype))
        z = module(x, w)
        first = grad(z, (x, w), gz, create_graph=True)
        return [z, *first, *grad(first, (gz, x, w), (a, c))]

    assert_rows_stand_alone(run)


def test_opcheck(device: torch.device) -> None:
    spec = SPECS["cubic"]
    module = Polynomial(spec).to(device)
    x, w, gz, a, c = operands(spec, 4, device, torch.float64)
    rest = (spec.num_outputs,)
    torch.library.opcheck(torch.ops.eqaccel.polynomial.default, (module.payload, module.key, x, w, *rest))
    torch.library.opcheck(torch.ops.eqaccel.polynomial_backward.default, (module.payload, module.key, gz, x, w, *rest))
    torch.library.opcheck(
        torch.ops.eqaccel.polynomial_double_backward.default, (module.payload, module.key, gz, x, w, a, c, *rest)
    )
    features = [torch.randn(4, 8, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3)]
    form = torch.ops.eqaccel.polynomial_polar_form.default
    torch.library.opcheck(form, (module.payload, module.key, w, *features, 0, 3))
    torch.library.opcheck(form, (module.payload, module.key, gz, w, *features[:2], 4, 8))


def test_derivatives_of_any_order_are_traced(device: torch.device) -> None:
    spec = SPECS["cubic"]
    module = Polynomial(spec).to(device)
    x, w, *_ = operands(spec, 3, device, torch.float64)

    def fourth(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        inner = module(x, w).square().sum()
        for _ in range(4):
            inner = sum(g.square().sum() for g in grad(inner, (x, w), create_graph=True))
        return inner.detach()

    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(fourth, tracing_mode=mode, _allow_non_fake_inputs=True)(x, w)
        assert "eqaccel.polynomial_polar_form.default" in {str(node.target) for node in traced.graph.nodes}
        rows = 5 if mode == "symbolic" else 3
        others = operands(spec, rows, device, torch.float64)[:2]
        torch.testing.assert_close(traced(*others), fourth(*others))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"missing": 5}, "'missing' must be 0 to 4, got 5"),
        ({"columns": 2}, "'columns' must be 3, got 2"),
        ({"rows": 3}, "operand 2 must have 8 columns, and all the same rows"),
    ],
)
def test_polar_forms_that_do_not_fit(change: dict[str, int], message: str) -> None:
    module = Polynomial(SPECS["cubic"])
    given = {"missing": 0, "columns": 3, "rows": 4} | change
    factors = (torch.ones(4, 5), torch.ones(given["rows"], 8), torch.ones(4, 8), torch.ones(4, 8))
    with pytest.raises(RuntimeError, match=message):
        torch.ops.eqaccel.polynomial_polar_form(
            module.payload, module.key, *factors, given["missing"], given["columns"]
        )


def test_copies_and_wrappers(device: torch.device) -> None:
    spec = SPECS["cubic"]
    module = Polynomial(spec).to(device)
    x, w, *_ = operands(spec, 9, device, torch.float32)
    expected = module(x, w)
    assert not module.state_dict()
    for other in forms(module):
        assert torch.equal(other(x, w), expected)
        assert torch.equal(grad(other(x, w).sum(), x)[0], grad(module(x, w).sum(), x)[0])
    assert module.to("meta")(x.to("meta"), w.to("meta")).shape == (9, 3)


def test_autocast_keeps_single_precision(device: torch.device) -> None:
    spec = SPECS["cubic"]
    module = Polynomial(spec).to(device)
    x, w, *_ = operands(spec, 9, device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(module(x.bfloat16(), w), module(x.bfloat16().float(), w))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x[0], w), r"'x' must have shape \(rows, 7\)"),
        (lambda x, w: (x[:, 1:], w), r"'x' must have shape \(5, 7\), got \[5, 6\]"),
        (lambda x, w: (x, w[1:]), r"'w' must have shape \(5, 5\), got \[4, 5\]"),
        (lambda x, w: (x, w.double()), r"'w' must be Float"),
        (lambda x, w: (x.half(), w.half()), "'x' must be float32 or float64"),
    ],
)
def test_operands_that_do_not_fit(change, message: str, device: torch.device) -> None:
    spec = SPECS["cubic"]
    x, w, *_ = operands(spec, 5, device, torch.float32)
    with pytest.raises(OperandError, match=message):
        Polynomial(spec).to(device)(*change(x, w))
    with pytest.raises(RuntimeError, match=message):
        torch.jit.script(Polynomial(spec).to(device))(*change(x, w))


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (Term(3, 0, (0,), 1.0), r"terms\[0\].output: expected 0 to 2, got 3"),
        (Term(0, -1, (0,), 1.0), r"terms\[0\].weight: expected 0 to 4, got -1"),
        (Term(0, 0, (0, 7), 1.0), r"terms\[0\].features: expected 0 to 6, got 7"),
        (Term(0, 0, (1, 1, 1, 1), 1.0), "expected 3 of them at most"),
        (Term(0, 0, (0,), float("nan")), "expected a finite number"),
    ],
)
def test_terms_that_make_no_sense(term: Term, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PolynomialSpec(7, 5, 3, (term,))


def test_terms_are_sorted_and_joined() -> None:
    with pytest.raises(SpecError, match="at least one"):
        PolynomialSpec(1, 1, 1, ())
    spec = PolynomialSpec(3, 1, 1, (Term(0, 0, (2, 1), 1.5), Term(0, 0, (0,), 1.0), Term(0, 0, (1, 2), 0.5)))
    assert spec.terms == (Term(0, 0, (0,), 1.0), Term(0, 0, (1, 2), 2.0))
    assert polynomial_payload(spec)[1] == polynomial_payload(PolynomialSpec(3, 1, 1, spec.terms[::-1]))[1]


@pytest.mark.parametrize("direction", COMMON)
def test_wrong_kernels_are_refused(direction: Direction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path))
    assert_wrong_kernels_are_refused(polynomial_payload(SPECS["cubic"])[0], direction, with_another_coefficient)


def test_warmup_and_precompiling(device: torch.device) -> None:
    module = Polynomial(SPECS["quadratic"]).to(device)
    result = warmup(module, directions=("forward", "double_backward"), dtypes=torch.float64)
    assert [(k.direction, k.dtype) for k in result.kernels] == [
        (d, torch.float64) for d in ("forward", "double_backward")
    ]
    before = runtime.cache_stats()
    module(*operands(SPECS["quadratic"], 3, device, torch.float64)[:2])
    assert runtime.cache_stats() == before

    key, target = module.key, host_target().name
    add_entries(module, precompiled_entries(module.family, module.spec, "float32", (target,)))
    assert module.key != key
    precompiled = runtime.Program(module.payload.cpu().numpy().tobytes())
    for direction in ("forward", "backward"):
        assert runtime.compile_program(precompiled, "cpu", "float32", direction)["key"] == f"precompiled-{target}"
    assert_matches(module.spec, module.cpu(), operands(module.spec, 20, torch.device("cpu"), torch.float32))


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_cuda_kernels_compile(arch: str) -> None:
    for name in ("wide", "gaps"):
        content = polynomial_payload(SPECS[name])[0]
        for scalar, direction, used in cuda_resources(content, COMMON, arch):
            if scalar == "float32" and direction is not Direction.DOUBLE_BACKWARD:
                assert used["eq_rows"]["spill_store_bytes"] == 0


@needs_hipcc
@pytest.mark.parametrize("direction", COMMON)
def test_hip_text_compiles(direction: Direction, tmp_path: Path) -> None:
    assert_hip_text_compiles(polynomial_payload(SPECS["cubic"])[0], direction, tmp_path)
