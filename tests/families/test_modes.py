"""Products of every connection mode: specs, references and kernels beside e3nn, with two derivatives."""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # e3nn 0.4 loads its constants by pickle

import copy
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from e3nn import o3
from mode_cases import CASES, random_case, random_options
from torch import Tensor

from eqaccel import TensorProduct, TensorProductConv, TensorProductSpec
from eqaccel.codegen import COMMON, OUTPUTS, Direction
from eqaccel.families.tensor_product import TENSOR_PRODUCT, gpu_plans
from eqaccel.families.tensor_product.pairs import WeightCopies
from eqaccel.targets import MACHINE_CLASSES
from eqaccel.testing import ERROR_CONSTANT, assert_product, derivatives, random_operands, reference

RANDOM = {f"random {seed}": random_case(seed) for seed in range(12)}
ALL = CASES | RANDOM
COMPILED = ("modes", "wide", "chunks", "few channels", "own channels", "few own channels", "shared own channels")
EPS = torch.finfo(torch.float64).eps


@pytest.fixture
def double() -> None:
    torch.set_default_dtype(torch.float64)  # e3nn keeps its coupling tensors in the default dtype


def _e3nn(name: str) -> o3.TensorProduct:
    return o3.TensorProduct(*ALL[name], internal_weights=False, shared_weights=False, **random_options(name))


@pytest.mark.parametrize("name", ALL)
def test_specs_are_those_of_e3nn(name: str) -> None:
    module, spec = _e3nn(name), TensorProductSpec(*ALL[name], **random_options(name))
    live = [item for item in module.instructions if 0 not in item.path_shape]
    assert [abs(path.coefficient) for path in spec.paths] == [item.path_weight for item in live]
    assert spec.weight_numel == module.weight_numel
    assert TensorProductSpec.from_e3nn(module) == spec


@pytest.mark.parametrize("name", ALL)
def test_references_compute_what_e3nn_computes(name: str, double: None) -> None:
    """The one of `eqaccel.testing`, with two derivatives; e3nn's tensors are rounded to a few eps of their norm, 1."""
    module = _e3nn(name)
    spec = TensorProductSpec.from_e3nn(module)
    operands = random_operands(spec, 3, 3, batch=True)
    inputs = (operands.x, operands.y, operands.w)
    generator = torch.Generator().manual_seed(1)
    z = torch.empty(3, spec.z_dim)
    directions = [[torch.randn(t.shape, generator=generator) for t in order] for order in ((z,), inputs)]
    found = derivatives(partial(reference, spec), inputs, directions)
    expected = derivatives(module, inputs, directions)
    sizes = derivatives(
        partial(_with_full_tensors, spec),
        [t.abs() for t in inputs],
        [[t.abs() for t in order] for order in directions],
    )
    for result, wanted, size in zip(found, expected, sizes, strict=True):
        assert ((result - wanted).abs() <= 2 * ERROR_CONSTANT * EPS * size).all()


def _with_full_tensors(spec: TensorProductSpec, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """The reference with coupling tensors that have the coefficient in every place, which bounds their errors too."""
    paths = []
    for path in spec.paths:
        full = copy.copy(path)
        object.__setattr__(full, "cg", lambda path=path: np.abs(path.cg()) + abs(path.coefficient))
        paths.append(full)
    filled = copy.copy(spec)
    object.__setattr__(filled, "paths", tuple(paths))
    return reference(filled, x, y, w)


@pytest.mark.parametrize("name", ALL)
def test_executor_computes_what_the_reference_says(name: str) -> None:
    spec = TensorProductSpec(*ALL[name])
    operands = random_operands(spec, 3, 7, num_senders=4)
    inputs = (operands.x, operands.y, operands.w)
    generator = torch.Generator().manual_seed(1)
    z = torch.empty(3, spec.z_dim)
    directions = [[torch.randn(t.shape, generator=generator).double() for t in order] for order in ((z,), inputs)]
    graph = {"edge_index": operands.edge_index, "num_receivers": 3}
    expected, sizes = (
        derivatives(
            partial(reference, spec, layout="ir_mul", absolute=absolute, **graph),
            [t.abs() for t in inputs] if absolute else inputs,
            [[t.abs() for t in order] for order in directions] if absolute else directions,
        )
        for absolute in (False, True)
    )
    arrays = dict(zip("xyw", (t.numpy() for t in inputs), strict=True))
    sender, receiver = operands.edge_index.numpy()
    arrays |= {"sender": sender, "receiver": receiver, "num_receivers": 3}
    for direction in COMMON:
        if direction is Direction.BACKWARD:
            arrays["gz"] = directions[0][0].numpy()
        elif direction is Direction.DOUBLE_BACKWARD:
            arrays |= dict(zip("abc", (t.numpy() for t in directions[1]), strict=True))
        found = TENSOR_PRODUCT.reference(spec, direction, **arrays)
        absolute = TENSOR_PRODUCT.reference(spec, direction, absolute=True, **arrays)
        for output in OUTPUTS[direction]:
            wanted, size = expected.pop(0).numpy(), sizes.pop(0).numpy()
            assert (np.abs(getattr(found, output) - wanted) <= 2 * ERROR_CONSTANT * EPS * size).all()
            np.testing.assert_allclose(getattr(absolute, output), size, rtol=2 * ERROR_CONSTANT * EPS)


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("name", COMPILED)
def test_kernels(name: str, layout: str, device: torch.device, dtype: torch.dtype) -> None:
    spec = TensorProductSpec(*ALL[name])
    product = TensorProduct(spec, layout=layout).to(device)
    assert_product(product, random_operands(spec, 5, 5, batch=True, dtype=dtype, device=device), order=3)
    for deterministic in (True, False):
        conv = TensorProductConv(spec, layout=layout, deterministic=deterministic).to(device)
        for receivers, edges, senders in ((4, 19, 5), (1, 1, 1), (3, 0, 2)):
            operands = random_operands(spec, receivers, edges, num_senders=senders, dtype=dtype, device=device)
            assert_product(conv, operands)
    shared = random_operands(spec, 4, 19, num_senders=5, shared=True, dtype=dtype, device=device)
    assert_product(conv, shared)


def test_rows_begin_anywhere(device: torch.device, dtype: torch.dtype) -> None:
    """Results are those of rows that begin at a multiple of 16 bytes, which engines of GPUs copy."""
    spec = TensorProductSpec(*CASES["chunks"])
    o = random_operands(spec, 4, 19, num_senders=5, dtype=dtype, device=device)
    conv = TensorProductConv(spec).to(device)

    def results(start: int) -> list[Tensor]:
        flat = [torch.empty(start + t.numel(), dtype=dtype, device=device)[start:] for t in (o.x, o.y, o.w)]
        inputs = [at.view_as(t).copy_(t).requires_grad_() for at, t in zip(flat, (o.x, o.y, o.w), strict=True)]
        z = conv(*inputs, o.edge_index)
        first = torch.autograd.grad(z.sin().sum(), inputs, create_graph=True)
        return [z, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]

    expected = results(0)
    for start in (1, 2, 3):
        assert all(map(torch.equal, results(start), expected))


@pytest.mark.parametrize("degree", [0, 1, 3, 8])
@pytest.mark.parametrize("direction", COMMON)
def test_tiles_fit_their_array(direction: Direction, degree: int) -> None:
    """Of many pairs, whose outputs have few channels and many components."""
    for mul3, scalar_bytes in itertools.product((1, 2, 5, 8, 12), (4, 8)):
        out = f"{mul3}x{degree}e+48x0e"
        spec = TensorProductSpec(f"48x{degree}e+64x0e", "1x0e", out, [(0, 0, 0, "uvw", True), (1, 0, 1, "uvw", True)])
        plan = gpu_plans(spec, direction, scalar_bytes)[0]
        for (shape, _), mixing in zip(plan.shapes, plan.mixings, strict=True):
            assert mixing.tile * plan.couplings[shape.coupling].dims[2] <= plan.span
            assert mixing.chunk * shape.muls[2] <= plan.chunk_elements


def test_paths_share_code_where_weights_come_in_chunks() -> None:
    """Those with 48 channels take the code of those with 10, which leave two pairs behind eight."""
    spec = TensorProductSpec("10x1o+48x0e", "0e+1o", "48x0e", [(0, 1, 0, "uvw", True), (1, 0, 0, "uvw", True)])
    chunks, *others = gpu_plans(spec, Direction.FORWARD, 4)
    assert chunks.weight_copies is WeightCopies.CHUNKS
    assert {(mixing.together, mixing.pairs) for mixing in chunks.mixings} == {(8, 10)}
    for plan in others:
        assert [mixing.pairs for mixing in plan.mixings] == [shape.pairs for shape, _ in plan.shapes]


@pytest.mark.parametrize("scalar_bytes", [4, 8])
@pytest.mark.parametrize("direction", COMMON)
def test_operands_are_copied_where_an_engine_does_it(direction: Direction, scalar_bytes: int) -> None:
    """Each class of machines has its own plan then; a product with few weights copies them forward alone. Backward, a
    lane mixes whole pairs where outputs have few channels."""
    many, few = (TensorProductSpec(*CASES[name]) for name in ("chunks", "modes"))
    plans = gpu_plans(many, direction, scalar_bytes)
    assert [plan.target for plan in plans] == list(MACHINE_CLASSES)
    assert [plan.weight_copies for plan in plans] == [WeightCopies.CHUNKS] + 3 * [WeightCopies.NONE]
    plan = plans[0]
    lanes = 32 // plan.edges
    for (shape, _), mixing in zip(plan.shapes, plan.mixings, strict=True):
        if direction is Direction.BACKWARD and shape.has_matrix and shape.muls[2] < lanes:
            assert (mixing.lanes, mixing.channels) == (1, shape.muls[2]), "a lane mixes whole pairs"
            assert mixing.chunk == shape.pairs or mixing.chunk % lanes == 0
        elif shape.has_matrix:
            assert mixing.lanes == lanes
        assert mixing.tile == shape.pairs or mixing.chunk == 0 or mixing.tile % mixing.chunk == 0
        assert mixing.chunk > 0 or not shape.has_matrix
        assert mixing.tile * plan.couplings[shape.coupling].dims[2] <= plan.span
    assert "of weights: chunks" in plan.explain()
    expected = WeightCopies.ROWS if direction is Direction.FORWARD else WeightCopies.NONE
    assert gpu_plans(few, direction, scalar_bytes)[0].weight_copies is expected
