"""The Morton order: what it is bit by bit, and what it is for."""

import numpy as np
import pytest
import torch

from eqaccel import morton_order
from eqaccel.errors import OperandError


def interleaved(steps):
    """The code of three whole numbers, from its definition."""
    return sum(((int(step) >> bit) & 1) << (3 * bit + 2 - axis) for bit in range(21) for axis, step in enumerate(steps))


def test_codes_are_interleaved_bits(device):
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(2**21, (300, 3), generator=generator)
    steps[0], steps[1] = 0, 2**21 - 1  # spans the box, so that positions are these steps
    positions = (steps.double() + 0.5).to(device)
    positions[0], positions[1] = 0.0, 2.0**21
    order = morton_order(positions)
    assert (order.dtype, order.device.type) == (torch.int64, device.type)
    codes = [interleaved(row) for row in steps]
    assert order.tolist() == sorted(range(300), key=codes.__getitem__)


def test_numpy_and_torch_agree():
    rng = np.random.default_rng(0)
    positions, cell = rng.normal(0, 20, (500, 3)), np.eye(3) * 9 + rng.normal(0, 1, (3, 3))
    for box in (None, cell):
        order = morton_order(positions, box)
        assert isinstance(order, np.ndarray)
        assert np.array_equal(np.sort(order), np.arange(500))
        tensor = morton_order(torch.tensor(positions), None if box is None else torch.tensor(box))
        assert torch.equal(torch.from_numpy(order), tensor)


def test_lattice_translations_do_not_matter():
    rng = np.random.default_rng(1)
    cell = np.diag([8.0, 16.0, 32.0])  # of powers of two, so that translations are exact
    positions = rng.integers(0, 2**10, (400, 3)) / 2**10 * np.diag(cell)
    moved = positions + rng.integers(-2, 3, (400, 3)) @ cell
    assert np.array_equal(morton_order(positions, cell), morton_order(moved, cell))


def test_neighbours_in_space_become_neighbours_in_memory():
    rng = np.random.default_rng(2)
    positions = rng.uniform(0, 1, (4096, 3))
    near = np.linalg.norm(positions[:, None] - positions, axis=-1) < 0.06
    rank = np.argsort(morton_order(positions))
    distance = np.abs(rank[:, None] - rank)[near].mean()
    unsorted = np.abs(np.subtract.outer(np.arange(4096), np.arange(4096)))[near].mean()
    assert distance < unsorted / 4


@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_atoms_and_atoms_in_one_place(count):
    assert morton_order(torch.ones(count, 3)).tolist() == list(range(count))
    assert morton_order(torch.ones(count, 3), torch.eye(3)).tolist() == list(range(count))


def test_positions_may_need_gradients():
    assert not morton_order(torch.rand(5, 3, requires_grad=True)).requires_grad


def test_wrong_shapes():
    with pytest.raises(OperandError, match=r"positions: expected shape \(num_atoms, 3\), got \(4, 2\)"):
        morton_order(torch.zeros(4, 2))
    with pytest.raises(OperandError, match=r"cell: expected shape \(3, 3\), got \(3,\)"):
        morton_order(np.zeros((4, 3)), np.ones(3))
