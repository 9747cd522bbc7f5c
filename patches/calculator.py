"""ASE calculators of models that eqaccel knows, whose whole step is made fast: same object, same results.

`patch` gives a calculator a class that derives from its own and computes by an `eqaccel.step.Step`. What that cannot do
goes the calculator's ordinary way: other properties, models that are not patched any more, hooks. A change of the model
between two calls is noticed, whatever it is: parameters, buffers, modules, devices, types.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from eqaccel.patches.kind import ModelKind, Stepping
from eqaccel.patches.replacement import Entrance
from eqaccel.patches.torch_state import default_dtype, model_device
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
    _settings: tuple[Any, ...] = field(default=())

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
        results = self.stepping.results(calculator, atoms, system, self.step(system))
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


def _calculate(self: Any, atoms: Any = None, properties: Any = None, system_changes: Any = None) -> None:
    """Computes all that the step gives, or whatever the calculator itself does."""
    from ase.calculators.calculator import Calculator, all_changes

    found = vars(self)[_STATE].compute(self, atoms) if atoms is not None else None
    if found is None:
        self._came_as.calculate(self, atoms, properties, all_changes if system_changes is None else system_changes)
        return
    Calculator.calculate(self, atoms)
    self.results = found


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    _, _, *state = self._came_as.__reduce_ex__(self, protocol)
    return _blank, (self._came_as,), *state


def make_stepped(calculator: Any, kind: ModelKind) -> None:
    """Has a calculator compute by a step, unless it does so already."""
    if step_state(calculator) is None:
        vars(calculator)[_STATE] = StepState(kind)
        calculator.__class__ = _stepped_class(type(calculator))


def restore_calculator(calculator: Any) -> None:
    """Gives a calculator its own class back."""
    if step_state(calculator) is not None:
        calculator.__class__ = calculator._came_as
        del vars(calculator)[_STATE]


def step_state(calculator: Any) -> StepState | None:
    """What the step of a patched calculator keeps; None for others."""
    return vars(calculator).get(_STATE)


def shared_potential(kind: ModelKind, model: nn.Module, head: int) -> nn.Module:
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
        return exporting.potential(duplicate, head, constants).eval()


def _stepped_class(came_as: type) -> type:
    contents = {name: getattr(came_as, name) for name in ("__module__", "__qualname__", "__doc__")}
    # A second base would be laid out otherwise, and objects could not change to the class.
    return type(
        came_as.__name__,
        (came_as,),
        contents | {"_came_as": came_as, "calculate": _calculate, "__reduce_ex__": _reduce},
    )


def _blank(came_as: type) -> Any:
    """An object that a copy or an unpickled calculator is filled into."""
    stepped = _stepped_class(came_as)
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
        self._modules: list[tuple[dict[str, Any], str, nn.Module, type]] = []
        self._tensors: list[tuple[dict[str, Any], str, torch.Tensor, int, int]] = []
        self._hooks: list[Any] = []
        for model in models:
            for module in model.modules():
                if isinstance(module, torch.jit.ScriptModule):  # hands out its contents in new dictionaries
                    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                    self._tensors += [({"": t}, "", *_state_of(t)) for t in tensors]
                    continue
                own = vars(module)
                self._hooks += [own[name] for name in _HOOKS if name in own]
                self._modules += [(own["_modules"], n, m, type(m)) for n, m in own["_modules"].items() if m is not None]
                for holder in (own["_parameters"], own["_buffers"]):
                    self._tensors += [(holder, n, *_state_of(t)) for n, t in holder.items() if t is not None]

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return (
            not any(self._hooks)
            and all(holder.get(name) is m and type(m) is cls for holder, name, m, cls in self._modules)
            and all(
                holder.get(name) is tensor and tensor.data_ptr() == pointer and tensor._version == version
                for holder, name, tensor, pointer, version in self._tensors
            )
        )


def _state_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    return tensor, tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


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
        kind = next((k for k in kinds if k.stepping is not None and k.stepping.accepts(target)), None)
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
