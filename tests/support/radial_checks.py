"""What the tests of radial networks share."""

from __future__ import annotations

import copy
import functools

import torch
from patch_checks import assert_close
from torch.autograd import grad

from eqaccel.patches import radial


def assert_layers_agree(network: torch.nn.Module, layers: int, forms: radial.RadialForms) -> None:
    """So many layers are replaced, all SiLU too, and give values, first and second derivatives of what they replace."""
    fast = copy.deepcopy(network)
    swaps = list(radial.radial_swaps(fast, forms))
    activations = sum(isinstance(module, torch.nn.SiLU) for module in network.modules())
    assert len(swaps) == layers + activations
    for swap in swaps:
        swap.apply()
        swap.module.forward = swap.module.dense
    device = next(network.parameters()).device
    results = []
    for model in (network, fast):
        x = torch.linspace(-1.0, 1.0, 20, dtype=torch.float64, device=device).view(5, 4).requires_grad_()
        y = model(x)
        inputs = [x, *model.parameters()]
        first = grad((y**2).sum(), inputs, create_graph=True)
        results.append([y, *first, *grad(sum((g**2).sum() for g in first), inputs)])
    assert len(results[0]) == len(results[1])
    for value, expected in zip(results[1], results[0], strict=True):
        assert_close(value, expected)


def assert_first_layers_merge(network: torch.nn.Module, forms: radial.RadialForms, kind: type[torch.nn.Module]) -> None:
    """The first layer or layers are one kernel with SiLU where weights are not trained, in TorchScript too."""
    fast = copy.deepcopy(network)
    for swap in list(radial.radial_swaps(fast, forms)):
        swap.apply()
    device = next(network.parameters()).device
    x = torch.linspace(-1.0, 1.0, 20, dtype=torch.float64, device=device).view(5, 4).requires_grad_()
    for _ in range(2):
        layers = radial.merged(list(getattr(fast, "mlp", fast)))  # NequIP has them in a child
        assert isinstance(layers[0], kind)
        assert kind is radial.NarrowLayer or len(layers) == 2
        scripted = torch.jit.script(torch.nn.Sequential(*layers))
        expected = network(x)
        (slope,) = grad((expected**2).sum(), x)
        for function in (functools.partial(functools.reduce, lambda y, layer: layer(y), layers), scripted):
            y = function(x)
            assert_close(y, expected)
            assert_close(grad((y**2).sum(), x)[0], slope)
        with torch.no_grad():
            for plain, replaced in zip(network.parameters(), fast.parameters(), strict=True):
                plain.mul_(1.5)
                replaced.copy_(plain)
