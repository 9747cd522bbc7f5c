"""What the tests of patched models share, whatever the family: a bound, and convolutions that are wrong on purpose."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from eqaccel import patch, report
from eqaccel.errors import SpecError
from eqaccel.patches import convolution
from eqaccel.patches.rounding import FACTOR, ROUNDING

RELATIVE = FACTOR * ROUNDING * torch.finfo(torch.float64).eps
"""Bound of float64 comparisons, relative to the largest entry, to which contributions may have cancelled."""


def patched(model: torch.nn.Module) -> torch.nn.Module:
    """Patches without the verification, which has tests of its own."""
    return patch(model, verify=False)


def assert_close(value: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> None:
    assert value.shape == expected.shape
    scale = max(float(expected.detach().abs().max()), floor)
    assert float((value - expected).detach().abs().max()) <= RELATIVE * scale


def assert_on(model: torch.nn.Module, device: str) -> None:
    """All tensors of a model are on one device."""
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {device}


def assert_same_gradients(values: tuple[torch.Tensor | None, ...], expected: tuple[torch.Tensor | None, ...]) -> None:
    """Gradients of one loss in all parameters, from two models; None where a parameter does not take part."""
    assert [g is None for g in values] == [g is None for g in expected]
    present = [(value, wanted) for value, wanted in zip(values, expected, strict=True) if wanted is not None]
    # A gradient far smaller than the others is what is left of sums as large as theirs.
    floor = 1e-3 * max(float(wanted.abs().max()) for _, wanted in present)
    for value, wanted in present:
        assert_close(value, wanted, floor)


class Wrong(convolution.TensorProductConv):
    """A convolution that is off by a little."""

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return super().forward(*args, **kwargs) * 1.001


class Unequivariant(convolution.TensorProductConv):
    """A convolution whose output depends on the frame only, through its last component."""

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return super().forward(*args, **kwargs).index_fill(1, torch.tensor([self.z_dim - 1]), 0.0)


class DetachedWeights(convolution.TensorProductConv):
    """A convolution with right values and wrong derivatives."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *graph: object) -> torch.Tensor:
        return super().forward(x, y, w.detach(), *graph)


class Broken(convolution.TensorProductConv):
    """A convolution that cannot run."""

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        raise ArithmeticError("no kernel")


def duplicated(module: torch.nn.Module, how: str) -> torch.nn.Module:
    """A copy by "deepcopy", or by "save": written and read again, as TorchScript if the module is scripted."""
    if how == "deepcopy":
        return copy.deepcopy(module)
    buffer = io.BytesIO()
    if isinstance(module, torch.jit.ScriptModule):
        torch.jit.save(module, buffer)
        buffer.seek(0)
        return torch.jit.load(buffer)
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def assert_refused(model: torch.nn.Module, path: str, error: type[Exception], message: str) -> None:
    """`patch` says what is wrong at `path`, the report says so too, and no module of the model has changed."""
    modules = list(model.modules())
    with pytest.raises(error, match=message) as caught:
        patch(model)
    assert caught.value.args[0].startswith(path)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert f"left: {path}" in str(report(model)) or isinstance(caught.value.__cause__, SpecError)


def take_other_mode(product: torch.nn.Module) -> None:
    """Gives all instructions of a product a connection mode that its weights do not fit."""
    product.instructions = [item._replace(connection_mode="uvw") for item in product.instructions]
