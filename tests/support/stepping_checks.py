"""What the tests of patched calculators of libraries share: their results, and what holds for each of them."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from ase import Atoms

import eqaccel
from eqaccel.ops import EdgePairs, Neighbors, WeightLimits
from eqaccel.patches import program
from eqaccel.patches.calculator import step_state
from eqaccel.patches.rounding import ROUNDING


def patched(target: Any) -> Any:
    """Without verification of the model, which has tests of its own and takes seconds."""
    return eqaccel.patch(target, verify=False)


def results_of(calculator: Any, atoms: Atoms) -> dict[str, Any]:
    """All results of a structure, computed anew."""
    calculator.reset()
    calculator.calculate(atoms)
    return dict(calculator.results)


def assert_same(fast: dict[str, Any], plain: dict[str, Any], dtype: str) -> None:
    """Every result is of the same kind, and differs by the rounding of a network; energies are sums over atoms."""
    assert fast.keys() == plain.keys()
    bound, work = ROUNDING * np.finfo(dtype).eps, 10 * float(np.abs(plain["forces"]).sum())
    for name, value in plain.items():
        other = fast[name]
        assert type(other) is type(value), name
        assert np.asarray(other).dtype == np.asarray(value).dtype, name
        assert np.shape(other) == np.shape(value), name
        scale = np.abs(value).sum() + (work if "energ" in name else 0.0)
        assert np.abs(np.asarray(other) - value).max() <= bound * scale, name


def assert_all_properties(fast: Any, plain: Any, structures: list[Atoms], dtype: str) -> None:
    """A patched calculator gives what the plain one gives, of structures that move, by steps of its own."""
    assert type(fast).__name__ == type(plain).__name__
    assert isinstance(fast, type(plain))
    for atoms in structures:
        for number in range(2):
            atoms.positions += 0.05 * np.random.default_rng(number).normal(size=atoms.positions.shape)
            assert_same(results_of(fast, atoms), results_of(plain, atoms), dtype)
    assert step_state(fast).calls == 2 * len(structures)
    assert "once a pair" in step_state(fast).note()
    assert eqaccel.report(fast).rows[0].accelerated


def assert_same_in_pieces(fast: Any, structures: Iterable[Atoms], dtype: str) -> None:
    """Edges that are computed in many pieces give the same: in ranges of pairs, and in those of atoms without pairs."""
    for atoms in structures:
        step_state(fast).drop()
        whole = results_of(fast, atoms)
        step = step_state(fast).step
        step.limits = WeightLimits(3000, 0)
        for has_pairs in (True, False):
            step._capture = None
            with nullcontext() if has_pairs else without_pairs():
                found, again = results_of(fast, atoms), results_of(fast, atoms)
            assert step.shares_weights == has_pairs
            assert_same(found, whole, dtype)
            assert all(np.array_equal(found[name], again[name]) for name in found)
    step_state(fast).drop()


def assert_programs_are_the_same(fast: Any, structures: list[Atoms]) -> None:
    """On a CPU, what is called often is a program that gives the same bits, until the model changes."""

    def results(worth: int) -> list[dict[str, Any]]:
        """Of structures that move, with a program after so many calls."""
        step_state(fast).drop()
        found = []
        with patch.object(program, "WORTH_A_PROGRAM", worth):
            for number, atoms in enumerate(structures * 2):
                moved = atoms.copy()
                moved.positions += 0.05 * np.random.default_rng(number).normal(size=atoms.positions.shape)
                found.append(results_of(fast, moved))
        return found

    for has_pairs in (True, False):
        with nullcontext() if has_pairs else without_pairs():
            python = results(1000)
            assert "Python" not in step_state(fast).note()
            for found, expected in zip(results(1), python, strict=True):
                assert all(np.array_equal(found[name], expected[name]) for name in expected)
            assert "run as a program without Python" in step_state(fast).note()
    before = results_of(fast, structures[0])
    with torch.no_grad():
        for parameter in step_state(fast).stepping.models(fast)[0].parameters():
            parameter.mul_(1.1)
    after = results_of(fast, structures[0])
    assert "program" not in step_state(fast).note()
    assert np.abs(after["forces"] - before["forces"]).max() > 1e-6


@contextmanager
def without_pairs() -> Iterator[None]:
    """No edge has a known reverse within."""
    with patch.object(EdgePairs, "find", lambda *_: None), patch.object(Neighbors, "pairs", lambda *_: None):
        yield


def assert_copies(fast: Any, plain_class: type, atoms: Atoms, dtype: str) -> None:
    """Copies and pickles compute by steps of their own, and can be unpatched."""
    expected = results_of(fast, atoms)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert_same(results_of(twin, atoms), expected, dtype)
        assert step_state(twin).calls == 1
        assert_same(results_of(eqaccel.unpatch(twin), atoms), expected, dtype)
        assert type(twin) is plain_class


def assert_changes_are_noticed(fast: Any, plain: Any, atoms: Atoms, least: float, dtype: str) -> None:
    """Weights that change in place change the energy, by more than `least`, as they change it without a patch."""
    before = results_of(fast, atoms)
    for calculator in (plain, fast):
        with torch.no_grad():
            for parameter in calculator.model.parameters():
                parameter.mul_(1.01)
    expected = results_of(plain, atoms)
    assert abs(expected["energy"] - before["energy"]) > least
    assert_same(results_of(fast, atoms), expected, dtype)


_LIVE = re.compile(r"(scale|shift|scales|shifts|atomic_energies|a_exp|a_prefactor|alpha)$")
"""Buffers that are numbers of a model, and no coefficients that kernels are made of."""


def _through_data(tensor: torch.Tensor) -> None:
    tensor.data.copy_(tensor.data * 1.05)


def _through_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[...] *= 1.05


def assert_uncounted_writes_are_noticed(
    fast: Any, plain: Any, model_of: Callable[[Any], torch.nn.Module], atoms: Atoms, least: float, dtype: str
) -> None:
    """What is written past torch's count of versions changes the results, as without a patch, on any way of computing.

    Args:
        fast: A patched calculator.
        plain: The same, not patched.
        model_of: The model of a calculator.
        atoms: A structure.
        least: What energies change by at least.
        dtype: That of the model.
    """
    is_on_cpu = next(model_of(fast).parameters()).is_cpu
    for worth in (1000, 2):
        with patch.object(program, "WORTH_A_PROGRAM", worth):
            step_state(fast).drop()
            before, step = [results_of(fast, atoms) for _ in range(3)][-1], step_state(fast).step
            assert ("run as a program without Python" in step_state(fast).note()) == (worth == 2 and is_on_cpu)
            for write in (_through_data, _through_numpy)[: 1 + is_on_cpu]:
                for calculator in (plain, fast):
                    model = model_of(calculator)
                    buffers = [buffer for name, buffer in model.named_buffers() if _LIVE.search(name)]
                    for tensor in (*model.parameters(), *buffers):
                        write(tensor)
                expected = results_of(plain, atoms)
                assert abs(expected["energy"] - before["energy"]) > least
                before = results_of(fast, atoms)
                assert_same(before, expected, dtype)
            assert step_state(fast).step is step  # which reads the model where it is
