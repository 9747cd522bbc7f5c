"""Memory of large results on the CPU: given back, taken again, never shared by two tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from eqaccel import MatrixProduct, TensorProduct, TensorProductSpec

SPEC = TensorProductSpec.channelwise("32x0e+32x1o", "0e+1o", "32x0e+32x1o")


def _output(rows: int) -> torch.Tensor:
    return TensorProduct(SPEC)(
        torch.ones(rows, SPEC.x_dim), torch.ones(rows, SPEC.y_dim), torch.ones(rows, SPEC.weight_numel)
    )


def _product(rows: int, columns: int) -> torch.Tensor:
    return MatrixProduct()(torch.ones(rows, 1), torch.ones(1, columns))


@pytest.fixture(autouse=True)
def older_blocks_are_stale() -> None:
    """What other tests have given back makes room first: more results than a stale block has seen did without it."""
    for _ in range(210):
        _product(1 << 10, 1 << 10)


def test_memory_of_a_result_is_taken_again_for_one_of_about_its_size() -> None:
    first = _output(20_000)
    address, wanted = first.data_ptr(), first.clone()
    second = _output(20_000)
    assert second.data_ptr() != address  # the first one is still alive
    second.zero_()
    assert torch.equal(first, wanted)
    del first
    third = _output(20_100)
    assert third.data_ptr() == address
    assert torch.equal(third[:20_000], wanted)


LARGER_SYSTEM = """
import resource
import torch
from eqaccel import MatrixProduct

product = MatrixProduct()
column, row = torch.ones(1 << 16, 1), torch.ones(1, 1 << 12)

def faults(rows):
    # A row of the result is 16 KiB. Operands are there already, and what the product packs is some pages of 4 KiB.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    product(column[:rows], row)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(1 << 16)
mapped = [faults(1 << 12) for _ in range(3)]
for _ in range(210):
    faults(1 << 8)
kept = [faults(1 << 12) for _ in range(3)]
assert min(kept) < min(mapped) / 2, (mapped, kept)
"""


def test_memory_of_a_larger_system_makes_room() -> None:
    """One block, which later results do not take, is all that is kept; each of theirs would be mapped again.

    In a process of its own: in others there may be room in what malloc holds.
    """
    subprocess.run([sys.executable, "-c", LARGER_SYSTEM], check=True)


def test_memory_of_matrix_products_is_taken_again() -> None:
    where = _product(70_000, 320).data_ptr()
    assert _product(70_000, 320).data_ptr() == where


def test_a_view_keeps_the_memory() -> None:
    whole = _output(20_000)
    view, wanted = whole[5:7], whole[5:7].clone()
    del whole
    _output(20_000).zero_()
    assert torch.equal(view, wanted)


def test_results_are_ordinary_tensors() -> None:
    result = _output(20_000)
    assert result.data_ptr() % 64 == 0
    assert result.is_contiguous()
    assert result.share_memory_().is_shared()


def test_results_are_resized_as_those_of_torch_are() -> None:
    first = _output(26_000)
    address, wanted, size = first.data_ptr(), first.clone(), first.shape
    first.resize_(40_000, size[1])
    assert torch.equal(first[:26_000], wanted)
    first.zero_()
    second = _output(26_000)
    assert second.data_ptr() == address  # what was resized has given its memory back
    assert torch.equal(second, wanted)
    torch.add(wanted, wanted, out=second.resize_(0))
    assert torch.equal(second, 2 * wanted)
    third, other = _output(26_000), torch.ones(3)
    third.set_(other)
    assert third.data_ptr() == other.data_ptr()
    third.untyped_storage().resize_(0)
    assert third.untyped_storage().size() == 0
