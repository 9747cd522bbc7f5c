"""Wrappers by which torch-sim runs models that eqaccel knows, whose whole step is made fast: same object, same results.

`patch` gives a wrapper a class that derives from its own and computes by an `eqaccel.step.Step`: all structures of a
state as one system, whose neighbours stay on the device. What that cannot do goes the wrapper's ordinary way: states
and models that are set up otherwise, models that are not patched any more, hooks. Results have no gradients, as those
of the wrappers have none. A change of the model between two calls is noticed, whatever it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from eqaccel.patches.following import ReportedStep
from eqaccel.patches.kind import ModelKind, Wrapping, class_names
from eqaccel.patches.replacement import Changed, become, plain_class, restore
from eqaccel.patches.torch_state import default_dtype, model_device
from numpy.typing import NDArray
from torch import Tensor, nn

from eqaccel.errors import PatchError
from eqaccel.prepare import held_modules
from eqaccel.step import Outcome, System

_STATE = "_eqaccel_step"
"""Attribute of a wrapper that holds what its step keeps."""


class Wrapped(Changed):
    """A wrapper of torch-sim's that computes by a step."""

    def forward(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Energies, forces and stresses of a state, as the wrapper gives them."""
        own: WrapperState = vars(self)[_STATE]
        unusual = args or kwargs or torch.compiler.is_compiling()
        system = None if unusual else own.begin(self, state)
        if system is None:
            return self._came_as.forward(self, state, *args, **kwargs)
        return own.finish(self, system)


@dataclass
class WrapperState(ReportedStep):
    """What the step of one wrapper keeps from call to call."""

    method = "forward"
    _cutoff: tuple[Any, int, float] | None = None
    """The cutoff as the wrapper has it, the version of that tensor, and the number."""

    @property
    def wrapping(self) -> Wrapping:
        """How wrappers of this kind compute."""
        assert self.kind.wrapping is not None
        return self.kind.wrapping

    def begin(self, wrapper: Any, state: Any) -> System | None:
        """What to compute for a state; None if the wrapper has to compute in its own way.

        A GPU begins on the guess that models and types are those of the last call, and they are looked at meanwhile.
        """
        wrapping, arrays = self.wrapping, None
        self.obstacle = wrapping.obstacle(wrapper) or _obstacle(wrapper, state)
        if not self.obstacle:
            arrays = _Arrays.of(state)
            self.obstacle = arrays.obstacle
        if self.obstacle or arrays is None:
            self.drop()
            return None
        return self.begin_with(
            arrays.numbers,
            lambda types: replace(arrays.system, types=types),
            lambda: self.follow([wrapping.model(wrapper)], wrapping.head(wrapper), self._cutoff_of(wrapper)),
            lambda: wrapping.types(wrapper, arrays.numbers),
        )

    def finish(self, wrapper: Any, system: System) -> dict[str, Tensor]:
        """The results for what `begin` gave."""
        assert self.step is not None
        with default_dtype(self.step.dtype):  # models create small constants in the default dtype
            outcome = self.step(system)
        self.calls += 1
        return self._results(wrapper, system, outcome)

    def _results(self, wrapper: Any, system: System, outcome: Outcome) -> dict[str, Tensor]:
        """Results by their names in torch-sim: they go to the device together."""
        values = {"energy": system.of_structures(np.add, outcome.energies[0])}
        if wrapper.compute_forces:
            values["forces"] = outcome.forces[0]
        if wrapper.compute_stress:
            with np.errstate(divide="ignore", invalid="ignore"):
                values["stress"] = self.wrapping.stress(outcome.virials[0], np.linalg.det(system.cells)[:, None, None])
        flat = torch.from_numpy(np.concatenate([value.ravel() for value in values.values()]))
        assert self.step is not None
        flat = flat.to(self.wrapping.dtype(wrapper)).to(self.step.device)
        parts = flat.split([value.size for value in values.values()])
        return {name: part.view(value.shape) for (name, value), part in zip(values.items(), parts, strict=True)}

    def _cutoff_of(self, wrapper: Any) -> float:
        """The cutoff; a tensor is read once, because that waits for a GPU."""
        cutoff = self.wrapping.cutoff(wrapper)
        version = cutoff._version if isinstance(cutoff, Tensor) and not cutoff.is_inference() else 0
        if self._cutoff is None or self._cutoff[0] is not cutoff or self._cutoff[1] != version:
            self._cutoff = cutoff, version, float(cutoff)
        return self._cutoff[2]


@dataclass(frozen=True)
class _Arrays:
    """A state on the host.

    Attributes:
        numbers: (num_atoms,) int64, atomic numbers.
        system: The structures, with no types yet.
        obstacle: Why these are no structures one after the other; empty if they are.
    """

    numbers: NDArray[np.int64]
    system: System
    obstacle: str

    @classmethod
    def of(cls, state: Any) -> _Arrays:
        """Reads a state, in one go: each reading waits for a GPU."""
        tensors = (state.positions, state.row_vector_cell, state.atomic_numbers, state.system_idx)
        flat = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors]).cpu().numpy()
        ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
        positions, cells, numbers, structure = np.split(flat, ends)
        pbc = state.pbc.cpu().numpy() if isinstance(state.pbc, Tensor) else np.array(state.pbc)
        # In order, the first atom is of structure 0, and each one of that of the atom before or of the next.
        in_order = structure.size > 0 and structure[-1] == len(state.cell) - 1
        steps = np.diff(structure, prepend=0.0)
        in_order = in_order and structure[0] == 0 and (steps * (steps - 1) == 0).all()
        sizes = np.bincount(structure.astype(np.int64)) if in_order else np.zeros(0, np.int64)
        system = System(
            positions=positions.reshape(-1, 3),
            cells=cells.reshape(-1, 3, 3),
            periodic=np.broadcast_to(pbc.astype(bool), (len(state.cell), 3)),
            types=np.zeros(0, np.int64),
            sizes=tuple(sizes.tolist()),
        )
        obstacle = "" if in_order else "its state has no atoms, or not in the order of its structures"
        return cls(numbers.astype(np.int64), system, obstacle)


def _obstacle(wrapper: Any, state: Any) -> str:
    """Why a state cannot be computed by a step; empty if it can."""
    if "SimState" not in class_names(state):
        return f"its state is a {type(state).__name__}, and no SimState"
    if state.atomic_numbers is None or state.system_idx is None:
        return "its state has no atomic numbers, or does not say which atoms are whose"
    if state.positions.dtype != wrapper.dtype:
        return f"its state is in {state.positions.dtype}, and the wrapper in {wrapper.dtype}"
    if state.positions.device != model_device(wrapper):
        return f"its state is on {state.positions.device}, and the model is not"
    if torch.is_autocast_enabled(state.positions.device.type):
        return "autocast is on"
    return ""


def unknown_neighbors(wrapper: Any) -> str:
    """What keeps a step from finding the neighbours that a wrapper finds by a function, as an obstacle; else empty."""
    library = sys.modules.get("torch_sim.neighbors")
    function = wrapper.neighbor_list_fn
    if any(function is known for known in vars(library).values()):
        return ""
    return f"its neighbours are found by {getattr(function, '__name__', type(function).__name__)}, not by torch-sim's"


def find_wrappers(target: Any, kinds: Sequence[ModelKind]) -> Iterator[tuple[str, Any, ModelKind]]:
    """The wrappers in what a user handed over that a kind of model knows: path, wrapper, kind."""
    for path, module in _modules_in(target):
        for kind in kinds:
            wrapping = kind.wrapping
            if wrapping is not None and _library_class(plain_class(module), wrapping.class_name) is not None:
                if kind.recognises(wrapping.model(module)):
                    yield path, module, kind
                break


def find_wrapped(target: Any) -> Iterator[tuple[str, Any, WrapperState]]:
    """The wrappers in what a user handed over that compute by a step: path, wrapper, what the step keeps."""
    for path, module in _modules_in(target):
        if isinstance(module, Wrapped):
            yield path, module, vars(module)[_STATE]


def _library_class(cls: type, name: str) -> type | None:
    """The class that is given with its module, if a class is, or derives from, that one."""
    return next((base for base in cls.__mro__ if f"{base.__module__}.{base.__qualname__}" == name), None)


def _modules_in(target: Any) -> Iterator[tuple[str, nn.Module]]:
    """All modules, with their paths."""
    for path, module in held_modules(target, PatchError):
        for name, child in module.named_modules():
            yield f"{path}.{name}".strip("."), child


def make_wrapped(wrapper: Any, kind: ModelKind) -> None:
    """Has a wrapper compute by a step, unless it does so already."""
    if not isinstance(wrapper, Wrapped):
        become(wrapper, Wrapped)
        vars(wrapper)[_STATE] = WrapperState(kind, patient=True)  # batches that come only once need no recording


def restore_wrapper(wrapper: Any) -> None:
    """Gives a wrapper its own class back."""
    if isinstance(wrapper, Wrapped):
        restore(wrapper)
        del vars(wrapper)[_STATE]


def changed_methods(wrapper: Any, name: str) -> str:
    """What a class derived from a library's has changed of how it computes, as an obstacle; empty if nothing."""
    came_as = getattr(type(wrapper), "_came_as", type(wrapper))
    own = _library_class(came_as, name)
    methods = [method for method in vars(own) if callable(vars(own)[method]) and not method.startswith("__")]
    changed = next((m for m in methods if getattr(came_as, m) is not getattr(own, m)), None)
    return "" if changed is None else f"{came_as.__name__} has a {changed} method of its own"
