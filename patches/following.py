"""A step that follows models: it is made anew when they have changed, whatever it is that has changed.

Parameters, buffers, modules, devices and types of a model may change between two calls, by training, by `unpatch` or by
hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from eqaccel.errors import ExportError
from eqaccel.patches.agreement import check_agreement
from eqaccel.patches.copying import duplicated
from eqaccel.patches.kind import ModelKind
from eqaccel.patches.potential import Potential
from eqaccel.patches.precision import LowPrecision
from eqaccel.patches.program import HostPotential
from eqaccel.patches.report import ReportRow
from eqaccel.patches.scripting import script
from eqaccel.patches.torch_state import default_dtype, model_device
from eqaccel.patches.watch import Watch
from eqaccel.step import Evaluation, PotentialFunction, Step

Kept = TypeVar("Kept", bound=Evaluation)


@dataclass
class Followed(ABC, Generic[Kept]):
    """The step of some models. A copy of it starts empty.

    Attributes:
        kind: The kind of the models.
        skin: See `Evaluation`.
        patient: See `Step`.
        step: The step; None until it is first needed, and after the models have changed.
        renewals: How often the models had changed.
    """

    kind: ModelKind
    skin: float | None = None
    patient: bool = False
    step: Kept | None = None
    renewals: int = 0
    _watch: Watch | None = None
    _settings: tuple[Any, ...] = ()
    _constants: Tensor | None = None

    def constants(self) -> NDArray[np.float64]:
        """Energies of isolated atoms that the first model adds, (num_types,), as they are now; there has to be a step.

        It waits for a GPU.
        """
        assert self._constants is not None
        return self._constants.to("cpu", torch.float64).numpy()

    def follow(self, models: Sequence[nn.Module], head: int, cutoff: float) -> str:
        """Makes the step anew if models or settings have changed; returns what keeps it from being made."""
        settings = (tuple(map(id, models)), tuple(map(type, models)), head, cutoff)
        if self.step is not None and self._settings == settings and not self.changed():
            return ""
        self.renewals += self.step is not None
        self.drop()
        watch = Watch(models)
        if watch.obstacle:
            return watch.obstacle
        device, dtype = model_device(models[0]), self.kind.dtype(models[0])
        try:
            potentials = [shared_potential(self.kind, model, head) for model in models]
            for model, potential in zip(models, potentials, strict=True):
                check_agreement(self.kind, model, head, potential)
        except ExportError as error:
            return str(error)
        functions: list[PotentialFunction] = [*potentials]
        if device.type == "cpu":
            programs = [partial(shared_program, self.kind, model, head) for model in models]
            functions = list(map(HostPotential, potentials, programs))
        self.step = self.make(functions, cutoff, device, dtype)
        self._constants = potentials[0].constants
        self._watch, self._settings = watch, settings
        return ""

    @abstractmethod
    def make(
        self, potentials: Sequence[PotentialFunction], cutoff: float, device: torch.device, dtype: torch.dtype
    ) -> Kept:
        """A step of such potentials."""

    def drop(self) -> None:
        """Lets go of the step, when it has come to an end with what it has begun."""
        if self.step is not None:
            self.step.cancel()
        self.step = None

    def changed(self) -> bool:
        """Whether the models may have changed since the step was made; so of a copy, which has made none."""
        return self._watch is None or not self._watch.holds()

    def __deepcopy__(self, memo: dict[int, Any]) -> Followed[Kept]:
        return type(self)(self.kind, self.skin, self.patient)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.skin, self.patient)


@dataclass
class FollowedStep(Followed[Step]):
    """The step of some models, for systems on the host."""

    def make(
        self, potentials: Sequence[PotentialFunction], cutoff: float, device: torch.device, dtype: torch.dtype
    ) -> Step:
        """See `Followed.make`."""
        return Step(potentials, cutoff, device, dtype, skin=self.skin, patient=self.patient)


@dataclass
class Reported(Followed[Kept]):
    """The step of an object of a library's, which goes its ordinary way where the step cannot be taken.

    Attributes:
        method: The method of the object that computes by the step.
        has_model: Whether the object holds its models as modules.
        obstacle: Why the last call went the ordinary way; empty if it did not.
        calls: Calls that the step has computed.
    """

    method: ClassVar[str]
    has_model: ClassVar[bool] = True
    low_precision: tuple[LowPrecision, ...] = ()  # that of its modules is asked for there
    obstacle: str = ""
    calls: int = 0
    _types: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """Atomic numbers of the last system, and what the models call them."""

    def note(self) -> str:
        """How the last call was computed."""
        return (
            f"the ordinary way: {self.obstacle}" if self.obstacle else step_note(self.step, self.calls, self.renewals)
        )

    def rows(self, holder: Any) -> list[ReportRow]:
        """What a report says of the step of an object."""
        return [ReportRow(self.method, type(holder).__name__, not self.obstacle, self.note())]


def step_note(step: Evaluation | None, calls: int, renewals: int = 0) -> str:
    """What a report says of a step."""
    if step is None:
        return "neighbours kept for several steps; nothing computed yet"
    captures = ", ".join(f"{count} for {reason}" for reason, count in step.captures.items())
    how = f"recorded as a CUDA graph ({captures})" if captures else "neighbours kept for several steps"
    if step.not_captured and step.device.type != "cpu":
        how += f", no CUDA graph: {step.not_captured}"
    if step.shares_weights:
        how += ", weights of edges made once a pair of atoms"
    notes = sorted({potential.note for potential in step.potentials if isinstance(potential, HostPotential)} - {""})
    how = ", ".join([how, *notes])
    changes = f", {renewals} changes of the model" if renewals else ""
    return f"{how}; {calls} calls, {step.rebuilds} lists of neighbours{changes}"


def shared_potential(kind: ModelKind, model: nn.Module, head: int) -> Potential:
    """A potential of the parameters and buffers of a model, which stays as it is.

    It reads them where they are, in each call, so that whatever is written there counts. Parameters that are trained
    are there as tensors without gradients, in the same memory: no step has a use for them.

    Raises:
        ExportError: If the model is none whose energy depends on the structure alone.
    """
    with _bare_potential(kind, model, head) as potential:
        potential.make_piecewise()
        return potential


def shared_program(kind: ModelKind, model: nn.Module, head: int) -> torch.jit.ScriptModule:
    """The same as a program of TorchScript.

    Raises:
        ExportError: If there is no such potential, or a part of it cannot be scripted.
    """
    with _bare_potential(kind, model, head) as potential:
        potential.make_scriptable()
        return script(potential)


@contextmanager
def _bare_potential(kind: ModelKind, model: nn.Module, head: int) -> Iterator[Potential]:
    """A potential to be finished inside, where torch makes tensors that fit the model."""
    exporting = kind.exporting
    if exporting is None or not exporting.accepts(model):
        raise ExportError(f"{type(model).__name__} does not predict the energies of atoms")
    exporting.check(model)
    with torch.inference_mode(False), default_dtype(kind.dtype(model)):
        others = (member for module in model.modules() for member in vars(module).values())
        held = chain(model.parameters(), model.buffers(), (other for other in others if isinstance(other, Tensor)))
        tensors = {id(tensor): _untrained(tensor) for tensor in held}
        duplicate = duplicated(model, tensors)
        constants = exporting.constants(model, head).to(model_device(model))
        yield exporting.potential(duplicate, head, constants).eval()


def _untrained(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad or not tensor.is_leaf:
        return tensor
    return Tensor._make_subclass(type(tensor), tensor.detach(), False)
