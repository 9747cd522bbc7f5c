"""What a calculator computes with: a model, which may change between two calls, or an exported file."""

from __future__ import annotations

import copy
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eqaccel.errors import CalculatorError, ExportError
from eqaccel.integrations.export import Exported, load_exported, open_model
from eqaccel.integrations.export.digest import read_digest
from eqaccel.integrations.export.loading import parse_device, read_metadata
from eqaccel.integrations.export.sources import chosen_dtype, chosen_head, single_model
from eqaccel.patches import ModelKind, ReportRow, patch, unpatch
from eqaccel.patches.following import FollowedStep, step_note
from eqaccel.patches.precision import LowPrecision, precision_of
from eqaccel.patches.replacement import Entrance
from eqaccel.patches.torch_state import frozen, model_device
from eqaccel.step import Outcome, Step, System


@dataclass(frozen=True)
class PatchOptions:
    """What `eqaccel.patch` is told of a model that is not patched yet; see there."""

    verify: bool
    deterministic: bool
    low_precision: Collection[LowPrecision]

    def check_file(self, file: Path) -> None:
        """Raises `CalculatorError` if something is asked for that a file cannot become."""
        if self.low_precision:
            raise CalculatorError(
                f"low_precision: expected none for '{file}', which is as precise as the model was that it was exported "
                f"from, got {self.low_precision!r}; leave it out, or export eqaccel.patch(model, low_precision=...)"
            )

    def check_patched(self, model: nn.Module) -> None:
        """The same of a model that came patched."""
        has = precision_of(model)
        if set(self.low_precision) - set(has):
            raise CalculatorError(
                f"low_precision: expected none but what the model was patched with ({', '.join(has) or 'none'}), got "
                f"{self.low_precision!r}; call eqaccel.unpatch(model) first, or leave it out"
            )


class Source(ABC):
    """A potential, and the steps that evaluate it: one for structures by themselves, one for many at once.

    Args:
        family: The kind of model, as in exported files: "mace", ...
        head: Name of the head that computes.
        cutoff: Angstrom.
        type_names: Name of each type of atom.
        skin: See `eqaccel.Calculator`.

    Attributes:
        has_model: Whether there is a module that can be patched, trained and moved.
        model: That module.
        low_precision: What is less precise in a file, see `eqaccel.patch`; empty where there is a module.
    """

    has_model: bool
    model: nn.Module | None
    low_precision: tuple[LowPrecision, ...] = ()

    def __init__(self, family: str, head: str, cutoff: float, type_names: list[str], skin: float | None) -> None:
        self.family, self.head, self.cutoff, self.type_names, self.skin = family, head, cutoff, type_names, skin
        self._calls = self._batches = 0
        self._batch_step: Step | None = None

    @abstractmethod
    def step(self) -> Step:
        """The step for structures by themselves; raises `CalculatorError` if the model cannot be computed."""

    @property
    @abstractmethod
    def _last_step(self) -> Step | None:
        """The step as it was made last, whatever the model has become since; None if none is there."""

    def changed(self) -> bool:
        """Whether the model has changed since it was last computed."""
        return False

    def begin(self, system: System) -> None:
        """Has a GPU begin with what will be evaluated, on the guess that the model is as it was; see `Step.begin`."""
        if self._last_step is not None:
            self._last_step.begin(system)

    def evaluate(self, system: System) -> Outcome:
        """Energies, forces and virials of one structure; raises `StructureError` if it cannot be computed."""
        outcome = self.step()(system)
        self._calls += 1
        return outcome

    def evaluate_many(self, system: System) -> Outcome:
        """The same of a system of several structures."""
        step, many = self.step(), self._batch_step
        if many is None or many.potentials != step.potentials:
            many = Step(step.potentials, step.cutoff, step.device, step.dtype, skin=self.skin, patient=True)
            self._batch_step = many
        outcome = many(system)
        self._batches += 1
        return outcome

    def rows(self, calculator: Any) -> list[ReportRow]:
        """What a report says of the steps."""
        kind = type(calculator).__name__
        found = [ReportRow("calculate", kind, True, self._note())]
        if self._batches:
            found.append(ReportRow("batch", kind, True, step_note(self._batch_step, self._batches)))
        return found

    @abstractmethod
    def _note(self) -> str:
        """What a report says of the step for structures by themselves."""


class ModelSource(Source):
    """A patched model. A copy of it has a model of its own.

    Args:
        model: The model.
        kind: Its kind, which can be exported.
        head: Number of the head that computes.
        skin: See `Source`.

    Raises:
        ExportError: If the energy of the model does not depend on the structure alone.
    """

    has_model = True

    def __init__(self, model: nn.Module, kind: ModelKind, head: int, skin: float | None) -> None:
        exporting = kind.exporting
        assert exporting is not None
        exporting.check(model)
        names = exporting.heads(model)[head], kind.extent(model)[0], exporting.type_names(model)
        super().__init__(kind.name.lower(), *names, skin)
        self.model: nn.Module = model
        self._kind, self._number = kind, head
        self._followed = FollowedStep(kind, skin, patient=True)

    def step(self) -> Step:
        """See `Source.step`; made anew if the model has changed."""
        obstacle = self._followed.follow([self.model], self._number, self.cutoff)
        step = self._followed.step
        if step is None and obstacle.startswith("model: "):  # one that cannot be exported either
            raise CalculatorError(obstacle)
        if step is None:
            raise CalculatorError(
                f"model: expected a patched model with nothing added to it, but {obstacle}; call "
                f"eqaccel.patch(calculator.model), or take away what was added"
            )
        return step

    @property
    def _last_step(self) -> Step | None:
        return self._followed.step

    def changed(self) -> bool:
        """See `Source.changed`."""
        return self._followed.changed()

    def _note(self) -> str:
        return step_note(self._followed.step, self._calls, self._followed.renewals)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSource:
        return ModelSource(copy.deepcopy(self.model, memo), self._kind, self._number, self.skin)

    def __reduce__(self) -> tuple[Any, ...]:
        if type(self.model).__module__.startswith("<torch_package"):
            raise pickle.PicklingError(
                "a model out of a package has classes that no other process knows; make a calculator of the package "
                "there, or one of the file that eqaccel.export(calculator, path) writes, which can be pickled"
            )
        return ModelSource, (self.model, self._kind, self._number, self.skin)


class FileSource(Source):
    """An exported file, opened. Copies share what was opened; a pickled one opens the file again.

    Args:
        file: The file.
        exported: What it holds.
        device: Where that is.
        skin: See `Source`.
    """

    has_model = False
    model = None

    def __init__(self, file: Path, exported: Exported, device: torch.device, skin: float | None) -> None:
        metadata = exported.metadata
        names = metadata.get("family", "exported"), metadata.get("head", "Default")
        super().__init__(*names, metadata["cutoff"], metadata["type_names"], skin)
        self.low_precision = tuple(metadata.get("low_precision", ()))
        self._opened = file, exported, device, skin
        self._digest = read_digest(file)
        dtype = getattr(torch, metadata["dtype"])
        self._step = Step([exported], self.cutoff, device, dtype, skin=skin, patient=True)

    def step(self) -> Step:
        """See `Source.step`."""
        return self._step

    @property
    def _last_step(self) -> Step | None:
        return self._step

    def _note(self) -> str:
        return (
            f"{self._opened[0].name}, an exported file of a {self.family} model; {step_note(self._step, self._calls)}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FileSource:
        return FileSource(*self._opened)

    def __reduce__(self) -> tuple[Any, ...]:
        file, exported, device, skin = self._opened
        native = exported.metadata["kind"] == "aotinductor" or bool(exported.metadata["precompiled"])
        return _reopen, (str(file.resolve()), self._digest, str(device), skin, native)


def _reopen(file: str, digest: bytes, device: str, skin: float | None, allow_native_code: bool) -> FileSource:
    path = Path(file)
    if not path.is_file() or read_digest(path) != digest:
        raise CalculatorError(
            f"model: expected '{file}' as it was when the calculator was pickled, but it is missing or was written "
            f"anew; make a new calculator"
        )
    place = torch.device(device)
    return FileSource(path, load_exported(path, place, allow_native_code=allow_native_code), place, skin)


def open_source(
    model: str | os.PathLike[str] | nn.Module,
    *,
    device: torch.device | str,
    dtype: torch.dtype | str | None,
    head: str | None,
    skin: float | None,
    options: PatchOptions,
    allow_native_code: bool,
) -> Source:
    """Opens what a user hands over; see `Calculator`."""
    try:
        if isinstance(model, nn.Module):
            return _of_model(model, device, dtype, head, skin, options)
        if not isinstance(model, (str, os.PathLike)):
            raise CalculatorError(
                f"model: expected the name of a file or a torch.nn.Module, got {type(model).__name__}; of a calculator "
                f"pass the model in it, or make it fast itself with eqaccel.patch(calculator)"
            )
        file = Path(model)
        if file.is_file() and read_digest(file):
            options.check_file(file)
            return _of_file(file, device, dtype, head, skin, allow_native_code)
        opened = frozen(open_model(file)).eval()
        return _of_model(opened, device, dtype, head, skin, options)
    except ExportError as error:
        raise CalculatorError(str(error)) from error


def _of_model(
    target: nn.Module,
    device: torch.device | str,
    dtype: torch.dtype | str | None,
    head: str | None,
    skin: float | None,
    options: PatchOptions,
) -> ModelSource:
    model, kind, exporting = single_model(target)
    number = chosen_head(exporting.heads(model), head)
    own = model_device(model)
    place = _place(device, own if own.type == "cuda" else None)
    exporting.move(model, place, chosen_dtype(dtype, kind.dtype(model)))
    came_patched = isinstance(model, Entrance)
    if came_patched:
        options.check_patched(model)
    else:
        patch(model, verify=options.verify, deterministic=options.deterministic, low_precision=options.low_precision)
    try:
        source = ModelSource(model, kind, number, skin)
        source.step()
    except BaseException:
        if not came_patched:
            unpatch(model)
        raise
    return source


def _of_file(
    file: Path,
    device: torch.device | str,
    dtype: torch.dtype | str | None,
    head: str | None,
    skin: float | None,
    allow_native_code: bool,
) -> FileSource:
    metadata = read_metadata(file)
    place = _place(device, torch.device("cpu") if metadata["kind"] == "aotinductor" else None)
    own = getattr(torch, metadata["dtype"])
    if chosen_dtype(dtype, own) != own:
        raise CalculatorError(
            f"dtype: '{file}' was exported in {own}, got {dtype}; leave dtype out, or export the model in that dtype"
        )
    chosen_head([metadata.get("head", "Default")], head)
    return FileSource(file, load_exported(file, place, allow_native_code=allow_native_code), place, skin)


def _place(device: torch.device | str, own: torch.device | None) -> torch.device:
    """The device of a name; for "auto" `own` if there is one, else a GPU if torch sees one."""
    if device == "auto":
        return own or torch.device(*(("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else ("cpu",)))
    place = parse_device(device)
    if place.type == "cpu":
        return place
    count = torch.cuda.device_count()
    if (place.index or 0) >= count:
        raise CalculatorError(
            f"device: expected 'auto', 'cpu' or one of the GPUs that torch sees ({count} here), got '{place}'"
        )
    return torch.device("cuda", torch.cuda.current_device()) if place.index is None else place
