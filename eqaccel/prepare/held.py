"""What models a user hands over: a module, a list, the ASE calculator of a library, or a sum of calculators."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from eqaccel.errors import EqaccelError


def model_dtype(model: nn.Module) -> torch.dtype:
    """The floating-point type a model computes in, read from its parameters."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def held_modules(target: Any, error: type[EqaccelError]) -> list[tuple[str, nn.Module]]:
    """Finds the modules in what a user handed over.

    Args:
        target: A module; or what has one in `model` or a list of them in `models`, as the calculators of NequIP and
            MACE; or a combination of ASE calculators, of which those without such modules are passed over; or a list
            or tuple of any of these.
        error: Class of the error that is raised.

    Returns:
        Path from the target, which is empty for the target itself, and module; each module once.

    Raises:
        EqaccelError: If something in the list, or the target itself, holds no module; of class `error`.
    """
    unique: dict[int, tuple[str, nn.Module]] = {}
    for path, module in _found(target, "", error):
        unique.setdefault(id(module), (path, module))
    return list(unique.values())


def _found(target: Any, path: str, error: type[EqaccelError]) -> list[tuple[str, nn.Module]]:
    if isinstance(target, nn.Module):
        return [(path, target)]
    if isinstance(target, (list, tuple)):
        members = [_found(member, _joined(path, str(number)), error) for number, member in enumerate(target)]
    else:
        members = [_in_calculator(target, path)]
    found = [entry for member in members for entry in member]
    if not found:
        raise error(
            f"{_joined('model', path)}: expected a torch.nn.Module or an ASE calculator with one in `model` or a list "
            f"of them in `models`, or a list of such, got {type(target).__name__}"
        )
    return found


def _in_calculator(target: Any, path: str) -> list[tuple[str, nn.Module]]:
    """The modules in a calculator; none if it holds others, or something else."""
    models = getattr(target, "models", None)
    if isinstance(models, (list, tuple)):
        held = {f"models.{number}": model for number, model in enumerate(models)}
    else:
        held = {name: getattr(target, name, None) for name in ("models", "model")}
        held = {name: model for name, model in held.items() if model is not None}
    if held:
        found = [(_joined(path, name), model) for name, model in held.items() if isinstance(model, nn.Module)]
        return found if len(found) == len(held) else []
    return [
        entry
        for name, calculator in combined_calculators(target).items()
        for entry in _in_calculator(calculator, _joined(path, name))
    ]


def combined_calculators(target: Any) -> dict[str, Any]:
    """The calculators that a combination of ASE consists of, by their path in it; none of anything else."""
    # Combinations have a mixer of calculators, and had the calculators themselves before.
    calculators = getattr(getattr(target, "mixer", target), "calcs", ())
    return {f"calcs.{number}": calculator for number, calculator in enumerate(calculators)}


def _joined(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))
