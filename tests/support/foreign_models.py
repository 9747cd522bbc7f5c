"""Models that compute more than the classes of their library do, which nothing may stand in for."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from stepping_checks import assert_same, results_of

import eqaccel
from eqaccel.errors import CalculatorError, ExportError


def halve_outputs(module: Any, fields: tuple[str, ...], name: str | None = None) -> None:
    """Has a module halve some of what it gives, by a class of its own, which has the same name if none is told."""
    came_as: Any = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = came_as.forward(self, *args, **kwargs)
        for field in fields:
            if isinstance(found.get(field), torch.Tensor):
                found[field] = 0.5 * found[field]
        return found

    module.__class__ = type(name or came_as.__name__, (came_as,), {"forward": forward})


def assert_goes_the_ordinary_way(fast: Any, plain: Any, known: Any, atoms: Atoms, reason: str, dtype: str) -> None:
    """A patched calculator gives what the plain one gives of the same model, and not what it is without the change.

    Args:
        fast: The calculator, patched.
        plain: The calculator, of the same model.
        known: The calculator of the model without the change.
        atoms: A structure.
        reason: What a report says.
        dtype: That of the model.
    """
    found, expected = results_of(fast, atoms), results_of(plain, atoms)
    assert np.abs(expected["forces"] - results_of(known, atoms)["forces"]).max() > 1e-3
    assert_same(found, expected, dtype)
    row = eqaccel.report(fast).rows[0]
    assert not row.accelerated
    assert re.search(reason, row.note)


def assert_nothing_stands_in(model: torch.nn.Module, reason: str, path: Any) -> None:
    """`eqaccel.Calculator` and `eqaccel.export` refuse a model, and say why."""
    with pytest.raises(CalculatorError, match=reason) as caught:
        eqaccel.Calculator(model, verify=False, device="cpu")
    assert "nothing added to it" not in str(caught.value)  # nothing that may be taken away is meant
    with pytest.raises(ExportError, match=reason):
        eqaccel.export(eqaccel.patch(model, verify=False), path)
    assert not path.exists()
