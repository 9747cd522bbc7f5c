"""ASE calculators of models that eqaccel knows, whose whole step is made fast: same object, same results.

`patch` gives a calculator a class that derives from its own and computes by an `eqaccel.step.Step`. What that cannot do
goes the calculator's ordinary way: other properties, models that are not patched any more, hooks. A change of the model
between two calls is noticed, whatever it is: parameters, buffers, modules, devices, types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from eqaccel.errors import StructureError
from eqaccel.o3.origins import package_of
from eqaccel.patches.following import FollowedStep, Reported
from eqaccel.patches.kind import ModelKind, Stepping, changed_method
from eqaccel.patches.precision import LowPrecision
from eqaccel.patches.report import ReportRow
from eqaccel.prepare import combined_calculators
from eqaccel.step import Step, System

_STATE = "_eqaccel_step"
"""Attribute of a calculator that holds what its step keeps."""


class KeptStep(Protocol):
    """What a calculator that computes by a step has in its attribute `_eqaccel_step`.

    Attributes:
        has_model: Whether the calculator holds its models as modules; one of an exported file does not.
        low_precision: What is less precise in an exported file, see `patch`.
    """

    has_model: bool
    low_precision: tuple[LowPrecision, ...]

    def rows(self, calculator: Any) -> list[ReportRow]:
        """What a report says of the step."""


@dataclass
class StepState(Reported[Step], FollowedStep):
    """What the step of one calculator keeps from call to call."""

    method = "calculate"

    @property
    def stepping(self) -> Stepping:
        """How calculators of this kind compute."""
        assert self.kind.stepping is not None
        return self.kind.stepping

    def begin(self, calculator: Any, atoms: Any) -> System | None:
        """What to compute for a structure; None if the calculator has to compute in its own way."""
        stepping = self.stepping
        return self.begin_with(
            atoms.numbers,
            lambda types: system_of(atoms, types),
            lambda: (
                stepping.obstacle(calculator)
                or self.follow(stepping.models(calculator), stepping.head(calculator), stepping.cutoff(calculator))
            ),
            lambda: stepping.types(calculator, atoms.numbers),
        )

    def begin_with(
        self,
        numbers: NDArray[np.int64],
        system_of: Callable[[NDArray[np.int64]], System],
        follow: Callable[[], str],
        types_of: Callable[[], NDArray[np.int64]],
    ) -> System | None:
        """What to compute; None if the object has to compute in its own way.

        A GPU begins on the guess that models and types are those of the last call, and they are looked at meanwhile.

        Args:
            numbers: (num_atoms,), atomic numbers.
            system_of: Makes the system with such types of atoms.
            follow: Follows the models; returns the obstacle.
            types_of: What the models call the elements, (num_atoms,), as they are now.
        """
        guess = None
        if self.step is not None and self._types is not None and np.array_equal(self._types[0], numbers):
            guess = system_of(self._types[1])
            self.step.begin(guess)
        self.obstacle = follow()
        if self.obstacle:
            self.drop()
            return None
        types = types_of()
        if guess is not None and np.array_equal(types, guess.types):
            return guess
        self._types = numbers.copy(), types
        return system_of(types)

    def finish(self, calculator: Any, system: System) -> dict[str, Any]:
        """The results for what `begin` gave."""
        assert self.step is not None
        results = self.stepping.results(calculator, system, self.step(system), self.constants)
        self.calls += 1
        return results


def system_of(atoms: Any, types: NDArray[np.int64]) -> System:
    """A structure of ASE's as arrays that stay as they are when it changes."""
    return System(
        positions=np.array(atoms.positions, dtype=np.float64, order="C"),
        cells=np.array(atoms.cell.array, dtype=np.float64)[None],
        periodic=np.array(atoms.pbc, dtype=bool)[None],
        types=types,
        sizes=(len(atoms),),
    )


_COMPARED = ("positions", "numbers", "initial_charges", "initial_magmoms")
"""Arrays of a structure that results may depend on, to ASE."""


def _calculate(self: Any, atoms: Any = None, properties: Any = None, system_changes: Any = None) -> None:
    """Computes all that the step gives, or whatever the calculator itself does."""
    from ase.calculators.calculator import Calculator, all_changes

    state: StepState = vars(self)[_STATE]
    system = None if atoms is None else state.begin(self, atoms)
    if system is None:
        self._came_as.calculate(self, atoms, properties, all_changes if system_changes is None else system_changes)
        return
    self.results = {}  # those of before, should this fail
    Calculator.calculate(self, atoms)
    self.results = state.finish(self, system)


def _check_state(self: Any, atoms: Any, tol: float = 1e-15) -> list[str]:
    """What has changed since the last calculation."""
    changes = None if self.ignored_changes else quick_changes(self.atoms, atoms, tol)
    return self._came_as.check_state(self, atoms, tol) if changes is None else changes


def quick_changes(last: Any, atoms: Any, tol: float) -> list[str] | None:
    """What differs between two structures: ASE's answer, which takes it longer than a step of a few atoms.

    None where ASE has to be asked, because there is none of before or one holds what the other does not.
    """
    if last is None or last.info or atoms.info or last.arrays.keys() != atoms.arrays.keys():
        return None
    pairs = {"cell": (last.cell.array, atoms.cell.array), "pbc": (last.pbc, atoms.pbc)}
    pairs |= {name: (last.arrays[name], atoms.arrays[name]) for name in _COMPARED if name in atoms.arrays}
    return [name for name, (a, b) in pairs.items() if a.shape != b.shape or not _close(a, b, tol)]


def _close(a: NDArray[Any], b: NDArray[Any], tol: float) -> bool:
    return bool((a == b).all()) or (a.dtype == np.float64 and bool((np.abs(a - b) <= tol).all()))


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    _, _, *state = self._came_as.__reduce_ex__(self, protocol)
    return _blank, (self._came_as, type(self).check_state is _check_state), *state


def make_stepped(calculator: Any, kind: ModelKind) -> None:
    """Has a calculator compute by a step, unless it does so already."""
    if step_state(calculator) is None and kind.stepping is not None:
        vars(calculator)[_STATE] = StepState(kind, patient=True)  # structures that come only once need no recording
        came_as = type(calculator)
        calculator.__class__ = _stepped_class(came_as, came_as is library_class(calculator, kind.stepping))


def restore_calculator(calculator: Any) -> None:
    """Gives a calculator its own class back."""
    if step_state(calculator) is not None:
        calculator.__class__ = calculator._came_as
        del vars(calculator)[_STATE]


def step_state(calculator: Any) -> KeptStep | None:
    """What the step of a calculator keeps that computes by one; None for others."""
    state: KeptStep | None = getattr(calculator, _STATE, None)
    return state


def _stepped_class(came_as: type, is_of_library: bool) -> type:
    contents = {name: getattr(came_as, name) for name in ("__module__", "__qualname__", "__doc__")}
    contents |= {"_came_as": came_as, "calculate": _calculate, "__reduce_ex__": _reduce}
    if is_of_library:
        contents["check_state"] = _check_state
    # A second base would be laid out otherwise, and objects could not change to the class.
    return type(came_as.__name__, (came_as,), contents)


def _blank(came_as: type, is_of_library: bool) -> Any:
    """An object that a copy or an unpickled calculator is filled into."""
    stepped: Any = _stepped_class(came_as, is_of_library)
    return stepped.__new__(stepped)


def find_calculators(target: Any, kinds: Sequence[ModelKind]) -> Iterator[tuple[str, Any, ModelKind]]:
    """The calculators in what a user handed over that a kind of model knows: path, calculator, kind."""
    for path, calculator in _calculators_in(target, ""):
        for kind in kinds:
            if kind.stepping is not None and library_class(calculator, kind.stepping):
                yield path, calculator, kind
                break


def find_steps(target: Any) -> Iterator[tuple[str, Any, KeptStep]]:
    """The calculators in what a user handed over that compute by a step: path, calculator, what the step keeps."""
    for path, calculator in _calculators_in(target, ""):
        state = step_state(calculator)
        if state is not None:
            yield path, calculator, state


def _calculators_in(target: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What is neither a module nor a list, in the order in which a user sees it, with its path."""
    if isinstance(target, nn.Module):
        return
    if isinstance(target, (list, tuple)):
        members = {str(number): member for number, member in enumerate(target)}
    else:
        yield path, target
        members = combined_calculators(target)
    for name, member in members.items():
        yield from _calculators_in(member, f"{path}.{name}".lstrip("."))


def library_class(calculator: Any, stepping: Stepping) -> type | None:
    """The class of a library's calculators that an object is of, whatever is derived from it; None if it is of none."""
    came_as = getattr(type(calculator), "_came_as", type(calculator))
    names = (stepping.library, stepping.class_name)
    return next((cls for cls in came_as.__mro__ if (package_of(cls), cls.__name__) == names), None)


def overridden(calculator: Any, stepping: Stepping, methods: Sequence[str]) -> str:
    """Which of these methods of a library's a calculator has changed, as an obstacle; empty if none."""
    own, came_as = library_class(calculator, stepping), getattr(type(calculator), "_came_as", type(calculator))
    assert own is not None
    return changed_method(calculator, came_as, own, methods)


def types_of(numbers: NDArray[np.int64], table: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """What a library's models call the elements of a structure, (num_atoms,).

    Args:
        numbers: Atomic numbers, (num_atoms,).
        table: For each atomic number its type, or a negative one for an element that the models do not know.

    Raises:
        StructureError: If there is an element that they do not know.
    """
    inside = (numbers >= 0) & (numbers < len(table))
    types = np.where(inside, table[np.where(inside, numbers, 0)], -1)
    if (types < 0).any():
        known, wrong = np.flatnonzero(table >= 0).tolist(), sorted(set(numbers[types < 0].tolist()))
        raise StructureError(f"atoms: expected elements that the model knows (atomic numbers {known}), got {wrong}")
    return types.astype(np.int64)


def voigt(stress: NDArray[Any]) -> NDArray[Any]:
    """A symmetric (3, 3) tensor as ASE writes it: xx, yy, zz, yz, xz, xy."""
    return stress[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
