"""Convolutions whose weights are rounded to bfloat16, against the reference with rounded weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eqaccel import MatrixProduct, TensorProduct, TensorProductConv, TensorProductSpec
from eqaccel.benchmarks.problems import PROBLEMS
from eqaccel.errors import OperandError
from eqaccel.ops import EdgePairs, Graph, LastProduct, Portions, convolve_pairs
from eqaccel.ops.library import call_operator
from eqaccel.testing import Operands, assert_close, assert_product, derivatives, random_operands, reference

# Whole vectors, parts of vectors, and rows of odd lengths; gradients of the third are several translation units.
SPECS = {
    "whole": TensorProductSpec.channelwise("32x0e+32x1o", "0e+1o", "32x0e+32x1o"),
    "ragged": TensorProductSpec.channelwise("19x0e+5x1o+3x2e", "0e+1o+2e", "19x0e+5x1o+3x2e"),
    "mp0-first": PROBLEMS["mp0-first"].spec,
}
NAMES = list(SPECS)


def rounded(w: Tensor) -> Tensor:
    return w.bfloat16().to(w.dtype)


def problem(name: str, dtype: torch.dtype, device: torch.device, exact: bool, **options: object) -> Operands:
    """Operands; with weights that are exact in bfloat16 if that is asked for."""
    operands = random_operands(SPECS[name], 9, 50, dtype=dtype, device=device, **options)
    return replace(operands, w=rounded(operands.w)) if exact else operands


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_exact_give_what_they_give_in_full(
    name: str, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    conv = TensorProductConv(SPECS[name].with_bfloat16_weights(), layout=layout).to(device)
    assert_product(conv, problem(name, dtype, device, exact=True), order=2)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_rounded_to_nearest(name: str, device: torch.device) -> None:
    """Gradients are those at the rounded weights; what they are by the weights is what they are by the rounded ones."""
    operands = problem(name, torch.float32, device, exact=False)
    conv = TensorProductConv(SPECS[name].with_bfloat16_weights()).to(device)
    inputs, exact = (operands.x, operands.y, operands.w), (operands.x, operands.y, rounded(operands.w))
    assert not torch.equal(inputs[2], exact[2])
    order = [[torch.randn(9, conv.z_dim, generator=torch.Generator().manual_seed(1)).to(device)]]
    found = derivatives(lambda *o: conv(*o, operands.edge_index, 9), inputs, order)

    def define(absolute: bool) -> list[Tensor]:
        values = [[t.double().abs() if absolute else t.double() for t in some] for some in (exact, *order)]
        function = lambda *o: reference(conv.spec, *o, operands.edge_index, 9, absolute=absolute)  # noqa: E731
        return derivatives(function, values[0], values[1:])

    assert_close(found, define(absolute=False), define(absolute=True))
    assert all(gradient.dtype == torch.float32 for gradient in found)


@pytest.mark.parametrize("name", NAMES)
def test_other_weights_give_the_bits_of_the_rounded_ones(name: str, device: torch.device) -> None:
    operands, rows = problem(name, torch.float32, device, exact=False), problem(name, torch.float32, device, exact=True)
    conv = TensorProductConv(SPECS[name].with_bfloat16_weights()).to(device)
    order = [[torch.ones(9, conv.z_dim, device=device)], [torch.ones_like(t) for t in (rows.x, rows.y, rows.w)]]
    results = [
        derivatives(lambda *o: conv(*o, operands.edge_index, 9), (given.x, given.y, given.w), order)
        for given in (operands, rows)
    ]
    assert all(map(torch.equal, *results))


def test_rows_of_a_batch_and_one_row_for_all(device: torch.device) -> None:
    spec = SPECS["ragged"]
    product = TensorProduct(spec.with_bfloat16_weights()).to(device)
    operands = random_operands(spec, 40, 40, batch=True, dtype=torch.float32, device=device)
    assert_product(product, replace(operands, w=rounded(operands.w)), order=2)
    one = random_operands(spec, 40, 40, batch=True, shared=True, dtype=torch.float32, device=device)
    assert_product(product, replace(one, w=rounded(one.w)), order=2)
    repeated = product(one.x, one.y, one.w.expand(40, -1))
    assert torch.equal(repeated, product(one.x, one.y, one.w))


def test_float64_is_not_rounded(device: torch.device) -> None:
    operands = problem("ragged", torch.float64, device, exact=False)
    arguments = (operands.x, operands.y, operands.w, operands.edge_index, 9)
    full, conv = (TensorProductConv(s).to(device) for s in (SPECS["ragged"], SPECS["ragged"].with_bfloat16_weights()))
    assert torch.equal(conv(*arguments), full(*arguments))


def test_scripted_and_compiled_modules_round_too() -> None:
    operands = problem("ragged", torch.float32, torch.device("cpu"), exact=False)
    conv = TensorProductConv(SPECS["ragged"].with_bfloat16_weights())
    arguments = (operands.x, operands.y, operands.w, operands.edge_index, 9)
    assert torch.equal(torch.jit.script(conv)(*arguments), conv(*arguments))


class Pairs:
    """A convolution over edges and their reverses, whose weights have a row for each pair."""

    def __init__(self, device: torch.device) -> None:
        self.num_atoms = 6
        near = torch.triu_indices(6, 6, 1)
        receiver, sender = torch.cat([near[0], near[1]]), torch.cat([near[1], near[0]])
        order = torch.argsort(receiver * 6 + sender)
        receiver, sender = receiver[order], sender[order]
        positions = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
        index = Graph(receiver, sender, 6, 6).index
        pairs = EdgePairs.find(positions[receiver] - positions[sender], index, 6)
        self.index, self.row = index.to(device), pairs.row.to(device)
        self.pairs = replace(pairs, row=self.row, edges=pairs.edges.to(device))
        generator = torch.Generator().manual_seed(2)
        spec = SPECS["ragged"]
        shapes = ((6, spec.x_dim), (30, spec.y_dim), (15, spec.weight_numel), (6, spec.z_dim))
        self.x, self.y, self.w, self.gz = (torch.randn(s, generator=generator).to(device) for s in shapes)
        self.conv = TensorProductConv(spec.with_bfloat16_weights()).to(device)

    def operands(self, w: Tensor) -> tuple[object, ...]:
        conv = self.conv
        return self.x, self.y, w, self.row, self.index, self.num_atoms, conv.z_dim, True, True


def test_rows_of_pairs_are_kept_in_bfloat16(device: torch.device) -> None:
    case = Pairs(device)
    conv, ops = case.conv, torch.ops.eqaccel
    whole = case.w[case.row.long()]
    results = []
    for w in (case.w, case.w.bfloat16()):
        z = call_operator(ops.tensor_product_shared, conv.payload, conv.key, *case.operands(w))
        gradients = ops.tensor_product_shared_backward(conv.payload, conv.key, case.gz, *case.operands(w))
        results.append([z, *gradients])
    assert all(map(torch.equal, *results))
    leaves = [t.clone().requires_grad_() for t in (case.x, case.y, whole)]
    z = conv(*leaves, case.index, case.num_atoms)
    assert all(map(torch.equal, results[0], [z.detach(), *torch.autograd.grad(z, leaves, case.gz)]))
    assert results[0][3].dtype == torch.float32
    full = TensorProductConv(SPECS["ragged"]).to(device)
    for refused in (case.w.half(), case.w.double()):
        with pytest.raises(OperandError, match="'w' must be"):
            call_operator(ops.tensor_product_shared, conv.payload, conv.key, *case.operands(refused))
    with pytest.raises(OperandError, match="'w' must be"):
        call_operator(ops.tensor_product_shared, full.payload, full.key, *case.operands(case.w.bfloat16()))


def test_a_convolution_keeps_half_of_the_bytes_of_its_weights() -> None:
    case = Pairs(torch.device("cpu"))
    product, matrix = MatrixProduct(), torch.randn(4, case.w.size(1), generator=torch.Generator().manual_seed(3))
    hidden = torch.randn(15, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    x, y = case.x.clone().requires_grad_(), case.y.clone().requires_grad_()
    last, portions = LastProduct(lambda rows: rows, product, matrix), Portions(case.pairs, case.index)
    z = convolve_pairs(case.conv, x, y, last, hidden, portions)
    assert portions.kept_bytes == 2 * case.w.numel()
    found = torch.autograd.grad(z, [x, y, hidden], case.gz)
    assert portions.kept_bytes == 0
    whole = product(hidden.detach(), matrix)[case.row.long()].requires_grad_()
    expected = case.conv(x, y, whole, case.index, case.num_atoms)
    gx, gy, gw = torch.autograd.grad(expected, [x, y, whole], case.gz)
    assert torch.equal(z, expected)
    assert torch.equal(found[0], gx)
    assert torch.equal(found[1], gy)
    of_pairs = (*case.pairs.source, product.payload, product.key, gw, matrix.t(), case.pairs.edges)
    assert torch.equal(found[2], torch.ops.eqaccel.multiply_pairs(*of_pairs))
