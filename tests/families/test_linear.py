"""eqaccel.Linear: values and derivatives against the float64 reference, and what operators owe torch."""

from __future__ import annotations

import functools
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
    with_another_number,
)
from hosts import needs_hipcc, needs_nvrtc
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from eqaccel import Linear, LinearSpec, runtime, warmup
from eqaccel.codegen import Direction
from eqaccel.errors import OperandError, SpecError
from eqaccel.families.linear import LinearPath, execute_linear, linear_payload
from eqaccel.families.linear.payload import DIRECTIONS
from eqaccel.families.linear.plan import SHAPES, kernel_name
from eqaccel.integrations.export.precompiled import add_entries, precompiled_entries
from eqaccel.targets import TARGETS, host_target


def diagonal(irreps_in: str, irreps_out: str, attributes: int = 0) -> LinearSpec:
    """Each block to that of the same number."""
    blocks = range(irreps_in.count("x"))
    return LinearSpec(irreps_in, irreps_out, tuple(LinearPath(n, n, 0.5 + n) for n in blocks), attributes)


SPECS = {
    "one": diagonal("1x0e", "1x0e"),
    "plain": diagonal("16x0e+8x1o", "8x0e+16x1o"),
    "ragged": diagonal("7x0e+3x1o+5x2e+1x3o", "33x0e+2x1o+1x2e+6x3o"),
    # A block that nothing is read from, one that nothing goes to, and sums over two and three blocks.
    "joined": LinearSpec(
        "4x0e+3x1o+5x0e+2x2e+6x0e",
        "7x0e+3x3o+4x1o+5x0e",
        ((2, 0, 0.5), (0, 0, -1.5), (1, 2, 2.0), (4, 0, 0.25), (0, 3, 1.0)),
    ),
    "species": diagonal("16x0e+8x1o+4x2e", "8x0e+16x1o+4x2e", 3),
    "many": diagonal("5x0e+4x1o", "6x0e+3x1o", 70),
    "wide": diagonal("130x0e+70x1o", "129x0e+65x1o", 2),
    "high": diagonal("2x8e+3x10o", "3x8e+2x10o", 2),
    # Multiplicities at the borders of tiles and beyond.
    "edges": diagonal("128x0e+33x1o+3x2e+200x3o", "200x0e+128x1o+33x2e+3x3o", 5),
    "joined species": LinearSpec("4x1o+3x1o", "5x1o+2x1o", ((0, 0, 1.0), (1, 0, 0.5), (1, 1, -2.0)), 4),
}
KINDS = ("one-hot", "mixture", "sparse", "single")


def attributes_of(kind: str, rows: int, count: int) -> torch.Tensor:
    """Attributes of rows: one each, all of them, a few or none, or the same one."""
    generator = torch.Generator().manual_seed(rows + count)
    if kind == "mixture":
        return torch.randn(rows, count, generator=generator, dtype=torch.float64)
    if kind == "sparse":
        present = torch.rand(rows, count, generator=generator) < 0.3
        return present * torch.randn(rows, count, generator=generator, dtype=torch.float64)
    chosen = torch.randint(count, (rows,), generator=generator)
    return torch.nn.functional.one_hot(
        chosen if kind == "one-hot" else torch.full_like(chosen, count - 1), count
    ).double()


def operands(
    spec: LinearSpec, rows: int, device: torch.device, dtype: torch.dtype, kind: str = "one-hot"
) -> dict[str, torch.Tensor]:
    """x, w, y, gz and the tangents a, c and b of x, w and y."""
    generator = torch.Generator().manual_seed(rows)
    x_dim, z_dim = spec.irreps_in.dim, spec.irreps_out.dim
    shapes = {"x": (rows, x_dim), "w": (spec.weight_numel,), "gz": (rows, z_dim)}
    shapes |= {"a": (rows, x_dim), "c": (spec.weight_numel,), "b": (rows, spec.num_attributes)}
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    y = attributes_of(kind, rows, spec.num_attributes) if spec.num_attributes else torch.empty(rows, 0)
    return {name: value.to(device, dtype).requires_grad_() for name, value in {**values, "y": y}.items()}


def call(module: torch.nn.Module, t: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(t["x"], t["w"], t["y"]) if t["y"].shape[1] else module(t["x"], t["w"])


def right(spec: LinearSpec, direction: Direction, *, absolute: bool = False, **given: torch.Tensor) -> dict:
    """Results of the reference for given operands, by name."""
    arrays = {name: t.detach().double().cpu().numpy() for name, t in given.items()}
    result = execute_linear(spec, direction, **arrays, absolute=absolute)
    return {name: value for name, value in vars(result).items() if value is not None}


def second(spec: LinearSpec, t: dict[str, torch.Tensor], absolute: bool) -> dict[str, np.ndarray]:
    """Gradients of <a, gx> + <c, gw> + <b, gy> with respect to gz, x, w and y: sums of first ones."""
    sums: dict[str, np.ndarray] = {}
    for tangent, name in (("a", "x"), ("c", "w"), ("b", "y")):
        if name == "y" and not spec.num_attributes:
            continue
        swapped = {n: t[n] for n in ("x", "w", "y", "gz")} | {name: t[tangent]}
        forward = {n: swapped[n] for n in ("x", "w", "y")}
        parts = {"ggz": right(spec, Direction.FORWARD, absolute=absolute, **forward)["z"]}
        of_others = right(spec, Direction.BACKWARD, absolute=absolute, **swapped)
        parts |= {n: value for n, value in of_others.items() if n != f"g{name}"}
        for n, value in parts.items():
            sums[n] = sums.get(n, 0.0) + value
    return sums


def bound_of(spec: LinearSpec, rows: int, dtype: torch.dtype) -> float:
    """Relative to the sum of absolute values: a rounding for each term of the longest sum and each factor of a term."""
    widest = sum(block.mul for block in spec.irreps_in) + sum(block.mul for block in spec.irreps_out)
    components = max(block.ir.dim for block in spec.irreps_in)
    terms = max(widest * spec.num_matrices, rows * components, widest * components * len(spec.paths))
    return (terms + 8) * torch.finfo(dtype).eps


def assert_matches(spec: LinearSpec, module: torch.nn.Module, t: dict[str, torch.Tensor]) -> None:
    """Compares z and all first and second derivatives with the reference, within what rounding may do."""
    names = ["x", "w", "y"] if spec.num_attributes else ["x", "w"]
    z = call(module, t)
    first = grad(z, [t[name] for name in names], t["gz"], create_graph=True)
    tangents = [t[{"x": "a", "w": "c", "y": "b"}[name]] for name in names]
    further = grad(first, [t["gz"], *(t[name] for name in names)], tangents)
    found = [({"z": z}, right(spec, Direction.FORWARD, **{n: t[n] for n in ("x", "w", "y")}))]
    scales = [right(spec, Direction.FORWARD, absolute=True, **{n: t[n] for n in ("x", "w", "y")})]
    both = {n: t[n] for n in ("x", "w", "y", "gz")}
    found.append(({f"g{n}": g for n, g in zip(names, first, strict=True)}, right(spec, Direction.BACKWARD, **both)))
    scales.append(right(spec, Direction.BACKWARD, absolute=True, **both))
    found.append((dict(zip(["ggz", *(f"g{n}" for n in names)], further, strict=True)), second(spec, t, False)))
    scales.append(second(spec, t, True))
    bound = bound_of(spec, len(z), z.dtype)
    for (values, expected), scale in zip(found, scales, strict=True):
        for name, value in values.items():
            error = np.abs(value.detach().double().cpu().numpy() - expected[name])
            assert (error <= bound * scale[name]).all(), name


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("name", SPECS)
def test_values_and_derivatives(name: str, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    for kind in KINDS if spec.num_attributes else KINDS[:1]:
        assert_matches(spec, Linear(spec).to(device), operands(spec, rows, device, dtype, kind))


@pytest.mark.parametrize("rows", [5, 64, 65, 1000])
def test_rows_at_the_borders_of_blocks(rows: int, device: torch.device, dtype: torch.dtype) -> None:
    """Large and small blocks, in which rows of several attributes meet; one of these no row has."""
    spec = diagonal("128x0e+33x1o", "40x0e+128x1o", 5)
    module, t = Linear(spec).to(device), operands(spec, rows, device, dtype)
    with torch.no_grad():
        t["y"][:, 2] = 0
    assert_matches(spec, module, t)


@pytest.mark.parametrize("name", ["plain", "species"])
def test_no_rows(name: str, device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    t = operands(spec, 0, device, dtype)
    z = call(Linear(spec).to(device), t)
    gx, gw = grad(z, (t["x"], t["w"]), t["gz"], create_graph=True)
    ggz, ggw = grad((gx, gw), (t["gz"], t["w"]), (t["a"], t["c"]))
    assert [tuple(v.shape) for v in (z, gx, ggz)] == [tuple(t[n].shape) for n in ("gz", "x", "gz")]
    assert not gw.any()
    assert not ggw.any()


def test_rows_without_attributes_give_zero(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["species"]
    t = operands(spec, 9, device, dtype)
    with torch.no_grad():
        t["y"][::2] = 0
        z = call(Linear(spec).to(device), t)
    assert not z[::2].any()
    assert z[1::2].any(1).all()


def test_operands_of_any_stride_and_offset(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["species"]
    tensors = operands(spec, 40, device, dtype)
    strided = {n: t.detach().t().contiguous().t().requires_grad_() for n, t in tensors.items() if t.dim() == 2}
    repeated = {n: t.detach().repeat_interleave(2)[::2].requires_grad_() for n, t in tensors.items() if t.dim() == 1}
    shifted = {
        n: torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view_as(t).requires_grad_() for n, t in tensors.items()
    }
    for variant in ({**strided, **repeated}, shifted):
        assert_matches(spec, Linear(spec).to(device), variant)


@pytest.mark.parametrize("name", ["joined", "joined species"])
def test_derivatives_of_any_order(name: str, device: torch.device) -> None:
    spec = SPECS[name]
    t = operands(spec, 2, device, torch.float64, "mixture")
    module = Linear(spec).to(device)
    names = ("x", "w", "y") if spec.num_attributes else ("x", "w")

    def gradients(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad(module(*given).square().sum(), given, create_graph=True)

    given = [t[n] for n in names]
    assert gradgradcheck(module, given)
    assert gradcheck(gradients, given)
    assert gradgradcheck(gradients, given)


@pytest.mark.parametrize("name", ["plain", "many"])
def test_repeats_bitwise_in_any_company(name: str, device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    module = Linear(spec).to(device)
    kinds = KINDS if spec.num_attributes else KINDS[:1]

    def run(kind: str, chosen: slice) -> list[torch.Tensor]:
        t = {n: v.detach() for n, v in operands(spec, 200, device, dtype, kind).items()}
        t = {n: (v if v.dim() == 1 else v[chosen]).requires_grad_() for n, v in t.items()}
        z = call(module, t)
        return [z, *grad(z, t["x"], t["gz"])]

    for kind in kinds:
        assert_rows_stand_alone(functools.partial(run, kind))


def test_gradients_repeat_bitwise(device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS["species"]
    module, t = Linear(spec).to(device), operands(spec, 500, device, dtype)
    results = [grad(call(module, t), (t["w"], t["y"]), t["gz"]) for _ in range(3)]
    for result in results[1:]:
        assert all(torch.equal(value, first) for value, first in zip(result, results[0], strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["plain", "ragged", "species"])
def test_gradients_of_weights_do_without_threads(
    name: str, kind: str, device: torch.device, dtype: torch.dtype
) -> None:
    """They are the same bit for bit on any number of them."""
    spec, threads = SPECS[name], torch.get_num_threads()
    module, t = Linear(spec).to(device), operands(spec, 1500, device, dtype, kind)
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(grad(call(module, t), t["w"], t["gz"])[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("kind", ["one-hot", "sparse", "mixture"])
def test_gradients_of_weights_of_many_rows(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """There are so many of an attribute that a block of a GPU lists them more than once, or more rows than it lists."""
    spec = diagonal("4x0e+3x1o", "3x0e+4x1o", 40)
    t = operands(spec, 15_000, device, dtype, kind)
    found = grad(call(Linear(spec).to(device), t), t["w"], t["gz"])[0].double().cpu().numpy()
    given = {n: t[n] for n in ("x", "y", "gz")}
    expected, scale = (right(spec, Direction.DOUBLE_BACKWARD, absolute=flag, **given)["gw"] for flag in (False, True))
    assert (np.abs(found - expected) <= bound_of(spec, 15_000, dtype) * scale).all()


@pytest.mark.parametrize(("name", "rows"), [("plain", 5000), ("ragged", 65), ("edges", 1500), ("joined species", 3000)])
def test_rounding_of_gradients_of_weights(name: str, rows: int) -> None:
    """On a CPU an element is off by the products of a chunk and the chunks: `chunk` of the prelude.

    A product takes a rounding, one more where it is scaled by an attribute, and its sum one for each product of the
    chunk. Chunks are multiplied by the coefficient and added up, a rounding each.
    """
    spec, chunk = SPECS[name], 256
    t = operands(spec, rows, torch.device("cpu"), torch.float32, "mixture")
    chunks = -(-rows // chunk)
    components = max(block.ir.dim for block in spec.irreps_in)
    bound = (min(chunk, rows) * components + chunks + 4) * torch.finfo(torch.float32).eps / 2
    found = grad(call(Linear(spec), t), t["w"], t["gz"])[0].double().numpy()
    given = {n: t[n] for n in ("x", "y", "gz")}
    expected, scale = (right(spec, Direction.DOUBLE_BACKWARD, absolute=flag, **given)["gw"] for flag in (False, True))
    assert (np.abs(found - expected) <= 1.01 * bound * scale).all()  # products of roundings


@pytest.mark.gpu
def test_calls_are_captured(dtype: torch.dtype) -> None:
    """Which attributes occur is not known to the host: other ones are right in a replay."""
    device = torch.device("cuda")
    spec = SPECS["species"]
    module = Linear(spec).to(device)
    t = {n: v.detach() for n, v in operands(spec, 300, device, dtype).items()}
    x = t["x"].requires_grad_()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        z = module(x, t["w"], t["y"])
        return z, grad(z, x, t["gz"])[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    t["y"].copy_(t["y"].roll(1, 1))
    graph.replay()
    for value, expected in zip(results, step(), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("name", ["plain", "species"])
def test_opcheck(name: str, device: torch.device) -> None:
    spec = SPECS[name]
    module = Linear(spec).to(device)
    t = operands(spec, 4, device, torch.float64, "mixture")
    given = [t[n] for n in ("x", "y", "w", "gz")]
    for missing, like in enumerate(given):
        if like.numel():
            factors = [operand for number, operand in enumerate(given) if number != missing]
            columns = like.shape[-1]
            operator = torch.ops.eqaccel.linear.default
            torch.library.opcheck(operator, (module.payload, module.key, *factors, missing, columns))


@pytest.mark.parametrize("missing", range(4))
def test_nothing_is_computed_without_kernels(missing: int, device: torch.device) -> None:
    """Gradients of weights neither."""
    module = Linear(SPECS["species"]).to("meta")
    rows = torch.ones(4, 3, device=device)
    with pytest.raises(RuntimeError, match=r"all operands on the device 'meta', or none, got one on"):
        torch.ops.eqaccel.linear(module.payload, module.key, rows, rows, rows, missing, 5)


def test_derivatives_of_any_order_are_traced(device: torch.device) -> None:
    spec = SPECS["joined species"]
    module = Linear(spec).to(device)

    def third(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        given = [t.detach().requires_grad_() for t in (x, w, y)]
        inner = module(*given).square().sum()
        for _ in range(3):
            inner = sum(g.square().sum() for g in grad(inner, given, create_graph=True))
        return inner.detach()

    def some(rows: int) -> list[torch.Tensor]:
        t = operands(spec, rows, device, torch.float64, "mixture")
        return [t[n] for n in ("x", "w", "y")]

    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(third, tracing_mode=mode, _allow_non_fake_inputs=True)(*some(3))
        assert "eqaccel.linear.default" in {str(node.target) for node in traced.graph.nodes}
        others = some(5 if mode == "symbolic" else 3)
        torch.testing.assert_close(traced(*others), third(*others))


@pytest.mark.parametrize("name", ["plain", "species"])
def test_copies_and_wrappers(name: str, device: torch.device) -> None:
    spec = SPECS[name]
    module = Linear(spec).to(device)
    t = operands(spec, 9, device, torch.float32)
    expected = call(module, t)
    assert not module.state_dict()
    for other in forms(module):
        assert torch.equal(call(other, t), expected)
        assert torch.equal(grad(call(other, t).sum(), t["x"])[0], grad(call(module, t).sum(), t["x"])[0])
    assert call(module.to("meta"), {n: v.to("meta") for n, v in t.items()}).shape == expected.shape


def test_autocast_keeps_single_precision(device: torch.device) -> None:
    spec = SPECS["plain"]
    module = Linear(spec).to(device)
    t = operands(spec, 9, device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(module(t["x"].bfloat16(), t["w"]), module(t["x"].bfloat16().float(), t["w"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, y: (x[0], w, y), r"'x' must have shape \(rows, columns\)"),
        (lambda x, w, y: (x[:, 1:], w, y), r"'x' must have shape \(5, 60\), got \[5, 59\]"),
        (lambda x, w, y: (x, w[1:], y), r"'w' must have shape \(816,\), got \[815\]"),
        (lambda x, w, y: (x, w, y[1:]), r"'y' must have shape \(5, 3\), got \[4, 3\]"),
        (lambda x, w, y: (x, w), r"'y' must have shape \(5, 3\), got \[5, 0\]"),
        (lambda x, w, y: (x, w.double(), y), r"'w' must be Float"),
        (lambda x, w, y: (x.half(), w.half(), y.half()), "'x' must be float32 or float64"),
    ],
)
def test_operands_that_do_not_fit(change, message: str, device: torch.device) -> None:
    spec = SPECS["species"]
    t = operands(spec, 5, device, torch.float32)
    given = change(t["x"], t["w"], t["y"])
    with pytest.raises(OperandError, match=message):
        Linear(spec).to(device)(*given)
    with pytest.raises(RuntimeError, match=message):
        torch.jit.script(Linear(spec).to(device))(*given)


@pytest.mark.parametrize(
    ("missing", "columns", "message"),
    [(4, 60, "'missing' must be 0 to 3, got 4"), (3, 2, "'columns' must be 60, as in the payload, got 2")],
)
def test_forms_that_there_are_not(missing: int, columns: int, message: str) -> None:
    module = Linear(diagonal("60x0e", "60x0e"))
    with pytest.raises(RuntimeError, match=message):
        torch.ops.eqaccel.linear(
            module.payload, module.key, torch.ones(1, 60), torch.ones(1, 0), torch.ones(3600), missing, columns
        )


@pytest.mark.parametrize(
    ("path", "attributes", "message"),
    [
        ((3, 0, 1.0), 0, r"paths\[0\].source: expected 0 to 2, got 3"),
        ((0, -1, 1.0), 0, r"paths\[0\].target: expected 0 to 2, got -1"),
        ((0, 1, 1.0), 0, r"paths\[0\]: expected irreps of one degree, got 0e and 1o"),
        ((0, 0, float("inf")), 0, r"paths\[0\].coefficient: expected a finite number"),
        ((2, 2, 1.0), 0, r"paths\[0\]: expected irreps of 256 components at most, got 128e"),
        ((0, 0, 1.0), -1, "num_attributes: expected 0 or more, got -1"),
        (None, 0, "paths: expected at least one with weights"),
    ],
)
def test_maps_that_make_no_sense(path: tuple[int, int, float] | None, attributes: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        LinearSpec("2x0e+2x1o+1x128e", "2x0e+2x1o+1x128e", () if path is None else (path,), attributes)


@pytest.mark.parametrize("name", ["joined", "species"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_wrong_kernels_are_refused(
    name: str, direction: Direction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel is known to be right for another spec, whose tables it served before."""
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path))
    entry = f"tables/cpu/{direction.value}"
    assert_wrong_kernels_are_refused(linear_payload(SPECS[name])[0], direction, with_another_number, entry)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_kernel_serves_all_maps(direction: Direction, cache_folder: Path) -> None:
    """Each map is checked with its own tables, once."""
    of_no_other_test = LinearSpec("3x0e", "2x0e", ((0, 0, 0.7310585),))  # a process remembers what it has checked
    first, second = (runtime.Program(linear_payload(spec)[0]) for spec in (SPECS["joined"], of_no_other_test))
    made = runtime.compile_program(first, "cpu", "float64", direction.value)
    found = runtime.compile_program(second, "cpu", "float64", direction.value)
    assert (made["key"], made["cached"], found["cached"]) == (found["key"], False, True)
    checks = [file.name for file in cache_folder.glob("*.ok")]
    assert len(checks) == 1
    runtime.compile_program(second, "cpu", "float64", direction.value)
    assert [file.name for file in cache_folder.glob("*.ok")] == checks


def test_warmup_and_precompiling(device: torch.device) -> None:
    spec = SPECS["species"]
    module = Linear(spec).to(device)
    result = warmup(module, directions=[d.value for d in DIRECTIONS], dtypes=torch.float64)
    assert [(k.direction, k.dtype) for k in result.kernels] == [(d.value, torch.float64) for d in DIRECTIONS]
    before = runtime.cache_stats()
    assert_matches(spec, module, operands(spec, 3, device, torch.float64))
    assert runtime.cache_stats() == before

    key, target = module.key, host_target().name
    add_entries(module, precompiled_entries(module.family, spec, "float32", (target,)))
    assert module.key != key
    precompiled = runtime.Program(module.payload.cpu().numpy().tobytes())
    for direction in DIRECTIONS[:2]:  # exported files need no gradients of weights
        compiled = runtime.compile_program(precompiled, "cpu", "float32", direction.value)
        assert compiled["key"] == f"precompiled-{target}"
    assert_matches(spec, module.cpu(), operands(spec, 20, torch.device("cpu"), torch.float32))


MODEL = "128x0e+128x1o+128x2e+128x3o"


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_cuda_kernels_compile(arch: str) -> None:
    """Forward and backward are of the same text."""
    directions = DIRECTIONS if arch == "sm_90" else (Direction.FORWARD, *DIRECTIONS[2:])
    both_squares = diagonal("64x0e+64x1o+32x2e", "64x0e+64x1o+32x2e")
    others = [diagonal(MODEL, MODEL), both_squares, SPECS["ragged"]]
    of_rows, of_weights = [*map(kernel_name, range(len(SHAPES[4])))], ["eq_linear_weights", "eq_linear_weights_sum"]
    kernels = dict.fromkeys(DIRECTIONS[:2], of_rows) | dict.fromkeys(DIRECTIONS[2:], of_weights)
    for spec in (diagonal(MODEL, MODEL, 89), *(others if arch == "sm_90" else [])):
        for _, direction, resources in cuda_resources(linear_payload(spec)[0], directions, arch):
            for kernel in kernels[direction]:
                used = resources[kernel]
                assert used["spill_store_bytes"] == 0
                # As much as there is without being asked; none is not named.
                assert used.get("shared_bytes", 0) <= min(48 * 1024, TARGETS[arch].shared_bytes)


@needs_hipcc
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_hip_text_compiles(direction: Direction, tmp_path: Path) -> None:
    assert_hip_text_compiles(linear_payload(SPECS["species"])[0], direction, tmp_path)
