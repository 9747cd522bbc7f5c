"""Activations of readouts of MACE by one kernel: the same numbers and derivatives, what is left and exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm
from e3nn.nn import Activation
from patch_checks import assert_close, patched

from eqaccel import report
from eqaccel.errors import PatchError
from eqaccel.patches import nodes
from eqaccel.patches.activation import FusedActivation
from eqaccel.patches.mace.swapping import FORMS
from eqaccel.patches.replacement import become
from eqaccel.patches.torch_state import default_dtype

pytestmark = pytest.mark.filterwarnings("ignore")
silu = torch.nn.functional.silu


def of_that_name(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.5 * x)


of_that_name.__name__ = "silu"


def activation(irreps: str, *acts: Any) -> Any:
    with default_dtype(torch.float64):
        return Activation(irreps, list(acts))


def form(module: Any) -> Any:
    return nodes.build_form(torch.nn.Linear(1, 1), module, FORMS)


@pytest.mark.parametrize(("irreps", "acts"), [("5x0e", (silu,)), ("3x0e+2x0e", (silu, torch.nn.SiLU()))])
def test_values_and_derivatives(irreps: str, acts: tuple[Any, ...], device: torch.device) -> None:
    results = []
    for fused in (False, True):
        module = activation(irreps, *acts).to(device)
        if fused:
            become(module, *form(module))
            module.to(device)
            assert isinstance(module, FusedActivation)
        x = torch.linspace(-3.0, 3.0, 20, dtype=torch.float64, device=device).view(4, 5).requires_grad_()
        z = module(x)
        (first,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), x)
        results.append((z, first, second, module(x.T, dim=0), module(torch.cat([x, x], 1))))
    for value, expected in zip(*results, strict=True):
        assert_close(value, expected)


@pytest.mark.parametrize(
    ("irreps", "acts"),
    [
        ("5x0e", (torch.tanh,)),
        ("5x0e", (of_that_name,)),
        ("3x0e+2x0e", (silu, torch.tanh)),
        ("3x0e+1x1o", (silu, None)),
        ("3x0e", (None,)),
    ],
)
def test_others_are_left(irreps: str, acts: tuple[Any, ...]) -> None:
    with pytest.raises(PatchError, match="its activations are not SiLU with one factor"):
        form(activation(irreps, *acts))


def test_an_activation_may_be_exchanged() -> None:
    model = patched(mm.energy_model())
    module = model.readouts[-1].non_linearity
    assert isinstance(module, FusedActivation)
    module.acts[0] = activation(str(module.irreps_in), torch.tanh).acts[0]
    x = torch.randn(3, module.irreps_in.dim, dtype=torch.float64)
    assert_close(module(x), module.acts[0](x))
    assert not isinstance(module, FusedActivation)
    rows = {row.path: row for row in report(model).rows}
    assert not rows["readouts.1.non_linearity"].accelerated
