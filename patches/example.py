"""The check of a patched module on inputs that the user gives: what eqaccel knows nothing about but how to call it.

The module is run in evaluation mode, so that nothing depends on chance, and on copies, so that statistics that it keeps
stay what they were. Compared are all tensors in what it gives, and the derivatives of a random sum of them in the
parameters and in all floating-point tensors of the input.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from eqaccel.errors import PatchError, VerificationError, VerificationWarning
from eqaccel.patches.comparison import Comparison, Results, Run, differentiated, random_like
from eqaccel.patches.copying import duplicated
from eqaccel.patches.replacement import Entrance
from eqaccel.patches.rounding import STAGES
from eqaccel.patches.torch_state import InFloat64, KeepingGraphs, all_trainable, model_device, untouched_state
from eqaccel.prepare import model_dtype


@dataclass(frozen=True)
class Example:
    """One call of a module.

    Attributes:
        name: What messages call it.
        arguments: Positional ones in a tuple, or keyword ones in a dictionary.
    """

    name: str
    arguments: tuple[Any, ...] | dict[str, Any]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Any:
        """The arguments with each tensor replaced; containers and objects that hold tensors are others."""
        return _mapped(self.arguments, function)


class ExampleVerification(Comparison):
    """The comparison of a module of any library on one call of it.

    Args:
        model: The module, not patched yet; copies of it are run here.
        example: Positional arguments in a tuple, or keyword arguments in a dictionary.

    Raises:
        PatchError: If the example is neither.
        VerificationError: If the module cannot be run on it, or gives NaN.
    """

    def __init__(self, model: torch.nn.Module, example: tuple[Any, ...] | Mapping[str, Any]) -> None:
        if not isinstance(example, (tuple, Mapping)):
            raise PatchError(
                f"example: expected positional arguments in a tuple, or keyword arguments in a dictionary, got "
                f"{type(example).__name__}; put a single argument into a tuple: example=(argument,)"
            )
        arguments = example if isinstance(example, tuple) else dict(example)
        self._example = Example("example", arguments)
        self._constant: frozenset[str] = frozenset()
        dtype = model_dtype(model)
        try:
            super().__init__(model, dtype)
        except _NotRunError as failure:
            self._constant = self._without_derivatives(model, failure)
            super().__init__(model, dtype)

    def runs(self) -> list[tuple[Any, Run]]:
        """See `Comparison.runs`."""
        return [(self._example, self._run)]

    def rounded_anew(self, subject: Example, seed: int = 0) -> Example:
        """See `Comparison.rounded_anew`: tensors change by what their largest entry may be rounded by."""

        def moved(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or not tensor.numel():
                return tensor
            size = math.sqrt(STAGES) * torch.finfo(torch.float64).eps * float(tensor.detach().abs().max())
            return tensor.double() + size * random_like(f"example {seed}", tensor).to(tensor.device)

        return Example(subject.name, subject.mapped(moved))

    def _without_derivatives(self, model: torch.nn.Module, failure: _NotRunError) -> frozenset[str]:
        """The inputs in which a module cannot be differentiated; if it cannot be run at all, raises the failure."""
        count = sum(tensor.is_floating_point() for tensor in _tensors(self._example.arguments))
        names = frozenset(f"input {number}" for number in range(count))

        def fails(constant: frozenset[str]) -> bool:
            self._constant = constant
            try:
                self._run(model, self._example)
            except _NotRunError:
                return True
            return False

        if not names or fails(names):
            raise failure
        found = frozenset(name for name in names if fails(names - {name})) or names
        warnings.warn(
            f"eqaccel.patch: {type(model).__name__} itself cannot be differentiated in {', '.join(sorted(found))} of "
            f"the example, so that these derivatives are not compared ({failure.__cause__})",
            VerificationWarning,
            stacklevel=6,
        )
        return found

    def _run(self, model: torch.nn.Module, subject: Example) -> Results:
        is_copy = self.is_wide(model)
        try:
            return self._evaluate(model, subject, torch.float64 if is_copy else self.dtype)
        except VerificationError:
            raise
        except Exception as error:
            where = " in float64, in which it is compared" if is_copy else ""
            patched = ", now that it is patched" if isinstance(model, Entrance) else ""
            advice = "; call patch(model) without an example and compare its results yourself" if is_copy else ""
            raise _NotRunError(
                f"example: {type(model).__name__} could not be run on it{where}{patched}, in evaluation mode and with "
                f"derivatives in its parameters and inputs ({type(error).__name__}: {error}){advice}"
            ) from error

    def _evaluate(self, model: torch.nn.Module, subject: Example, dtype: torch.dtype) -> Results:
        twin = duplicated(model).eval()
        device = model_device(twin)
        inputs: dict[str, Tensor] = {}

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor.detach().to(device, copy=True)
            name = f"input {len(inputs)}"
            inputs[name] = tensor.detach().to(device, dtype, copy=True).requires_grad_(name not in self._constant)
            return inputs[name]

        arguments = subject.mapped(leaf)
        in_dtype = contextlib.nullcontext() if dtype == self.dtype else InFloat64()
        with untouched_state(twin), all_trainable(twin) as parameters, KeepingGraphs(), in_dtype:
            found = twin(*arguments) if isinstance(arguments, tuple) else twin(**arguments)
            outputs = {f"output {number}": output for number, output in enumerate(_tensors(found))}
            variables = {name: tensor for name, tensor in inputs.items() if name not in self._constant}
            values, of_derivatives = differentiated(outputs, parameters, variables)
        if not outputs:
            raise VerificationError(
                f"example: expected {type(model).__name__} to give tensors, got {type(found).__name__}; call "
                f"patch(model) without an example and compare its results yourself"
            )
        return Results(values, {name: float(value.abs().sum()) for name, value in values.items()} | of_derivatives)


class _NotRunError(VerificationError):
    """A module cannot be run on an example, or not be differentiated."""


def _mapped(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same with each tensor replaced, in copies of the containers and objects that hold them."""
    return tree_map(lambda leaf: _mapped_leaf(leaf, function), tree)


def _mapped_leaf(leaf: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if isinstance(leaf, (torch.nn.Module, type)):
        return leaf
    if hasattr(leaf, "clone") and hasattr(leaf, "apply"):  # as in torch_geometric
        return leaf.clone().apply(function)
    if isinstance(leaf, MutableMapping):  # of a class of its own
        copied = copy.copy(leaf)
        copied.update({key: _mapped(value, function) for key, value in leaf.items()})
        return copied
    if any(isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values()):
        copied = copy.copy(leaf)
        vars(copied).update({name: _mapped(value, function) for name, value in vars(leaf).items()})
        return copied
    return leaf


def _tensors(tree: Any) -> list[Tensor]:
    """All tensors in what a module gives."""
    found: list[Tensor] = []

    def kept(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(tree, kept)
    return found
