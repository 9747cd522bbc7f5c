"""ASE calculators of models that eqaccel knows, whose whole step is made fast: same object, same results.

`patch` gives a calculator a class that derives from its own and computes by an `eqaccel.step.Step`. What that cannot do
goes the calculator's ordinary way: other properties, models that are not patched any more, hooks. A change of the model
between two calls is noticed, whatever it is: parameters, buffers, modules, devices, types.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from eqaccel.patches.kind import ModelKind, Stepping
from eqaccel.patches.potential import Potential
from eqaccel.patches.replacement import Entrance
from eqaccel.patches.torch_state import default_dtype, model_device
from numpy.typing import NDArray
from torch import nn

from eqaccel.errors import ExportError
from eqaccel.step import Step, System

_STATE = "_eqaccel_step"
"""Attribute of a calculator that holds what its step keeps."""


@dataclass
class StepState:
    """What the step of one calculator keeps from call to call. A copy of it starts empty.

    Attributes:
        kind: The kind of its models.
        step: The step; None until it is first needed, and after the model has changed.
        obstacle: Why the last call went the ordinary way; empty if it did not.
        calls: Calls that the step has computed.
        renewals: How often the model had changed.
    """

    kind: ModelKind
    step: Step | None = None
    obstacle: str = ""
    calls: int = 0
    renewals: int = 0
    _watch: _Watch | None = None
    _settings: tuple[Any, ...] = ()
    _constants: NDArray[np.float64] | None = None

    @property
    def stepping(self) -> Stepping:
        """How calculators of this kind compute."""
        assert self.kind.stepping is not None
        return self.kind.stepping

    def compute(self, calculator: Any, atoms: Any) -> dict[str, Any] | None:
        """The results for a structure; None if the calculator has to compute them in its own way."""
        self.obstacle = self.stepping.obstacle(calculator) or self._follow(calculator)
        if self.obstacle:
            self.step = None
            return None
        assert self.step is not None
        system = System(
            positions=atoms.get_positions(),
            cells=np.asarray(atoms.cell.array, dtype=np.float64)[None],
            periodic=np.asarray(atoms.pbc, dtype=bool)[None],
            types=self.stepping.types(calculator, atoms.numbers),
            sizes=(len(atoms),),
        )
        results = self.stepping.results(calculator, system, self.step(system), self._constants)
        self.calls += 1
        return results

    def _follow(self, calculator: Any) -> str:
        """Makes the step anew if models or settings have changed; returns what keeps it from being made."""
        models, stepping = self.stepping.models(calculator), self.stepping
        settings = (
            tuple(map(id, models)),
            tuple(map(type, models)),
            stepping.head(calculator),
            stepping.cutoff(calculator),
        )
        if self.step is not None and self._settings == settings and self._watch is not None and self._watch.holds():
            return ""
        self.renewals += self.step is not None
        self.step = None
        watch = _Watch(models)
        if watch.obstacle:
            return watch.obstacle
        device, dtype = model_device(models[0]), self.kind.dtype(models[0])
        try:
            potentials = [shared_potential(self.kind, model, stepping.head(calculator)) for model in models]
        except ExportError as error:
            return str(error)
        self.step = Step(potentials, stepping.cutoff(calculator), device, dtype)
        self._constants = potentials[0].constants.cpu().numpy()
        self._watch, self._settings = watch, settings
        return ""

    def note(self) -> str:
        """What a report says of the step."""
        if self.obstacle:
            return f"the ordinary way: {self.obstacle}"
        if self.step is None:
            return "neighbours kept for several steps; nothing computed yet"
        captures = ", ".join(f"{count} for {reason}" for reason, count in self.step.captures.items())
        how = f"recorded as a CUDA graph ({captures})" if captures else "neighbours kept for several steps"
        if self.step.not_captured and self.step.device.type != "cpu":
            how += f", no CUDA graph: {self.step.not_captured}"
        renewals = f", {self.renewals} changes of the model" if self.renewals else ""
        return f"{how}; {self.calls} calls, {self.step.rebuilds} lists of neighbours{renewals}"

    def __deepcopy__(self, memo: dict[int, Any]) -> StepState:
        return StepState(self.kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return StepState, (self.kind,)


_COMPARED = ("positions", "numbers", "initial_charges", "initial_magmoms")
"""Arrays of a structure that results may depend on, to ASE."""


def _calculate(self: Any, atoms: Any = None, properties: Any = None, system_changes: Any = None) -> None:
    """Computes all that the step gives, or whatever the calculator itself does."""
    from ase.calculators.calculator import Calculator, all_changes

    found = vars(self)[_STATE].compute(self, atoms) if atoms is not None else None
    if found is None:
        self._came_as.calculate(self, atoms, properties, all_changes if system_changes is None else system_changes)
        return
    Calculator.calculate(self, atoms)
    self.results = found


def _check_state(self: Any, atoms: Any, tol: float = 1e-15) -> list[str]:
    """What has changed since the last calculation: ASE's answer, which takes it longer than a step of a few atoms."""
    last = self.atoms
    if last is None or last.info or atoms.info or last.arrays.keys() != atoms.arrays.keys() or self.ignored_changes:
        changes: list[str] = self._came_as.check_state(self, atoms, tol)
        return changes
    pairs = {"cell": (last.cell.array, atoms.cell.array), "pbc": (last.pbc, atoms.pbc)}
    pairs |= {name: (last.arrays[name], atoms.arrays[name]) for name in _COMPARED if name in atoms.arrays}
    return [name for name, (a, b) in pairs.items() if a.shape != b.shape or not _close(a, b, tol)]


def _close(a: NDArray[Any], b: NDArray[Any], tol: float) -> bool:
    return np.array_equal(a, b) or (a.dtype == np.float64 and bool((np.abs(a - b) <= tol).all()))


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    _, _, *state = self._came_as.__reduce_ex__(self, protocol)
    return _blank, (self._came_as, vars(self)[_STATE].stepping.class_name), *state


def make_stepped(calculator: Any, kind: ModelKind) -> None:
    """Has a calculator compute by a step, unless it does so already."""
    if step_state(calculator) is None and kind.stepping is not None:
        vars(calculator)[_STATE] = StepState(kind)
        calculator.__class__ = _stepped_class(type(calculator), kind.stepping.class_name)


def restore_calculator(calculator: Any) -> None:
    """Gives a calculator its own class back."""
    if step_state(calculator) is not None:
        calculator.__class__ = calculator._came_as
        del vars(calculator)[_STATE]


def step_state(calculator: Any) -> StepState | None:
    """What the step of a patched calculator keeps; None for others."""
    return vars(calculator).get(_STATE)


def shared_potential(kind: ModelKind, model: nn.Module, head: int) -> Potential:
    """A potential whose parameters and buffers are those of a model, which stays as it is.

    Raises:
        ExportError: If the model is none whose energy depends on the structure alone.
    """
    exporting = kind.exporting
    if exporting is None or not exporting.accepts(model):
        raise ExportError(f"{type(model).__name__} does not predict the energies of atoms")
    exporting.check(model)
    with torch.inference_mode(False), default_dtype(kind.dtype(model)):
        tensors = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        duplicate = copy.deepcopy(model, tensors)
        constants = exporting.constants(model, head).to(model_device(model), torch.float64, copy=True)
        potential = exporting.potential(duplicate, head, constants).eval()
        potential.make_piecewise()
        return potential


def _stepped_class(came_as: type, class_name: str) -> type:
    contents = {name: getattr(came_as, name) for name in ("__module__", "__qualname__", "__doc__")}
    contents |= {"_came_as": came_as, "calculate": _calculate, "__reduce_ex__": _reduce}
    if came_as.__name__ == class_name:
        contents["check_state"] = _check_state
    # A second base would be laid out otherwise, and objects could not change to the class.
    return type(came_as.__name__, (came_as,), contents)


def _blank(came_as: type, class_name: str) -> Any:
    """An object that a copy or an unpickled calculator is filled into."""
    stepped: Any = _stepped_class(came_as, class_name)
    return stepped.__new__(stepped)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Watch:
    """What models consist of, to notice any change.

    Args:
        models: The models.

    Attributes:
        obstacle: Why the models cannot be taken as they are; empty if they can.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.obstacle = next(filter(None, map(_obstacle, models)), "")
        self._places: list[tuple[dict[str, Any], str]] = []  # where modules and tensors are, which come in this order
        self._modules: list[nn.Module] = []
        self._tensors: list[torch.Tensor] = []
        self._hooks: list[Any] = []
        everything = [module for model in models for module in model.modules()]
        for module in everything:
            if not isinstance(module, torch.jit.ScriptModule):  # those hand out what they hold in new dictionaries
                own = vars(module)
                self._hooks += [own[name] for name in _HOOKS if name in own]
                self._add(own["_modules"], self._modules)
        for module in everything:
            if isinstance(module, torch.jit.ScriptModule):
                held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                self._add(dict(enumerate(held)), self._tensors)
            else:
                self._add(vars(module)["_parameters"], self._tensors)
                self._add(vars(module)["_buffers"], self._tensors)
        self._state = self._now()

    def _add(self, holder: dict[Any, Any], members: list[Any]) -> None:
        found = {name: member for name, member in holder.items() if member is not None}
        self._places += [(holder, name) for name in found]
        members += found.values()

    def _now(self) -> tuple[list[type], list[int], list[int]]:
        tensors = self._tensors
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        return list(map(type, self._modules)), [tensor.data_ptr() for tensor in tensors], versions

    def holds(self) -> bool:
        """Whether nothing has changed."""
        present = (holder.get(name) for holder, name in self._places)
        return (
            not any(self._hooks)
            and all(map(operator.is_, present, chain(self._modules, self._tensors)))
            and self._now() == self._state
        )


def _obstacle(model: nn.Module) -> str:
    if not isinstance(model, Entrance):
        return f"{type(model).__name__} is not patched (any more)"
    if len({t.device for t in model.parameters()}) > 1:
        return "its parameters are on several devices"
    hooked = next(
        (name for name, module in model.named_modules() if any(getattr(module, h, None) for h in _HOOKS)), None
    )
    return "" if hooked is None else f"{hooked or 'the model'} has hooks, which see the ordinary calls"


def find_calculators(target: Any, kinds: Sequence[ModelKind]) -> Iterator[tuple[str, Any, ModelKind]]:
    """The calculators in what a user handed over that a kind of model knows: path, calculator, kind."""
    yield from _calculators_in(target, "", kinds)


def _calculators_in(target: Any, path: str, kinds: Sequence[ModelKind]) -> Iterator[tuple[str, Any, ModelKind]]:
    if isinstance(target, nn.Module):
        return
    if isinstance(target, (list, tuple)):
        members = {str(number): member for number, member in enumerate(target)}
    else:
        kind = next((k for k in kinds if k.stepping is not None and library_class(target, k.stepping.class_name)), None)
        if kind is not None:
            yield path, target, kind
        # ASE's combinations have a mixer of calculators, and had the calculators themselves before.
        calculators = getattr(getattr(target, "mixer", target), "calcs", ())
        members = {f"calcs.{number}": member for number, member in enumerate(calculators)}
    for name, member in members.items():
        yield from _calculators_in(member, f"{path}.{name}".lstrip("."), kinds)


def library_class(calculator: Any, name: str) -> type | None:
    """The class of that name that an object is of; None if it is of none."""
    came_as = getattr(type(calculator), "_came_as", type(calculator))
    return next((cls for cls in came_as.__mro__ if cls.__name__ == name), None)


def overridden(calculator: Any, name: str, methods: Sequence[str]) -> str:
    """What a class derived from a library's class has changed of these methods, as an obstacle; empty if nothing."""
    own, came_as = library_class(calculator, name), getattr(type(calculator), "_came_as", type(calculator))
    changed = next((m for m in methods if getattr(came_as, m, None) is not getattr(own, m, None)), None)
    return "" if changed is None else f"{came_as.__name__} has a {changed} method of its own"


def voigt(stress: NDArray[Any]) -> NDArray[Any]:
    """A symmetric (3, 3) tensor as ASE writes it: xx, yy, zz, yz, xz, xy."""
    return stress[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
