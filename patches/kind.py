"""What a kind of model is: one class that recognises its models and runs them, with what is made of them as abilities.

A kind says everything that eqaccel has to know of a library of models. Its class, a `ModelKind`, recognises a model and
runs it on a structure; a `ModuleKind` that is no `ModelKind` knows modules, and not what they are run on. `Swapping`
says which modules of it are replaced, `Exporting` turns it into a module for files, `Stepping` speaks for the ASE
calculators of its library, `Wrapping` for the wrappers by which torch-sim runs its models, and `Training` for how
programs that train call them.
Each kind has a folder here, and a place in the table of `eqaccel.patches.finder`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from eqaccel.errors import ExportError
from eqaccel.o3.origins import package_of
from eqaccel.patches.batch import Batch, Extent, Field, Per
from eqaccel.patches.potential import Potential
from eqaccel.patches.precision import Options
from eqaccel.patches.replacement import Replacement, Swap
from eqaccel.patches.report import ReportRow
from eqaccel.patches.structures import Structure
from eqaccel.prepare import model_dtype
from eqaccel.step import Outcome, System

Outputs = dict[str, Tensor]
"""What a model predicts, by names that all kinds share: energy, node_energy, forces, stress, ..."""

Constants = Callable[[], NDArray[np.float64]]
"""Gives energies of isolated atoms."""


def class_names(module: object) -> set[str]:
    """Names of the class of an object and of all its bases: how models are recognised without importing theirs."""
    return {cls.__name__ for cls in type(module).__mro__}


def classes_of(library: str, module: object) -> set[str]:
    """Those of `class_names` that are a library's, and not of another package that has named its own alike.

    Args:
        library: The package of the classes; a copy of it that came in a file of torch.package counts.
        module: The object.
    """
    return {cls.__name__ for cls in type(module).__mro__ if package_of(cls) == library}


_COMPUTING = frozenset({"forward", "__call__", "_preprocess"})
"""Methods by which a module of a library computes, `_preprocess` in SevenNet's sequences."""


def own_methods(module: nn.Module, library: str, names: Collection[str]) -> str:
    """Why a module may compute something else than the classes of a library do; empty if it computes just that.

    What stands in for such a module has to know the very methods. A class that derives from one of these classes has
    them as long as it overrides none, whatever name it has; what eqaccel makes of a class counts as that class.

    Args:
        module: A module, or what is in its place.
        library: The package of the classes.
        names: Of the classes.
    """
    if not isinstance(module, nn.Module) or not _COMPUTING.isdisjoint(vars(module)):
        return f"{type(module).__name__} is not one of {library}'s own modules as it came"
    for cls in type(module).__mro__:
        package = package_of(cls)
        if package == library and cls.__name__ in names:
            return ""
        changed = sorted(_COMPUTING & vars(cls).keys())
        if changed and package != "eqaccel":
            return f"{cls.__name__} has a {changed[0]} method of its own"
    return f"{type(module).__name__} is no {' or '.join(sorted(names))} of {library}"


def changed_method(instance: Any, cls: type, own: type, methods: Collection[str]) -> str:
    """Which of some methods of an object is not the one that a library wrote; empty if all are.

    Args:
        instance: The object; methods may have been put into it, or into its class.
        cls: Its class, as it came.
        own: The library's class, which the other one is or derives from.
        methods: Their names.
    """
    for name in methods:
        method = getattr(own, name, None)
        is_put_in = name in vars(instance) or (method is not None and package_of(method) != package_of(own))
        if is_put_in or getattr(cls, name, None) is not method:
            return f"{cls.__name__} has a {name} method of its own"
    return ""


class ModuleKind(ABC):
    """One kind of module that `patch` takes.

    Attributes:
        name: What users call it; in small letters, the `family` of exported files.
        swapping: Which modules of a model are replaced.
        exporting: How a model becomes a file; None if that is not possible.
        stepping: How the ASE calculators of the kind's library compute; None if it has none that eqaccel knows.
        wrapping: How torch-sim's wrappers of the models compute; None if it has none that eqaccel knows.
        training: How models are called in a step of training; None if no GPU can record that.
        file_format: The files of its own that the kind's library writes; None if it has none besides `torch.save`.
    """

    name: str
    swapping: Swapping
    exporting: Exporting | None = None
    stepping: Stepping | None = None
    wrapping: Wrapping | None = None
    training: Training | None = None
    file_format: FileFormat | None = None

    @abstractmethod
    def recognises(self, model: nn.Module) -> bool:
        """Whether the model is of this kind; must not raise."""

    def has_compiled_itself(self, model: nn.Module) -> bool:
        """Whether the model has compiled itself, so that its modules cannot be changed any more."""
        return False

    def dtype(self, model: nn.Module) -> torch.dtype:
        """The floating-point type that the model computes in."""
        return model_dtype(model)


class ModelKind(ModuleKind):
    """One kind of model of atoms: how to recognise it and how to run it.

    Attributes:
        ranks: Cartesian rank of each output that must turn with the structure (0 invariant, 1 vector, 2 tensor).
    """

    ranks: Mapping[str, int]

    @abstractmethod
    def extent(self, model: nn.Module) -> tuple[float, int]:
        """The cutoff of a model in angstrom, and the number of elements that it knows."""

    @abstractmethod
    def inputs(self, model: nn.Module, structure: Structure, head: int = 0) -> dict[str, Any]:
        """What the model's own library would hand to it for one structure; on the device of the model.

        Args:
            model: The model.
            structure: The structure.
            head: Number of the head that computes, for models with several.

        Returns:
            New tensors: a model may write into them and switch on their gradients.
        """

    @abstractmethod
    def run(
        self, model: nn.Module, structure: Structure, head: int = 0, training: bool = False
    ) -> tuple[Outputs, Tensor]:
        """Runs the model for all that it predicts with first derivatives.

        Args:
            model: The model.
            structure: The structure.
            head: As `inputs` takes it.
            training: Whether to run it as a training step does, so that the outputs can be differentiated once more.

        Returns:
            Outputs by name, and the positions that they depend on, a leaf.
        """

    def evaluate(self, model: nn.Module, structure: Structure, head: int = 0) -> Outputs:
        """Runs the model as a simulation does; returns its outputs by name, detached, in float64 on the CPU."""
        outputs, _ = self.run(model, structure, head)
        return {name: output.detach().to("cpu", torch.float64) for name, output in outputs.items()}


class Swapping(ABC):
    """Which modules of a kind of model are replaced, and what a report says of them."""

    @abstractmethod
    def swaps(self, model: nn.Module, options: Options) -> list[Swap]:
        """Checks the whole model and builds the replacements; the model is not changed.

        Args:
            model: The model.
            options: How they are to be replaced.

        Raises:
            AlreadyPatchedError: If the model is accelerated already.
            PatchError: If it holds something that cannot be replaced.
        """

    @abstractmethod
    def rows(self, model: nn.Module) -> list[ReportRow]:
        """What is and what is not accelerated in a model, patched or not."""


class Exporting(ABC):
    """How a kind of model becomes a `Potential`, the module in an exported file."""

    @abstractmethod
    def accepts(self, model: nn.Module) -> bool:
        """Whether the model predicts what files hold, the energies of atoms; must not raise."""

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Raises `ExportError` unless the model is patched and its energy depends on the structure alone."""

    def heads(self, model: nn.Module) -> list[str]:
        """Names of the heads of the model."""
        return ["Default"]

    @abstractmethod
    def type_names(self, model: nn.Module) -> list[str]:
        """Name of each type of atom, in the order of the indices."""

    @abstractmethod
    def constants(self, model: nn.Module, head: int) -> Tensor:
        """Energies of isolated atoms, (num_types,) in eV, in the digits that the model has, or zeros."""

    @abstractmethod
    def potential(self, model: nn.Module, head: int, constants: Tensor) -> Potential:
        """Turns a copy of the model, which is used up, into a module that can be scripted."""

    def move(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Moves a model to a device and a floating-point type; raises `ExportError` if it has only its own."""
        return model.to(device, dtype)


class Stepping(ABC):
    """How the ASE calculators of a kind's library compute, in words of `eqaccel.step`.

    Attributes:
        library: The package of their class.
        class_name: Name of their class.
    """

    library: str
    class_name: str

    @abstractmethod
    def obstacle(self, calculator: Any) -> str:
        """Why the calculator, as it is set up now, has to compute in its own way; empty if it need not."""

    @abstractmethod
    def models(self, calculator: Any) -> list[nn.Module]:
        """Its models, all of the same cutoff, device and dtype."""

    def head(self, calculator: Any) -> int:
        """Number of the head of the models that computes."""
        return 0

    @abstractmethod
    def cutoff(self, calculator: Any) -> float:
        """Angstrom."""

    @abstractmethod
    def types(self, calculator: Any, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """What the models call the elements, (num_atoms,); raises `StructureError` for one that they do not know."""

    @abstractmethod
    def results(self, calculator: Any, system: System, outcome: Outcome, constants: Constants) -> dict[str, Any]:
        """What the calculator's own `calculate` would put into its `results`.

        Args:
            calculator: The calculator.
            system: The structure.
            outcome: What its models give, in eV and angstrom.
            constants: Gives (num_types,), energies of isolated atoms that the first model adds; zeros if it is another
                part of the model that adds them. It waits for a GPU.
        """


class Wrapping(ABC):
    """How torch-sim's wrappers of a kind of model compute, in words of `eqaccel.step`.

    Attributes:
        class_name: Name of their class, with its module.
        stepping: Of the same kind: what it reads of calculators has the same names in wrappers, but for what is
            overridden here.
    """

    class_name: str
    stepping: Stepping

    @abstractmethod
    def obstacle(self, wrapper: Any) -> str:
        """Why the wrapper, as it is set up now, has to compute in its own way; empty if it need not."""

    def model(self, wrapper: Any) -> nn.Module:
        """Its model."""
        model: nn.Module = wrapper.model
        return model

    def head(self, wrapper: Any) -> int:
        """Number of the head of the model that computes."""
        return self.stepping.head(wrapper)

    def cutoff(self, wrapper: Any) -> float | Tensor:
        """Angstrom; where the wrapper has a tensor, that very tensor."""
        return self.stepping.cutoff(wrapper)

    def types(self, wrapper: Any, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """What the model calls the elements, (num_atoms,); raises `StructureError` for one that it does not know."""
        return self.stepping.types(wrapper, numbers)

    def dtype(self, wrapper: Any) -> torch.dtype:
        """Of all results."""
        return model_dtype(self.model(wrapper))

    @abstractmethod
    def stress(self, virials: Tensor, volumes: Tensor) -> Tensor:
        """Stresses as the wrapper gives them, (num_structures, 3, 3) float64, without waiting for the device.

        Args:
            virials: (num_structures, 3, 3) float64, derivatives of energies in the strain, eV.
            volumes: (num_structures, 1, 1) float64, determinants of cells, which may be zero or negative.
        """


class Training(ABC):
    """How the models of a kind are called in a step of training, in words of `eqaccel.training`.

    Attributes:
        fields: How the inputs lie that a model may read.
        outputs: What there is an entry for in what a model gives; what is not named here is not given.
        receiver_row: Row of the edge index that holds the receivers.
        gives_inputs: Whether a model gives what it has read as well.
    """

    gives_inputs: bool = False
    fields: Mapping[str, Field]
    outputs: Mapping[str, Per]
    receiver_row: int

    @abstractmethod
    def obstacle(self, model: nn.Module) -> str:
        """Why no call of the model can be recorded; empty if it can."""

    @abstractmethod
    def batch(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch | str | None:
        """What a call is made with; why that cannot be recorded; or None, if it belongs to no step of training."""

    @abstractmethod
    def blank(self, model: nn.Module, batch: Batch, room: Extent) -> dict[str, Tensor]:
        """Inputs like those of a batch, for a structure of blank atoms that fills a room."""

    @abstractmethod
    def call(
        self, forward: Callable[..., Mapping[str, Any]], inputs: dict[str, Tensor], options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Calls a model, by its `forward`, with inputs and options of a batch."""

    def read(self, inputs: Mapping[str, Any], options: Mapping[str, Any], extent: Extent) -> Batch | str:
        """A batch of those inputs that a model may read; or why it cannot be recorded."""
        found = {name: value for name, value in inputs.items() if name in self.fields}
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.grad_fn is not None:
                return f"its '{name}' is no tensor, or depends on others that may need gradients"
            if value.size(self.fields[name].dim) != self.fields[name].length(extent):
                return f"its '{name}' has {value.size(self.fields[name].dim)} rows for {extent}"
        detached = {name: value.detach() for name, value in found.items()}
        return Batch(detached, extent, tuple(sorted(options.items())))

    def zeros(self, batch: Batch, room: Extent) -> dict[str, Tensor]:
        """Zeros like the inputs of a batch, as many as fill a room."""
        zeros = {}
        for name, value in batch.inputs.items():
            shape = list(value.shape)
            shape[self.fields[name].dim] = self.fields[name].length(room)
            zeros[name] = value.new_zeros(shape)
        return zeros


class FileFormat(ABC):
    """A format of files that hold whole models, which a kind's library writes.

    Attributes:
        name: What messages call such a file.
    """

    name: str

    @abstractmethod
    def matches(self, file: Path) -> bool:
        """Whether a file, which is there, is in this format."""

    @abstractmethod
    def load(self, file: Path) -> Any:
        """The model in a file; raises whatever goes wrong. Runs code of the file."""

    def pretrained(self, name: str) -> Path | None:
        """The file of a model that the library has under a name; None if it has none.

        The library may download it; raises whatever goes wrong there.
        """
        return None


def check_replaced(path: str, convolution: nn.Module) -> None:
    """Raises `ExportError` unless a convolution is replaced now; `path` is where it is in the model."""
    if isinstance(convolution, Replacement):
        convolution.update()
    if not isinstance(convolution, Replacement):
        raise ExportError(
            f"model: expected a patched model, got {path} = {type(convolution).__name__}; call eqaccel.patch(model) "
            f"first"
        )


def check_own_methods(path: str, module: nn.Module, library: str, names: Collection[str]) -> None:
    """Raises `ExportError` unless a module computes just what a class of a library does, see `own_methods`."""
    reason = own_methods(module, library, names)
    if reason:
        raise ExportError(
            f"model: expected {path} to compute what {library}'s own {' or '.join(sorted(names))} does, but {reason}; "
            f"use the model from Python"
        )
