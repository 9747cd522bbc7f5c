"""Wrappers by which torch-sim runs models that eqaccel knows, whose whole step is made fast: same object, same results.

`patch` gives a wrapper a class that derives from its own and computes by an `eqaccel.step.ResidentStep`: all structures
of a state as one system, which stays on the device as long as its neighbours serve. What that cannot do goes the
wrapper's ordinary way: states and models that are set up otherwise, models that are not patched any more, hooks.
Results have no gradients, as those of the wrappers have none. A change of the model between two calls is noticed,
whatever it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from eqaccel.errors import PatchError
from eqaccel.patches.following import Reported
from eqaccel.patches.kind import ModelKind, Wrapping, changed_method, class_names
from eqaccel.patches.replacement import Changed, become, plain_class, restore
from eqaccel.patches.torch_state import model_device
from eqaccel.prepare import held_modules
from eqaccel.step import Given, PotentialFunction, ResidentStep, System

_STATE = "_eqaccel_step"
"""Attribute of a wrapper that holds what its step keeps."""


class Wrapped(Changed):
    """A wrapper of torch-sim's that computes by a step."""

    def forward(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Energies, forces and stresses of a state, as the wrapper gives them."""
        own: WrapperState = vars(self)[_STATE]
        unusual = args or kwargs or torch.compiler.is_compiling()
        results = None if unusual else own.compute(self, state)
        return self._came_as.forward(self, state, *args, **kwargs) if results is None else results


@dataclass
class WrapperState(Reported[ResidentStep]):
    """What the step of one wrapper keeps from call to call."""

    method = "forward"
    _cutoff: tuple[Any, int, float] | None = None
    """The cutoff as the wrapper has it, the version of that tensor, and the number."""
    _wrapper: Any = None
    """The one that is computed for, while it is."""

    @property
    def wrapping(self) -> Wrapping:
        """How wrappers of this kind compute."""
        assert self.kind.wrapping is not None
        return self.kind.wrapping

    def make(
        self, potentials: Sequence[PotentialFunction], cutoff: float, device: torch.device, dtype: torch.dtype
    ) -> ResidentStep:
        """See `Followed.make`."""
        finish = functools.partial(_finish, self.wrapping, self.wrapping.dtype(self._wrapper))
        return ResidentStep(potentials[0], cutoff, device, dtype, finish, skin=self.skin, patient=self.patient)

    def compute(self, wrapper: Any, state: Any) -> dict[str, Tensor] | None:
        """Results by their names in torch-sim; None if the wrapper has to compute in its own way.

        A GPU begins on the guess that models and types are those of the last call, and they are looked at meanwhile.
        """
        self.obstacle = self.wrapping.obstacle(wrapper) or _obstacle(wrapper, state)
        results = None if self.obstacle else self._compute(wrapper, state)
        if results is None:
            self.drop()
            return None
        self.calls += 1
        return self._named(wrapper, results, len(state.positions), len(state.cell))

    def _compute(self, wrapper: Any, state: Any) -> Tensor | None:
        wrapping = self.wrapping
        given = Given(state.positions, state.row_vector_cell, state.atomic_numbers, state.system_idx, state.pbc)
        if self.step is not None:
            self.step.begin(given)
        self._wrapper = wrapper
        self.obstacle = self.follow([wrapping.model(wrapper)], wrapping.head(wrapper), self._cutoff_of(wrapper))
        self._wrapper = None  # it holds this object itself
        if self.obstacle:
            return None
        assert self.step is not None
        same = self._types is not None and np.array_equal(wrapping.types(wrapper, self._types[0]), self._types[1])
        results = self.step.take(given) if same else None
        if results is None:
            arrays = _Arrays.of(state)
            self.obstacle = arrays.obstacle
            if self.obstacle:
                return None
            types = wrapping.types(wrapper, arrays.numbers)
            self._types = arrays.numbers, types
            results = self.step.compute(given, replace(arrays.system, types=types))
        return results

    def _named(self, wrapper: Any, results: Tensor, num_atoms: int, num_structures: int) -> dict[str, Tensor]:
        """What of the results of `_finish` the wrapper gives, by their names in torch-sim."""
        assert self.step is not None
        energies, forces, stresses = results.split(self.step.rooms)
        named = {"energy": energies[:num_structures]}
        if wrapper.compute_forces:
            named["forces"] = forces.view(-1, 3)[:num_atoms]
        if wrapper.compute_stress:
            named["stress"] = stresses.view(-1, 3, 3)[:num_structures]
        return named

    def _cutoff_of(self, wrapper: Any) -> float:
        """The cutoff; a tensor is read once, because that waits for a GPU."""
        cutoff = self.wrapping.cutoff(wrapper)
        version = cutoff._version if isinstance(cutoff, Tensor) and not cutoff.is_inference() else 0
        if self._cutoff is None or self._cutoff[0] is not cutoff or self._cutoff[1] != version:
            self._cutoff = cutoff, version, float(cutoff)
        return self._cutoff[2]


def _finish(
    wrapping: Wrapping, dtype: torch.dtype, energies: Tensor, forces: Tensor, virials: Tensor, cells: Tensor
) -> Tensor:
    """Energies, forces and stresses as a wrapper gives them, one after the other; see `step.resident.Finish`."""
    volumes = (cells[:, 0] * torch.linalg.cross(cells[:, 1], cells[:, 2])).sum(1)
    stresses = wrapping.stress(virials, volumes[:, None, None])
    return torch.cat([energies, forces.flatten(), stresses.flatten()]).to(dtype)


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
    """Which method of a library's a wrapper has changed, as an obstacle; empty if none."""
    came_as = getattr(type(wrapper), "_came_as", type(wrapper))
    own = _library_class(came_as, name)
    assert own is not None
    methods = [method for method in vars(own) if callable(vars(own)[method]) and not method.startswith("__")]
    return changed_method(wrapper, came_as, own, methods)
